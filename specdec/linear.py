"""Linear layers on a handful of tokens, whose time is that of reading the weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

MOST_TOKENS = 16
"""Up to so many tokens the kernel of `triton_linear` runs, beyond it the library's."""
_HALF = (torch.float16, torch.bfloat16)


@torch.library.custom_op("specdec::few_tokens_linear", mutates_args=())
def few_tokens_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, I], weight [O, I] -> x · weightᵀ [T, O], summed in float32. Weight must not change while it runs."""
    if x.is_cuda and len(x) <= MOST_TOKENS and x.dtype in _HALF:
        from specdec.triton_linear import fits, launch_linear

        if fits(x, weight):
            return launch_linear(x, weight)
    return F.linear(x, weight)


@few_tokens_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
