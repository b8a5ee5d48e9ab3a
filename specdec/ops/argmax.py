"""The most probable token of every row of logits."""

from __future__ import annotations

import torch

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@torch.library.custom_op("specdec::greedy_ids", mutates_args=())
def greedy_ids(logits: torch.Tensor) -> torch.Tensor:
    """logits [T, V] -> [T] int64, as `argmax(-1)`: the first of equal ones (on CUDA a NaN counts as infinity)."""
    if _has_kernel(logits):
        from attention.kernels.together import CompiledAtOnce
        from specdec.ops.argmax_kernel import launch_greedy

        with CompiledAtOnce():  # tokens are indices
            return launch_greedy(logits)
    return logits.argmax(-1)


@greedy_ids.register_fake
def _(logits: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def greedy_drafts(logits: torch.Tensor, target_ids: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Like `greedy_ids`; out [T] int64 of any stride gets target_ids [V] int64 of them, or the same where that is None.

    The kernels that find them write both. Not for compiled code: the compiler is not told of `out`.
    """
    if _has_kernel(logits):
        from attention.kernels.together import CompiledAtOnce
        from specdec.ops.argmax_kernel import launch_greedy

        with CompiledAtOnce():  # tokens are indices
            return launch_greedy(logits, target_ids, out)
    ids = greedy_ids(logits)
    out.copy_(ids if target_ids is None else target_ids[ids])
    return ids


def _has_kernel(logits: torch.Tensor) -> bool:
    return logits.is_cuda and logits.dtype in _DTYPES and bool(logits.shape[0]) and logits.stride(1) == 1
