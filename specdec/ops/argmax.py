"""The most probable token of every row of logits."""

from __future__ import annotations

import torch

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@torch.library.custom_op("specdec::greedy_ids", mutates_args=())
def greedy_ids(logits: torch.Tensor) -> torch.Tensor:
    """logits [T, V] -> [T] int64, as `argmax(-1)`: the first of equal ones (on CUDA a NaN counts as infinity)."""
    if logits.is_cuda and logits.dtype in _DTYPES and logits.shape[0] and logits.stride(1) == 1:
        from attention.kernels.together import CompiledAtOnce
        from specdec.ops.argmax_kernel import launch_greedy

        with CompiledAtOnce():  # tokens are indices
            return launch_greedy(logits)
    return logits.argmax(-1)


@greedy_ids.register_fake
def _(logits: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)
