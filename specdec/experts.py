"""Mixtures of experts inside CUDA graphs.

transformers' grouped matmul needs bfloat16 under torch.compile: for any other dtype it reads the group sizes back to
the host, which no graph can hold. Its batched matmul copies the weights of every (token, expert) pair before it
multiplies. `paired_experts` is written so that the compiler fuses the look-up into the product: each pair's weights are
read once, where they lie. It wins while there are few pairs; with many, tokens share experts, and the grouped matmul
reads each of them once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

CAPTURABLE = "specdec"
MOST_PAIRS = 32
"""Up to so many (token, expert) pairs the paired form is the faster one. DeepSeek-V2-Lite's experts on an H200, µs a
layer at 1, 4, 8 and 32 tokens of 6 experts: paired 50, 161, 308, 1164; grouped 87, 187, 270, 432; batched 88, 317, 609,
2331; reading each expert once 24, 87, 145, 250."""


def capturable_experts(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The faster form that needs nothing from the host; see `paired_experts` for the arguments.

    Compiled code is specialised for either side of the limit.
    """
    if hidden.dtype == torch.bfloat16 and index.shape[0] * index.shape[1] > MOST_PAIRS:
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, hidden, index, weights)
    return paired_experts(experts, hidden, index, weights)


def paired_experts(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One product a (token, expert) pair; the arguments are those of transformers' experts interface.

    Args:
        experts: a module with stacked weights, as transformers' `use_experts_implementation` describes it.
        hidden: [T, H]; index: [T, k] int64; weights: [T, k].

    Returns:
        [T, H], dtype of `hidden`.
    """
    kind = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _multiply(experts, kind, hidden[:, None], index)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = _multiply(experts, "down_proj", inner, index)  # [T, k, H]
    return (out * weights[..., None]).sum(1).to(hidden.dtype)


def _multiply(experts: Any, kind: str, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x [T, k or 1, I] times the chosen experts' matrices -> [T, k, O], summed in float32."""
    stack = getattr(experts, kind)[index]  # [T, k, O, I], or [T, k, I, O] when transposed
    if experts.is_transposed:
        stack = stack.transpose(-1, -2)
    product = (stack.float() * x.unsqueeze(-2).float()).sum(-1).to(x.dtype)
    return product + getattr(experts, f"{kind}_bias")[index] if experts.has_bias else product


def mixtures(*roots: nn.Module) -> list[Any]:
    """The modules with stacked experts under `roots` whose implementation transformers lets one choose."""
    return [m for root in roots for m in root.modules() if hasattr(m, "has_gate") and hasattr(m, "is_transposed")]


@contextmanager
def using_capturable_experts(*roots: nn.Module) -> Iterator[None]:
    """Run the mixtures under `roots` in a form that a graph can hold; the models' own comes back after."""
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
