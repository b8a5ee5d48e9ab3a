"""Which form a mixture of experts takes inside CUDA graphs: each chosen expert's weights are read once.

transformers' grouped matmul needs bfloat16 under torch.compile: for any other dtype it reads the group sizes back to
the host, which no graph can hold. Its batched matmul copies the weights of every (token, expert) pair first. Here
weights are read in place, and nothing is read back. SwiGLU experts are grouped (`routed`), in half precision, FP8 and
MXFP4; others multiplied pair by pair (`paired`). In bfloat16 transformers' grouped matmul stays where these have many
tokens, or SwiGLU experts whose matrices lie transposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from attention.backends.limits import HALF
from specdec.ops.fp8 import FP8
from specdec.ops.mixtures import PLAIN, Gating
from specdec.ops.mixtures.paired import paired_experts, projection
from specdec.ops.mixtures.routed import routed_experts

CAPTURABLE = "specdec"
_SILU = (nn.SiLU, SiLUActivation)
MOST_PAIRS = 1024
"""Up to this many pairs the paired form of other experts is faster than transformers' grouped matmul.

DeepSeek-V2-Lite's experts in bfloat16 on an H200, µs per layer at 1, 4, 8, 32 and 128 tokens of 6 experts: SwiGLU
experts 31, 95, 153, 254, 277, grouping included; paired 33, 98, 157, 261, 371, its two matmuls alone; transformers'
grouped 87, 187, 270, 432, 445, and batched 88, 317, 609, 2331. Each chosen expert read once: 24, 85, 144, 251, 261."""

MOST_GROUPED = 16_384
"""The same of SwiGLU experts whose matrices lie transposed (gpt-oss in bfloat16)."""


def capturable_experts(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The fastest form that needs nothing from the host; see `own_form` for the arguments.

    Compiled code is specialised for either side of the limit, if any.
    """
    most = _most_pairs(experts, hidden.dtype)
    if most is not None and index.shape[0] * index.shape[1] > most:
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, hidden, index, weights)
    return own_form(experts, hidden, index, weights)


def own_form(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor, rounds: bool = True) -> Tensor:
    """A mixture in the form of its weights, with the arguments of transformers' experts interface.

    Args:
        experts: a module with stacked weights, as transformers' `use_experts_implementation` describes it; FP8Experts,
            with weights in e4m3 and their scales; or `Mxfp4Experts`.
        hidden: [T, H]; index: [T, k] int64; weights: [T, k]. The result: [T, H], dtype of `hidden`.
        rounds: see `paired_experts`.
    """
    gating = gating_of(experts)
    packed = hasattr(experts, "down_proj_blocks")
    if gating is None or not rounds or not (packed or hidden.dtype in HALF):
        out = paired_experts(experts, hidden, index, rounds)
    else:
        gate_up, scale, bias = projection(experts, "gate_up_proj")
        down, down_scale, down_bias = projection(experts, "down_proj")
        out = routed_experts(hidden, index, gate_up, down, scale, down_scale, bias, down_bias, *gating)
    if getattr(experts, "has_post_expert_norm", False):  # Muse Spark
        out = experts.post_expert_norm(out)
    return summed(out * weights[..., None]).to(out.dtype)


def summed(out: Tensor) -> Tensor:
    """[T, k, H] weighted outputs of a token's experts -> [T, H] in float32 or wider, from the first to the last.

    Compiled, these additions are one pass over `out`. A sum over k was a reduction whose loads lie H apart: 2.1 ms a
    layer of 8,192 tokens and ten experts on an H200, where memory allows 0.1.
    """
    wide = torch.promote_types(out.dtype, torch.float32)
    first, *others = out.unbind(1)
    total = first.to(wide)
    for each in others:
        total = total + each
    return total


def gating_of(experts: Any) -> Gating | None:
    """The gating of a mixture of SwiGLU experts that `routed_experts` serves; None of any other."""
    packed = hasattr(experts, "down_proj_blocks")
    if packed or isinstance(experts, GptOssExperts):
        served = packed or experts.down_proj.dtype in HALF
        return Gating(True, float(experts.alpha), float(experts.limit)) if served else None
    if not experts.has_gate or not isinstance(getattr(experts, "act_fn", None), _SILU):
        return None
    if experts.down_proj.dtype == FP8:
        other = (getattr(experts, name, None) for name in ("swiglu_alpha", "limit", "gate_softcap"))
        return PLAIN if all(value is None for value in other) else None
    plain = experts.is_concatenated and not experts.has_bias and not experts.is_transposed
    own_gate = type(experts)._apply_gate.__name__ == "_default_apply_gate"
    return PLAIN if plain and own_gate and experts.down_proj.dtype in HALF else None


def _most_pairs(experts: Any, dtype: torch.dtype) -> int | None:
    """Pairs beyond which transformers' grouped matmul is used; None: no limit."""
    grouped = gating_of(experts) is not None
    if dtype != torch.bfloat16 or (grouped and not experts.is_transposed):
        return None
    return MOST_GROUPED if grouped else MOST_PAIRS


def sums_alike(experts: Any) -> bool:
    """Whether a pair's products are added up in one order, whatever the number of pairs.

    The tilings of `routed_kernel` and of `many_kernel` in half precision all add sixteen products at a time, from the
    first to the last.
    """
    down = getattr(experts, "down_proj", None)
    served = isinstance(down, Tensor) and down.dtype in HALF and gating_of(experts) is not None
    return served and _most_pairs(experts, torch.bfloat16) is None


def form_in_words(experts: Any) -> str:
    """Which kernels serve a mixture in rounds from graphs."""
    if hasattr(experts, "down_proj_blocks"):
        return "grouped; MXFP4 unpacked to 16 bits in registers, and in memory for long prompts on Hopper"
    own = "pair by pair" if gating_of(experts) is None else "grouped"
    if experts.down_proj.dtype == FP8:
        return f"{own}, in FP8"
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
