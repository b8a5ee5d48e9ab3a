"""A router's choice as a Triton kernel, a program a token. Imported on CUDA only, and by tests in the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.launch import CompiledAtOnce, dependent_launch, wait_for_predecessor

_FLIP, _LEAST = tl.constexpr(0x7FFFFFFF), tl.constexpr(-(2**63))
_ONE_WARP = 512


@triton.jit
def _best_experts_kernel(  # type: ignore[no-untyped-def]
    scores_ptr,  # [T, E], columns side by side
    weight_ptr,  # [T, k], written
    place_ptr,  # [T, k] int64, written
    experts, row_stride,
    CHOSEN: tl.constexpr, SOFTMAX: tl.constexpr, NORMALISE: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    there = expert < experts
    score = tl.load(scores_ptr + token * row_stride + expert, mask=there, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        score = tl.exp(score - tl.max(score, 0))
        score = score / tl.sum(score, 0)
    bits = score.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & _FLIP)  # integers in the order of the floats, NaN above all
    key = (order.to(tl.int64) << 32) | (EXPERTS - expert)  # of equal scores the first
    key = tl.where(there, key, _LEAST)
    slot = tl.arange(0, PADDED)
    best = tl.full((PADDED,), float("-inf"), tl.float32)
    place = tl.zeros((PADDED,), tl.int64)
    for i in tl.static_range(CHOSEN):
        top = tl.max(key, 0)
        key = tl.where(key == top, _LEAST, key)
        found = (top >> 32).to(tl.int32)
        found = (found ^ ((found >> 31) & _FLIP)).to(tl.float32, bitcast=True)
        best = tl.where(slot == i, found, best)
        place = tl.where(slot == i, EXPERTS - (top & 0xFFFFFFFF), place)
    real = slot < CHOSEN
    if NORMALISE == "softmax":
        best = tl.exp(best - tl.max(best, 0))
    if NORMALISE != "":
        best = best / tl.sum(tl.where(real, best, 0.0), 0)
    to = token * CHOSEN + slot
    tl.store(weight_ptr + to, best.to(weight_ptr.dtype.element_ty), mask=real)
    tl.store(place_ptr + to, place, mask=real)


def launch_best_experts(
    scores: torch.Tensor, chosen: int, softmax: bool, normalise: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.ops.routing.best_experts`."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    tokens, experts = scores.shape
    weights = scores.new_empty(tokens, chosen, dtype=dtype)
    places = scores.new_empty(tokens, chosen, dtype=torch.int64)
    if tokens:
        with CompiledAtOnce():  # places in memory
            _best_experts_kernel[(tokens,)](
                scores, weights, places, experts, scores.stride(0), CHOSEN=chosen, SOFTMAX=softmax,
                NORMALISE=normalise, EXPERTS=triton.next_power_of_2(experts),
                PADDED=triton.next_power_of_2(chosen), num_warps=1 if experts <= _ONE_WARP else 4,
                **dependent_launch(scores.device),
            )  # fmt: skip
    return weights, places
