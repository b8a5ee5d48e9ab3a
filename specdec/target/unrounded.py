"""Whether quantised layers round their activations to 8 bits, which they do not in the self-test of logits.

That test compares attentions: two forwards that differ by a last bit after the first one. In a layer that rounds what
it reads to 8 bits such a bit moves roundings, each by a whole step, and over 32 layers that comes to a third of the
logits: more than what a wrong slot in a deep model may make. So the test compares the same model without that rounding,
by the limit of its dtype.

Of three kinds of layers: our own in FP8 (`specdec.target.fp8`) ask `are_rounded`; those of compressed-tensors round in
a forward of their own, which calls that of their class; weights of torchao say how their inputs are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_ROUNDS: ContextVar[bool] = ContextVar("specdec_rounds", default=True)
"""Of this thread, so that other engines over the same modules go on."""
_INPUTS_OF_TORCHAO = ("act_quant_kwargs", "activation_quantization")
"""Attributes of torchao's weights that are not None where a matmul by them rounds its input."""


def are_rounded() -> bool:
    """Whether layers that run now round their activations; compiled code does always."""
    return torch.compiler.is_compiling() or _ROUNDS.get()


@contextmanager
def unrounded_activations(model: nn.Module | None = None) -> Iterator[None]:
    """Inside, layers that run eagerly on this thread do not round their activations to 8 bits.

    Each layer multiplies its weight out, in the dtype of its input, while it runs.

    Args:
        model: of whose layers those of compressed-tensors and torchao are meant; None: our own FP8 layers alone. What
            other libraries round (quanto's activations, LLM.int8) is rounded all the same.
    """
    before = _ROUNDS.set(False)
    layers = () if model is None else tuple(model.modules())
    wrapped = {layer: vars(layer)["forward"] for layer in layers if _rounds_by_its_forward(layer)}
    try:
        for layer, rounding in wrapped.items():
            layer.forward = _switched(layer, rounding)
        with ExitStack() as modes:
            if any(_rounds_by_its_weight(getattr(layer, "weight", None)) for layer in layers):
                modes.enter_context(_WeightsMultipliedOut())
            yield
    finally:
        for layer, rounding in wrapped.items():
            layer.forward = rounding
        _ROUNDS.reset(before)


def _rounds_by_its_forward(layer: Any) -> bool:
    """Source: compressed_tensors/quantization/lifecycle/forward.py, `set_forward_quantized`."""
    scheme, status = (getattr(layer, f"quantization_{name}", None) for name in ("scheme", "status"))
    rounds = scheme is not None and (scheme.input_activations or scheme.output_activations)
    # In any other state the forward rounds, or unpacks, the weight as well.
    return bool(rounds and getattr(status, "value", "") == "decompressed" and "forward" in vars(layer))


def _switched(layer: Any, rounding: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A forward of this layer that is its class's where activations are not rounded."""

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = rounding(*args, **kwargs) if are_rounded() else type(layer).forward(layer, *args, **kwargs)
        return out

    return forward


def _rounds_by_its_weight(weight: Any) -> bool:
    return hasattr(weight, "dequantize") and any(getattr(weight, n, None) is not None for n in _INPUTS_OF_TORCHAO)


class _WeightsMultipliedOut(TorchFunctionMode):
    """linear(x, weight) of a weight that rounds its input is linear(x, weight multiplied out); of this thread.

    Source: torchao/quantization/quantize_/workflows/float8/float8_tensor.py and int8/int8_tensor.py, `linear`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and len(args) > 1 and _rounds_by_its_weight(args[1]):
            args = (args[0], args[1].dequantize().to(args[0].dtype), *args[2:])
        return func(*args, **(kwargs or {}))
