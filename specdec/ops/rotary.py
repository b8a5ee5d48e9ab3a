"""Rotary embedding of queries and keys in half precision, in the form of transformers' models and of draft heads."""

from __future__ import annotations

import torch


@torch.library.custom_op("specdec::rotated", mutates_args=())
def rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [1, Hq, T, D], key [1, Hkv, T, D], cos and sin [1, 1, T, D], all of one half-precision dtype -> rotated.

    Dimension i is paired with i + D/2: x · cos + (-x₂, x₁) · sin. Computed in float32 and rounded once, as the compiler
    does it; eager code rounds the two terms as well. The memory layout of the results is [T, H, D].
    Source: transformers, models/llama/modeling_llama.py (apply_rotary_pos_emb).
    """
    if query.is_cuda:
        from specdec.ops.rotary_kernel import launch_rotation

        outs = token_major(query), token_major(key)
        launch_rotation(query, key, cos, sin, outs)
        return outs
    return _rotate_plain(query, cos, sin), _rotate_plain(key, cos, sin)


@rotated.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return token_major(query), token_major(key)


@torch.library.custom_op("specdec::rotated_together", mutates_args=())
def rotated_together(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """query [T, Hq, D], key [T, Hkv, D] in half precision, cos and sin [T, 1, D/2] float32 -> [T, Hq + Hkv, D].

    Both rotated, in one tensor, as `drafters.rope.rotate` gives of both side by side: computed in float32 and rounded
    once.
    """
    (tokens, query_heads, dim), key_heads = query.shape, key.shape[1]
    out = query.new_empty(tokens, query_heads + key_heads, dim)
    query, key, cos, sin = (x.transpose(0, 1)[None] for x in (query, key, cos, sin))
    outs = out[:, :query_heads].transpose(0, 1)[None], out[:, query_heads:].transpose(0, 1)[None]
    if query.is_cuda:
        from specdec.ops.rotary_kernel import launch_rotation

        launch_rotation(query, key, cos, sin, outs)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        for rotated_part, part in zip(outs, (query, key), strict=True):
            rotated_part.copy_(_rotate_plain(part, cos, sin))
    return out


@rotated_together.register_fake
def _(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1] + key.shape[1], query.shape[2])


def token_major(x: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor like x [1, H, T, D] whose memory layout is [T, H, D]."""
    _, heads, tokens, dim = x.shape
    return x.new_empty(1, tokens, heads, dim).transpose(1, 2)


def _rotate_plain(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    half_rotated = torch.cat((-second, first), -1)
    return token_major(x).copy_(x.float() * cos.float() + half_rotated * sin.float())
