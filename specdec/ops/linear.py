"""Linear layers on a handful of tokens, where reading the weight takes all the time."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.backends.limits import HALF
from attention.hf.custom_op import opaque_operator
from specdec.ops.gemm import chosen_launch

MOST_TOKENS = 16
"""Most tokens of the kernel in `linear_kernel`."""
MOST_TOKENS_BIASED = 96
"""Up to this many tokens, and where the sum is at least as long as the output is wide, a bias of zeros is added: torch
then calls cuBLASLt, where cuBLAS would use split-K with a second kernel for the reduction. µs on an H200 with 48
tokens: 4,096 x 14,336 32.5 against 36.6, 4,096 x 12,288 30.3 and 34.1, 4,096 x 4,096 12.5 and 13.8; with 128 tokens
40.1 and 37.9, 37.9 and 33.6, 15.0 and 14.9. Wide matmuls take as long either way."""


@opaque_operator(lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))
def few_tokens_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I], weight [O, I] -> x · weightᵀ [T, O], summed in float32. Weight must not change while it runs.

    More tokens than the kernel takes run by the algorithm that was chosen for the shape, if any.
    """
    if x.is_cuda and x.dtype in HALF:
        if len(x) <= MOST_TOKENS:
            from specdec.ops.linear_kernel import fits, launch_linear

            if fits(x, weight):
                return launch_linear(x, weight)
        elif (launch := chosen_launch(x, weight)) is not None:
            return launch(x, weight)
    return usual_product(x, weight)


def usual_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I], weight [O, I] -> x · weightᵀ [T, O] by whatever algorithm the library takes."""
    few = MOST_TOKENS < len(x) <= MOST_TOKENS_BIASED and weight.shape[0] <= weight.shape[1]
    if few and x.is_cuda and x.dtype in HALF:
        return torch.addmm(_zeros(len(weight), x.dtype, x.device), x, weight.t())
    return F.linear(x, weight)


@opaque_operator(lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]))
def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] or None -> [T, O]; a token's result does not depend on T.

    Raises:
        ValueError: tensors that are neither in half precision nor in float32, or not on a GPU.
    """
    if not x.is_cuda or x.dtype not in (*HALF, torch.float32):
        raise ValueError(f"batch-invariant matmuls are for 16 and 32 bits on a GPU, not {x.dtype} on {x.device}")
    from specdec.ops.linear_kernel import fits, launch_invariant_linear, launch_linear

    if bias is None and x.dtype in HALF:  # both sum in the same order
        if len(x) <= MOST_TOKENS and fits(x, weight):
            return launch_linear(x, weight)
        if (launch := chosen_launch(x, weight, invariant=True)) is not None:
            return launch(x, weight)
    return launch_invariant_linear(without_gaps(x), without_gaps(weight), bias)


def without_gaps(x: Tensor) -> Tensor:
    """x [T, I] with the values of a row side by side; a copy where they are not."""
    return x if x.stride(1) == 1 else x.contiguous()


@cache
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached for all callers, in inference mode or not
        return torch.zeros(size, dtype=dtype, device=device)
