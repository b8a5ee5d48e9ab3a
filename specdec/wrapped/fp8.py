"""FP8 layers on specdec's operators, and whether quantised layers of any library round activations to 8 bits.

They do not in the self-test of logits, which compares attentions: there two forwards differ by last bits, each such bit
can move a rounding to 8 bits by a whole step, and over 32 layers that comes to a third of the logits. So the test
compares the same model without that rounding. specdec's layers call `are_rounded`; compressed-tensors sets a forward on
the instance that rounds and calls the class's; torchao's weights carry the rounding of their inputs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from specdec.errors import UnsupportedModelError
from specdec.ops.fp8 import BLOCK, FP8, fp8_linear, unrounded_linear
from specdec.ops.mixtures.choice import own_form
from specdec.user_warnings import warn_user

_ROUNDS: ContextVar[bool] = ContextVar("specdec_rounds", default=True)
"""Per thread, so that other engines over the same modules are unaffected."""
_INPUTS_OF_TORCHAO = ("act_quant_kwargs", "activation_quantization")
"""Attributes of torchao's weights that are not None where a matmul by them rounds its input."""


def are_rounded() -> bool:
    """Whether layers that run now round their activations; in compiled code always."""
    return torch.compiler.is_compiling() or _ROUNDS.get()


@contextmanager
def unrounded_activations(model: nn.Module | None = None) -> Iterator[None]:
    """Inside, layers that run eagerly on this thread do not round their activations to 8 bits.

    Each layer dequantises its weight to the dtype of its input while it runs. model: also switch off rounding in its
    compressed-tensors and torchao layers; None: only in specdec's FP8 layers. Other libraries (quanto's activations,
    LLM.int8) round anyway.
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
    """A forward of this layer that is its class's while activations are not rounded."""

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = rounding(*args, **kwargs) if are_rounded() else type(layer).forward(layer, *args, **kwargs)
        return out

    return forward


def _rounds_by_its_weight(weight: Any) -> bool:
    return hasattr(weight, "dequantize") and any(getattr(weight, n, None) is not None for n in _INPUTS_OF_TORCHAO)


class _WeightsMultipliedOut(TorchFunctionMode):
    """On this thread, linear(x, weight) of a weight that rounds its input becomes linear(x, dequantised weight).

    Source: torchao/quantization/quantize_/workflows/float8/float8_tensor.py and int8/int8_tensor.py, `linear`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and len(args) > 1 and _rounds_by_its_weight(args[1]):
            args = (args[0], args[1].dequantize().to(args[0].dtype), *args[2:])
        return func(*args, **(kwargs or {}))


_LEAST_CAPABILITY = (8, 9)


class Fp8Linear(FP8Linear):
    """A transformers FP8 linear layer whose forward is specdec's operator."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        if are_rounded():
            return fp8_linear(input, self.weight, self.weight_scale_inv, self.bias, self.activation_scale)
        return unrounded_linear(input, self.weight, self.weight_scale_inv, self.bias)


class Fp8Experts(FP8Experts):
    """A transformers FP8 mixture of experts whose forward is specdec's operator, for any experts implementation."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [T, H], top_k_index [T, k] int64, top_k_weights [T, k] -> [T, H]."""
        return own_form(self, hidden_states, top_k_index, top_k_weights, are_rounded())


_KINDS = (FP8Linear, FP8Experts)
_HOLDERS = "_specdec_holders"
_OURS: dict[type, type] = {FP8Linear: Fp8Linear, FP8Experts: Fp8Experts}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}


@dataclass(frozen=True)
class Scheme:
    """How the weights and activations of a layer are rounded.

    blocks: rows and columns that share a scale; None: the whole weight has one. static: whether activations have one
    scale from the checkpoint; else one a token and group. exponents: scales are powers of two (scale_fmt "ue8m0").
    """

    blocks: tuple[int, ...] | None
    static: bool
    exponents: bool = False

    @property
    def in_words(self) -> str:
        """'fine-grained, 128x128', '…, static activation scales'."""
        if self.blocks is None:
            return "one scale a weight, static activation scales"
        return f"fine-grained, {'x'.join(map(str, self.blocks))}{', static activation scales' * self.static}"

    def check(self, name: str) -> None:
        """Refuse a scheme that no operator serves.

        Raises:
            UnsupportedModelError: blocks of another size than 128 x 128, one scale a weight with dynamic scales of
                activations, or scales in powers of two.
        """
        reason = None
        if self.exponents:
            reason = "scale_fmt='ue8m0', scales that are powers of two"
        elif self.blocks is None and not self.static:
            reason = "one scale a weight (weight_block_size=null) with activation_scheme='dynamic'"
        elif self.blocks not in (None, (BLOCK, BLOCK)):
            reason = f"weight_block_size={list(self.blocks or ())}"
        if reason:
            raise UnsupportedModelError(
                f"{name} is quantised in FP8 with {reason}; supported are blocks of 128 x 128 with scales in float32, "
                "and one scale a weight with static scales of activations"
            )


class Fp8Layers:
    """The FP8 layers of a model, run by specdec's operators until `release`, or until this object is garbage.

    scheme: common to all of them. linear, experts: the modules, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        """model: has FP8 layers, see `fp8_layers`.

        Raises:
            UnsupportedModelError: layers that no operator serves, or invalid scales; nothing is changed then.
        """
        found = {name: m for name, m in model.named_modules() if isinstance(m, _KINDS)}
        what = type(model).__name__
        self.scheme = _common_scheme(what, found.values())
        for name, module in found.items():
            _check_layer(f"{what}: {name}", module)
        self.linear: dict[str, Any] = {n: m for n, m in found.items() if isinstance(m, FP8Linear)}
        self.experts: dict[str, Any] = {n: m for n, m in found.items() if isinstance(m, FP8Experts)}
        modules, holder = tuple(found.values()), object()
        _check_device(what, next(modules[0].parameters()).device)
        for module in modules:
            _set_class(module, _OURS)
            vars(module).setdefault(_HOLDERS, set()).add(holder)
        self._finalizer = weakref.finalize(self, _let_go, modules, holder)
        self._finalizer.atexit = False  # at the interpreter's exit the model ends as well

    def release(self) -> None:
        """Restore the modules, unless another engine still runs them. Idempotent."""
        self._finalizer()


def fp8_layers(model: nn.Module) -> Fp8Layers | None:
    """The FP8 layers of a model, from now on run by specdec's operators; None for a model without.

    Raises:
        UnsupportedModelError: see `Fp8Layers`.
    """
    return Fp8Layers(model) if any(isinstance(m, _KINDS) for m in model.modules()) else None


def _let_go(modules: tuple[Any, ...], holder: object) -> None:
    for module in modules:
        holders = vars(module).get(_HOLDERS, set())
        holders.discard(holder)
        if not holders:
            vars(module).pop(_HOLDERS, None)
            _set_class(module, _THEIRS)


def _set_class(module: Any, classes: Mapping[type, type]) -> None:
    # The class is swapped, not the module: hooks, references and parameters stay the user's.
    module.__class__ = classes.get(type(module), type(module))


def scheme_of(module: Any) -> Scheme:
    """The scheme of an FP8 module of transformers."""
    blocks = None if module.block_size is None else tuple(module.block_size)
    scales = [p for n, p in module.named_parameters(recurse=False) if n.endswith("scale_inv")]
    exponents = any(scale.dtype != torch.float32 for scale in scales)
    return Scheme(blocks, module.activation_scheme == "static", exponents)


def _common_scheme(what: str, modules: Iterable[Any]) -> Scheme:
    schemes = list(dict.fromkeys(scheme_of(module) for module in modules))
    for scheme in schemes:
        scheme.check(what)
    if len(schemes) > 1:
        raise UnsupportedModelError(
            f"{what} has layers of several kinds of FP8: {'; '.join(each.in_words for each in schemes)}"
        )
    return schemes[0]


def _check_layer(name: str, module: Any) -> None:
    """Refuse a layer of another form, and scales by which nothing can be multiplied."""
    own = getattr(type(module), "plain", type(module))  # fused with its siblings by another engine
    kind = _THEIRS.get(own, own)
    if kind not in _OURS:
        raise UnsupportedModelError(f"{name} is a {kind.__name__}, an FP8 layer that specdec has no operator for")
    if isinstance(module, FP8Experts):
        _check_experts(name, module)
    else:
        expected = [] if module.block_size is None else [math.ceil(size / BLOCK) for size in module.weight.shape]
        if list(module.weight_scale_inv.shape) != expected:
            raise UnsupportedModelError(
                f"{name}.weight_scale_inv is {list(module.weight_scale_inv.shape)}; a weight of "
                f"{list(module.weight.shape)} has scales {expected}: is the checkpoint damaged?"
            )
    for weight, parameter in module.named_parameters(recurse=False):
        if weight.endswith(("weight", "_proj")) and parameter.dtype != FP8:
            raise UnsupportedModelError(f"{name}.{weight} is {parameter.dtype}, not {FP8}")
        if weight.endswith(("scale_inv", "activation_scale")):
            wrong = parameter[~((parameter > 0) & parameter.isfinite())]
            if len(wrong):
                raise UnsupportedModelError(
                    f"{name}.{weight} holds {wrong[0].item()}: a scale is a positive number; is the checkpoint damaged?"
                )


def _check_experts(name: str, module: Any) -> None:
    if module.activation_scheme == "static" or module.block_size is None:
        raise UnsupportedModelError(
            f"{name}: experts in FP8 are served with blocks of 128 x 128 and dynamic scales of activations only"
        )
    if module.has_gate and module.intermediate_dim % BLOCK:
        raise UnsupportedModelError(
            f"{name}: experts of {module.intermediate_dim} features, which blocks of {BLOCK} do not divide: their gate "
            "and up projections would share a block"
        )


def _check_device(what: str, device: torch.device) -> None:
    """Refuse a GPU without 8-bit floats; on a CPU, warn of the cost."""
    if device.type == "cpu":
        warn_user(
            f"{what} is quantised in FP8 and runs on a CPU, which cannot multiply in 8 bits: weights are multiplied "
            "out in float32 whenever they are used, with the results of a GPU and many times slower than unquantised"
        )
    elif torch.version.hip is not None or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        raise UnsupportedModelError(
            f"{what} is quantised in FP8, which needs an NVIDIA GPU of compute capability 8.9 or more (L4, H100, …), "
            f"not {torch.cuda.get_device_name(device)}"
        )


_FP8 = "fp8"


class Fp8Quantizer(FineGrainedFP8HfQuantizer):
    """transformers' quantizer for weights that stay in FP8, on any device (`specdec.wrapped.fp8` runs them).
    transformers' own needs accelerate, and dequantises the weights silently without a GPU."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed."""


@contextmanager
def fp8_checkpoint(config: Any, name: str) -> Iterator[None]:
    """A context in which a target of this configuration is loaded in FP8. Changes nothing for one in another format.

    Raises:
        UnsupportedModelError: a scheme of FP8 that no operator serves, or `dequantize`, before weights are read.
    """
    stored = getattr(config, "quantization_config", None)
    values: Mapping[str, Any] = stored if isinstance(stored, Mapping) else vars(stored) if stored else {}
    if values.get("quant_method") != _FP8:
        yield
        return
    if values.get("dequantize"):
        raise UnsupportedModelError(
            f"{name}: quantization_config of its config.json has dequantize=true, another model whose activations are "
            "not rounded; leave it out, or load the model with transformers and give it as the target"
        )
    if (kind := values.get("fmt", "e4m3")) != "e4m3":
        raise UnsupportedModelError(f"{name} is quantised in FP8 with fmt={kind!r}; supported is 'e4m3'")
    _scheme(values).check(name)
    before = AUTO_QUANTIZER_MAPPING[_FP8]
    # In transformers' own table: `register_quantizer` refuses a method that exists.
    AUTO_QUANTIZER_MAPPING[_FP8] = Fp8Quantizer
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING[_FP8] = before


def _scheme(values: Mapping[str, Any]) -> Scheme:
    """The scheme as transformers reads it: 128 x 128 by default, one scale a weight where it is null."""
    blocks = values.get("weight_block_size", (128, 128))
    static = str(values.get("activation_scheme", "dynamic")).lower() == "static"
    return Scheme(None if blocks is None else tuple(blocks), static, values.get("scale_fmt", "float") == "ue8m0")
