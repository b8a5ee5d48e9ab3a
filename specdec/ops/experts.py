"""Mixtures of experts inside CUDA graphs, in half precision and in FP8: each chosen expert's weights are read once.

transformers' grouped matmul needs bfloat16 under torch.compile: for any other dtype it reads the group sizes back to
the host, which no graph can hold. Its batched matmul copies the weights of every (token, expert) pair first. Here
weights are read in place, and nothing is read back. SwiGLU experts are grouped (`specdec.ops.routed`), others
multiplied pair by pair. In bfloat16 transformers' grouped matmul stays where these have many tokens, or SwiGLU experts
whose matrices lie transposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from attention.backends.limits import HALF
from attention.hf.custom_op import opaque_operator
from specdec.ops.fp8 import fp8_quantise, reference_matmul, unrounded_linear
from specdec.ops.routed import routed_experts

CAPTURABLE = "specdec"
_SILU = (nn.SiLU, SiLUActivation)
MOST_PAIRS = 1024
"""Up to this many pairs the paired form of other experts is faster than transformers' grouped matmul.

DeepSeek-V2-Lite's experts in bfloat16 on an H200, µs per layer at 1, 4, 8, 32 and 128 tokens of 6 experts: SwiGLU
experts 31, 95, 153, 254, 277, grouping included; paired 33, 98, 157, 261, 371, its two matmuls alone; transformers'
grouped 87, 187, 270, 432, 445, and batched 88, 317, 609, 2331. Each chosen expert read once: 24, 85, 144, 251, 261."""

MOST_GROUPED = 16_384
"""The same of SwiGLU experts whose matrices lie transposed (gpt-oss in bfloat16)."""


def capturable_experts(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The fastest form that needs nothing from the host; see `paired_experts` for the arguments.

    Compiled code is specialised for either side of the limit, if any.
    """
    most = _most_pairs(experts, hidden.dtype)
    if most is not None and index.shape[0] * index.shape[1] > most:
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, hidden, index, weights)
    grouped = grouped_swiglu(experts, hidden, index, weights)
    return paired_experts(experts, hidden, index, weights) if grouped is None else grouped


def _most_pairs(experts: Any, dtype: torch.dtype) -> int | None:
    """Pairs beyond which transformers' grouped matmul is used; None: no limit."""
    grouped = _gating(experts) is not None
    if dtype != torch.bfloat16 or (grouped and not experts.is_transposed):
        return None
    return MOST_GROUPED if grouped else MOST_PAIRS


def grouped_swiglu(
    experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor | None:
    """A mixture of SwiGLU experts in half precision by `routed_experts`; None where it is another one."""
    gating = _gating(experts)
    if gating is None:
        return None
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if experts.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    biases = (experts.gate_up_proj_bias, experts.down_proj_bias) if experts.has_bias else (None, None)
    out = routed_experts(hidden, index, gate_up, down, None, None, *biases, *gating)
    return weighted_sum(_normed(experts, out), weights)


def _normed(experts: Any, out: torch.Tensor) -> torch.Tensor:
    """[T, k, H]: what a mixture's norm makes of its experts' results, where it has one (Muse Spark)."""
    normed: torch.Tensor = experts.post_expert_norm(out) if getattr(experts, "has_post_expert_norm", False) else out
    return normed


def weighted_sum(out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """out [T, k, H], weights [T, k] -> [T, H] of the dtype of `out`, summed in a fixed order."""
    return (out * weights[..., None]).sum(1).to(out.dtype)


def _gating(experts: Any) -> tuple[bool, float, float | None] | None:
    """`interleaved`, `alpha` and `limit` of `routed_experts`; None where a mixture is not SwiGLU in half precision."""
    if experts.down_proj.dtype not in HALF:
        return None
    if isinstance(experts, GptOssExperts):
        return True, float(experts.alpha), float(experts.limit)
    plain = experts.has_gate and experts.is_concatenated and not experts.has_bias and not experts.is_transposed
    own_gate = type(experts)._apply_gate.__name__ == "_default_apply_gate" if plain else False
    return (False, 1.0, None) if own_gate and isinstance(experts.act_fn, _SILU) else None


def paired_experts(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One matmul per (token, expert) pair, with the arguments of transformers' experts interface.

    experts: a module with stacked weights, as transformers' `use_experts_implementation` describes it. hidden: [T, H];
    index: [T, k] int64; weights: [T, k]. The result: [T, H], dtype of `hidden`.
    """
    kind = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _multiply(experts, kind, hidden[:, None], index)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = _normed(experts, _multiply(experts, "down_proj", inner, index))  # [T, k, H]
    return (out * weights[..., None]).sum(1).to(hidden.dtype)


def _multiply(experts: Any, kind: str, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x [T, k or 1, I] times the chosen experts' matrices -> [T, k, O], summed in float32."""
    stack = getattr(experts, kind)  # [E, O, I], or [E, I, O] when transposed
    out = expert_matmul(x, stack.transpose(-1, -2) if experts.is_transposed else stack, index)
    return out + getattr(experts, f"{kind}_bias")[index] if experts.has_bias else out


@opaque_operator(lambda x, stack, index: x.new_empty(*index.shape, stack.shape[1]))
def expert_matmul(x: torch.Tensor, stack: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x [T, 1 or k, I], stack [E, O, I], index [T, k] int64 -> stack[index] · x [T, k, O], summed in float32."""
    if not x.is_cuda:
        return (stack[index].float() * x.unsqueeze(-2).float()).sum(-1).to(x.dtype)
    from specdec.ops.experts_kernel import LAUNCH_PAIRS, launch_expert_matmul

    out = x.new_empty(*index.shape, stack.shape[1])
    tokens = LAUNCH_PAIRS // index.shape[1]
    for start in range(0, len(index), tokens):
        part = slice(start, start + tokens)
        # Contiguous: the kernel takes flat rows of x and a flat index, and strides only for the stack.
        launch_expert_matmul(x[part].contiguous(), stack, index[part].contiguous(), out[part])
    return out


def form_in_words(experts: Any) -> str:
    """Which kernels serve a mixture in rounds from graphs."""
    if hasattr(experts, "down_proj_blocks"):
        return "grouped; MXFP4 unpacked to 16 bits in registers, and in memory for long prompts on Hopper"
    if hasattr(experts, "down_proj_scale_inv"):
        return "grouped, in FP8" if experts.has_gate and _is_plain_fp8(experts) else "pair by pair, in FP8"
    if experts.down_proj.dtype not in HALF:
        return "pair by pair"
    own = "pair by pair" if _gating(experts) is None else "grouped"
    most = _most_pairs(experts, experts.down_proj.dtype)
    return own if most is None else f"{own}; transformers' grouped_mm beyond {most:,} pairs"


def mixtures(*roots: nn.Module) -> list[Any]:
    """The modules with stacked experts under `roots` whose implementation can be chosen in transformers."""
    return [m for root in roots for m in root.modules() if hasattr(m, "has_gate") and hasattr(m, "is_transposed")]


@contextmanager
def using_capturable_experts(*roots: nn.Module) -> Iterator[None]:
    """Run the mixtures under `roots` in a form that a graph can hold; the models' own form is restored afterwards."""
    # By id: configurations are not hashable, and equal ones of two models are both set.
    configs = list({id(m.config): m.config for m in mixtures(*roots)}.values())
    before = [config._experts_implementation for config in configs]
    try:
        for config in configs:
            config._experts_implementation = CAPTURABLE
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            config._experts_implementation = old


ALL_EXPERTS_FUNCTIONS.register(CAPTURABLE, capturable_experts)


def fp8_experts(
    experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, rounds: bool = True
) -> torch.Tensor:
    """A mixture in FP8, with the arguments of transformers' experts interface. Pairs are summed in float32.

    Args:
        experts: a module of transformers' FP8Experts: `gate_up_proj` or `up_proj`, and `down_proj`, each [E, O, I] in
            e4m3 with scales [E, O/128, I/128].
        hidden: [T, H]; index: [T, k] int64; weights: [T, k]. The result: [T, H], dtype of `hidden`.
        rounds: round activations to 8 bits. False, for tests: see `specdec.ops.fp8.unrounded_linear`.
    """
    if rounds and experts.has_gate and hidden.dtype in HALF and _is_plain_fp8(experts):
        scales = experts.gate_up_proj_scale_inv, experts.down_proj_scale_inv
        stacks = experts.gate_up_proj, experts.down_proj
        return weighted_sum(routed_experts(hidden, index, *stacks, *scales, None, None, False, 1.0, None), weights)
    kind = "gate_up_proj" if experts.has_gate else "up_proj"
    multiply = _multiply_fp8 if rounds else _multiply_unrounded
    inner = multiply(experts, kind, hidden[:, None], index)  # [T, k, F or 2·F]
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = multiply(experts, "down_proj", inner, index)  # [T, k, H]
    weighted = out * weights[..., None].to(out.dtype)
    return (weighted if out.dtype == torch.float64 else weighted.float()).sum(1).to(hidden.dtype)


def _is_plain_fp8(experts: Any) -> bool:
    """Whether a mixture in FP8 is SwiGLU without clamps and caps."""
    other = (getattr(experts, name, None) for name in ("swiglu_alpha", "limit", "gate_softcap"))
    return isinstance(experts.act_fn, _SILU) and all(value is None for value in other)


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


@opaque_operator(
    lambda x, x_scale, stack, stack_scale, index, dtype: x.new_empty(*index.shape, stack.shape[1], dtype=dtype)
)
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
        stack: [E, O, I] e4m3; stack_scale: [E, ⌈O/128⌉, ⌈I/128⌉] float32; index: [T, k] int64. dtype: the result's.
    """
    out = x.new_empty(*index.shape, stack.shape[1], dtype=dtype)
    if x.is_cuda:
        from specdec.ops.experts_kernel import launch_fp8_expert_matmul

        launch_fp8_expert_matmul(x, x_scale, stack, stack_scale, index, out)
        return out
    width = index.shape[1]
    for expert in index.unique().tolist():
        token, place = (index == expert).nonzero(as_tuple=True)
        chosen = token, place if x.shape[1] == width else torch.zeros_like(place)
        out[token, place] = reference_matmul(x[chosen], x_scale[chosen], stack[expert], stack_scale[expert], dtype)
    return out
