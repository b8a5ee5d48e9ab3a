"""Greedy rows on a GPU: the arg max of every row of logits. Their drafts and acceptance: `greedy_kernel`."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.hf.custom_op import opaque_operator

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@opaque_operator(lambda logits: logits.new_empty(logits.shape[0], dtype=torch.int64))
def greedy_ids(logits: Tensor) -> Tensor:
    """logits [T, V] -> [T] int64, as `argmax(-1)`: the first of equal ones (on CUDA a NaN counts as infinity)."""
    if logits.is_cuda and _has_kernel(logits):
        from specdec.ops.greedy_kernel import launch_greedy

        return launch_greedy(logits)
    # On a CPU, argmax of 16 bits takes 6 times as long as max, which returns the first of equal ones, too.
    return logits.max(-1).indices if logits.device.type == "cpu" else logits.argmax(-1)


def greedy_drafts(logits: Tensor, target_ids: Tensor | None, out: Tensor) -> Tensor:
    """Like `greedy_ids`; out [T] int64 of any stride gets their target ids (target_ids [V] int64; None: the same ids).

    The same kernels write both. Not for compiled code, which would not know that `out` is written.
    """
    if _has_kernel(logits):
        from specdec.ops.greedy_kernel import launch_greedy

        return launch_greedy(logits, target_ids, out)
    ids = greedy_ids(logits)
    out.copy_(ids if target_ids is None else target_ids[ids])
    return ids


def _has_kernel(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype in _DTYPES and bool(logits.shape[0]) and logits.stride(1) == 1
