"""MLA (multi-head latent attention) in absorbed form: the cache holds one latent vector per token, not the heads' K, V.

Keys and values of all heads are linear in a shared latent c [c_kv], with per-head matrices W_UK and W_UV, plus one
rotary key k_pe shared by the heads. Since q·(W_UK c) = (W_UKᵀ q)·c, the query is projected to the latent space
instead of the keys out of it, and W_UV is applied after attention. To a kernel this is one KV head of width
c_kv + d_rope whose value is the first c_kv columns of its key.

    DeepSeek-V3: 128 heads, c_kv 512, d_rope 64: 576 cached numbers per token instead of 128·(192 + 128) = 40,960.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1; the projections are transformers' (`kv_b_proj`, `expand_kv`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from attention.hf.patches import Value
from attention.hf.weights import computes_plainly
from attention.spec import AttentionSpec


@dataclass(frozen=True)
class AbsorbedAttention:
    """The absorbed form of one transformers attention module; reads the module's weights at every call.

    Attributes:
        module: has `kv_b_proj` and `expand_kv`. latent_dim: width of the latent, c_kv.
        nope_dim: width of a head's query and key without rotary embedding; value_dim: width of its value.
    """

    module: nn.Module
    nope_dim: int
    value_dim: int
    latent_dim: int

    def absorb_query(self, query: Tensor) -> Tensor:
        """query [Hq, T, nope + d_rope] -> [T, Hq, c_kv + d_rope]: the part without rotary goes to latent space."""
        nope, rope = query.split([self.nope_dim, query.shape[-1] - self.nope_dim], dim=-1)
        latent = torch.bmm(nope, self._up_projections()[:, : self.nope_dim])  # [Hq, T, c_kv]
        return torch.cat([latent, rope], dim=-1).transpose(0, 1)

    def project_output(self, attended: Tensor) -> Tensor:
        """attended latents [T, Hq, c_kv] -> head outputs [T, Hq, Dv]."""
        up = self._up_projections()[:, self.nope_dim :]  # [Hq, Dv, c_kv]
        return torch.bmm(attended.transpose(0, 1), up.transpose(1, 2)).transpose(0, 1)

    def attention_spec(self, expanded: AttentionSpec) -> AttentionSpec:
        """The AttentionSpec of the absorbed form, derived from the expanded form's. The scale is unchanged."""
        latent = self.latent_dim
        rope = expanded.head_dim_k - self.nope_dim
        return replace(expanded, num_kv_heads=1, head_dim_k=latent + rope, head_dim_v=latent, value_in_key=True)

    def _up_projections(self) -> Tensor:
        """[Hq, nope + Dv, c_kv]: W_UK and W_UV of each head."""
        weight: Tensor = self.module.kv_b_proj.weight  # type: ignore[union-attr, assignment]
        return weight.view(-1, self.nope_dim + self.value_dim, self.latent_dim)


def absorbed_attention(module: nn.Module) -> AbsorbedAttention | None:
    """The absorbed form of an attention module, or None when it has none.

    None for ordinary attention, and for a `kv_b_proj` that cannot be read as a plain matrix (quantised, hooked, or with
    a bias): such a model runs expanded.
    """
    up = getattr(module, "kv_b_proj", None)
    if not hasattr(type(module), "expand_kv") or up is None or not computes_plainly(up) or up.bias is not None:
        return None
    if up._forward_hooks or up._forward_pre_hooks:
        return None
    nope, value, latent = (int(getattr(module, n)) for n in ("qk_nope_head_dim", "v_head_dim", "kv_lora_rank"))
    return AbsorbedAttention(module, nope, value, latent)


def unexpanded(layers: Iterable[AbsorbedAttention]) -> tuple[Value, ...]:
    """Attributes that make the modules return the latent instead of expanded K and V, to be `borrowed` for one forward.

    The module's own `expand_kv` is shadowed on the instance and visible again afterwards, so that the model's own
    `generate` is unchanged.
    """
    return tuple((layer.module, "expand_kv", _keep_latent) for layer in layers)


def _keep_latent(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces `expand_kv`: [1, 1, T, c_kv] and [1, 1, T, d_rope] -> key [1, 1, T, c_kv + d_rope], value."""
    return torch.cat([kv_nope, k_rot], dim=-1), kv_nope
