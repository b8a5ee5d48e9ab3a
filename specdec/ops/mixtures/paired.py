"""Experts of any kind as one matmul per (token, expert) pair and projection: whatever is no SwiGLU of `routed`.

Weights are read in place: half precision, float32, or blocks in FP8. The activation is the module's own code.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attention.hf.custom_op import opaque_operator
from specdec.ops.fp8 import unrounded_linear
from specdec.ops.mixtures.routed import by_expert, times


def paired_experts(experts: Any, hidden: Tensor, index: Tensor, rounds: bool) -> Tensor:
    """The chosen experts' results, not yet weighted: [T, k, H], dtype of `hidden`.

    Args:
        experts: a module with stacked weights, as transformers' `use_experts_implementation` describes it; or
            FP8Experts.
        hidden: [T, H]; index: [T, k] int64.
        rounds: round activations to 8 bits where weights are in FP8. False, for tests: see
            `specdec.ops.fp8.unrounded_linear`.
    """
    inner = _multiply(experts, "gate_up_proj" if experts.has_gate else "up_proj", hidden[:, None], index, rounds)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    return _multiply(experts, "down_proj", inner, index, rounds)


def projection(experts: Any, name: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A mixture's matrices [E, O, I], their scales and their biases [E, O], if any. MXFP4: see `routed_experts`."""
    if hasattr(experts, f"{name}_blocks"):
        stack = getattr(experts, f"{name}_blocks").flatten(-2)
        scale = getattr(experts, f"{name}_scales")
    else:
        stack = getattr(experts, name)
        scale = getattr(experts, f"{name}_scale_inv", None)
    transposed = getattr(experts, "is_transposed", False)  # then they lie as [E, I, O]
    return stack.transpose(1, 2) if transposed else stack, scale, getattr(experts, f"{name}_bias", None)


def _multiply(experts: Any, name: str, x: Tensor, index: Tensor, rounds: bool) -> Tensor:
    """x [T, k or 1, I] times the chosen experts' matrices, plus their biases -> [T, k, O]."""
    stack, scale, bias = projection(experts, name)
    if scale is None or rounds:
        out = expert_matmul(x, stack, scale, index)
        return out if bias is None else out + bias[index]
    out = x.new_empty(*index.shape, stack.shape[1])
    for expert, own, pairs in by_expert(x, index):
        out[pairs] = unrounded_linear(own, stack[expert], scale[expert])
    return out


@opaque_operator(lambda x, stack, scale, index: x.new_empty(*index.shape, stack.shape[1]))
def expert_matmul(x: Tensor, stack: Tensor, scale: Tensor | None, index: Tensor) -> Tensor:
    """stack[index] · x [T, k, O], dtype of x, summed in float32.

    Args:
        x: [T, 1 or k, I]. In FP8 its rows are rounded to 8 bits as `fp8_quantise` does.
        stack: [E, O, I] of the dtype of x, any strides; or e4m3 with scale [E, ⌈O/128⌉, ⌈I/128⌉] float32, contiguous.
        index: [T, k] int64, distinct experts of a token.
    """
    if x.is_cuda:
        from specdec.ops.mixtures.routed_kernel import launch_expert_matmul

        return launch_expert_matmul(x, stack, scale, index)
    out = x.new_empty(*index.shape, stack.shape[1])
    for expert, own, pairs in by_expert(x, index):
        out[pairs] = times(own, stack[expert], None if scale is None else scale[expert])
    return out
