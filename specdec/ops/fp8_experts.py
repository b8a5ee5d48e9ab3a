"""Mixtures of experts whose weights are in fine-grained FP8: each chosen expert's weights are read once, in 8 bits.

As `specdec.ops.experts.paired_experts`, with the arithmetic of `specdec.ops.fp8`. Nothing is sorted and nothing read
back to the host, so eager code and graphs run the same form.
"""

from __future__ import annotations

from typing import Any

import torch

from specdec.ops.fp8 import fp8_quantise, reference_matmul, unrounded_linear


def fp8_experts(
    experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, rounds: bool = True
) -> torch.Tensor:
    """The arguments are those of transformers' experts interface; pairs are summed in float32, as its FP8Experts does.

    Args:
        experts: a module of transformers' FP8Experts: `gate_up_proj` or `up_proj`, and `down_proj`, each [E, O, I] in
            e4m3 with scales [E, O/128, I/128].
        hidden: [T, H]; index: [T, k] int64; weights: [T, k].
        rounds: whether activations are rounded to 8 bits; not for tests, see `specdec.ops.fp8.unrounded_linear`: one
            expert after the other then, which are read back to the host.

    Returns:
        [T, H], dtype of `hidden`.
    """
    kind = "gate_up_proj" if experts.has_gate else "up_proj"
    multiply = _multiply_fp8 if rounds else _multiply_unrounded
    inner = multiply(experts, kind, hidden[:, None], index)  # [T, k, F or 2·F]
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = multiply(experts, "down_proj", inner, index)  # [T, k, H]
    weighted = out * weights[..., None].to(out.dtype)
    return (weighted if out.dtype == torch.float64 else weighted.float()).sum(1).to(hidden.dtype)


def _multiply_fp8(experts: Any, kind: str, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x [T, 1 or k, I] times the chosen experts' matrices -> [T, k, O]."""
    quantised, scales = fp8_quantise(x.flatten(0, 1))
    shape = x.shape[:2]
    stack, stack_scale = getattr(experts, kind), getattr(experts, f"{kind}_scale_inv")
    return fp8_expert_matmul(
        quantised.unflatten(0, shape), scales.unflatten(0, shape), stack, stack_scale, index, x.dtype
    )


def _multiply_unrounded(experts: Any, kind: str, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """As `_multiply_fp8`."""
    stack, stack_scale = getattr(experts, kind), getattr(experts, f"{kind}_scale_inv")
    x = x.expand(-1, index.shape[1], -1)
    out = x.new_empty(*index.shape, stack.shape[1])
    for expert in index.unique().tolist():
        chosen = index == expert
        out[chosen] = unrounded_linear(x[chosen], stack[expert], stack_scale[expert])
    return out


@torch.library.custom_op("specdec::fp8_expert_matmul", mutates_args=())
def fp8_expert_matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    stack: torch.Tensor,
    stack_scale: torch.Tensor,
    index: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """stack[index] · x [T, k, O], summed as `specdec.ops.fp8.fp8_matmul` sums.

    Args:
        x: [T, 1 or k, I] e4m3; x_scale: [T, 1 or k, ⌈I/128⌉] float32.
        stack: [E, O, I] e4m3; stack_scale: [E, ⌈O/128⌉, ⌈I/128⌉] float32; index: [T, k] int64. dtype: of the result.
    """
    out = x.new_empty(*index.shape, stack.shape[1], dtype=dtype)
    if x.is_cuda:
        from specdec.ops.fp8_experts_kernel import launch_fp8_expert_matmul

        launch_fp8_expert_matmul(x, x_scale, stack, stack_scale, index, out)
        return out
    width = index.shape[1]
    for expert in index.unique().tolist():
        token, place = (index == expert).nonzero(as_tuple=True)
        chosen = token, place if x.shape[1] == width else torch.zeros_like(place)
        out[token, place] = reference_matmul(x[chosen], x_scale[chosen], stack[expert], stack_scale[expert], dtype)
    return out


@fp8_expert_matmul.register_fake
def _(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    stack: torch.Tensor,
    stack_scale: torch.Tensor,
    index: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty(*index.shape, stack.shape[1], dtype=dtype)
