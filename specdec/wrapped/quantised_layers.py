"""Layers in FP8 and experts in MXFP4 on specdec's operators, and whether quantised layers round activations to 8 bits.

MXFP4 experts (gpt-oss) stay in 4 bits as they are published, and activations in 16: transformers needs kernels from the
hub for that, which CUDA graphs cannot hold, and multiplies the weights out without.

Layers of any library do not round activations in the self-test of logits, which compares attentions: there two forwards
differ by last bits, each such bit can move a rounding to 8 bits by a whole step, and over 32 layers that comes to a
third of the logits. So the test compares the same model without that rounding. specdec's layers call `are_rounded`;
compressed-tensors sets a forward on the instance that rounds and calls the class's; torchao's weights carry the
rounding of their inputs.
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
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from attention.backends.limits import HALF
from attention.hf.patches import borrowed
from drafters.checkpoints.config_fields import Config
from specdec.errors import UnsupportedModelError
from specdec.ops.fp8 import BLOCK, FP8, fp8_linear, unrounded_linear
from specdec.ops.mixtures.choice import own_form
from specdec.ops.mixtures.routed import BLOCK as MXFP4_BLOCK
from specdec.user_warnings import warn_user
from specdec.values import Json

MXFP4 = "mxfp4"
_LEAST_CAPABILITY = (8, 9)
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
    wrapped = [layer for layer in layers if _rounds_by_its_forward(layer)]
    try:
        with borrowed((layer, "forward", _switched(layer, layer.forward)) for layer in wrapped), ExitStack() as modes:
            if any(_rounds_by_its_weight(getattr(layer, "weight", None)) for layer in layers):
                modes.enter_context(_WeightsMultipliedOut())
            yield
    finally:
        _ROUNDS.reset(before)


def _rounds_by_its_forward(layer: Any) -> bool:
    """Source: compressed_tensors/quantization/lifecycle/forward.py, `set_forward_quantized`."""
    scheme, status = (getattr(layer, f"quantization_{name}", None) for name in ("scheme", "status"))
    rounds = scheme is not None and (scheme.input_activations or scheme.output_activations)
    # In any other state the forward rounds, or unpacks, the weight as well.
    return bool(rounds and getattr(status, "value", "") == "decompressed" and "forward" in vars(layer))


def _switched(layer: Any, rounding: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A forward of this layer that is its class's while activations are not rounded."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return rounding(*args, **kwargs) if are_rounded() else type(layer).forward(layer, *args, **kwargs)

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


class Fp8Linear(FP8Linear):
    """A transformers FP8 linear layer whose forward is specdec's operator."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if are_rounded():
            return fp8_linear(input, self.weight, self.weight_scale_inv, self.bias, self.activation_scale)
        return unrounded_linear(input, self.weight, self.weight_scale_inv, self.bias)


class Fp8Experts(FP8Experts):
    """A transformers FP8 mixture of experts whose forward is specdec's operator, for any experts implementation."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, H], top_k_index [T, k] int64, top_k_weights [T, k] -> [T, H]."""
        return own_form(self, hidden_states, top_k_index, top_k_weights, are_rounded())


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
    exponents: bool

    @property
    def in_words(self) -> str:
        """'fine-grained, 128x128', '…, static activation scales'."""
        if self.blocks is None:
            return "one scale a weight, static activation scales"
        return f"fine-grained, {'x'.join(map(str, self.blocks))}{', static activation scales' * self.static}"


class Fp8Layers:
    """The FP8 layers of a model, run by specdec's operators until `release`, or until this object is garbage.

    scheme: common to all of them. linear, experts: the modules, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        """model: has FP8 layers, see `fp8_layers`.

        Raises:
            UnsupportedModelError: layers that no operator serves, or invalid scales; nothing is changed then.
        """
        found = {name: module for name, module in model.named_modules() if _is_fp8(module)}
        what = type(model).__name__
        self.scheme = _common_scheme(what, found.values())
        for name, module in found.items():
            for fault in _faults(module):
                raise UnsupportedModelError(f"{what}: {name}{fault}")
        self.linear = {n: m for n, m in found.items() if isinstance(m, FP8Linear)}
        self.experts = {n: m for n, m in found.items() if isinstance(m, FP8Experts)}
        modules = tuple(found.values())
        holder = object()
        device = next(modules[0].parameters()).device
        if device.type == "cpu":
            warn_user(
                f"{what} is quantised in FP8 and runs on a CPU, which cannot multiply in 8 bits: weights are "
                "multiplied out in float32 whenever they are used, with the results of a GPU and many times slower "
                "than unquantised"
            )
        elif torch.version.hip is not None or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
            raise UnsupportedModelError(
                f"{what} is quantised in FP8, which needs an NVIDIA GPU of compute capability 8.9 or more (L4, H100, "
                f"…), not {torch.cuda.get_device_name(device)}"
            )
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
    return Fp8Layers(model) if any(map(_is_fp8, model.modules())) else None


def _is_fp8(module: nn.Module) -> bool:
    return isinstance(module, (FP8Linear, FP8Experts))


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


def _scheme_of(module: Any) -> Scheme:
    blocks = None if module.block_size is None else tuple(module.block_size)
    scales = [p for n, p in module.named_parameters(recurse=False) if n.endswith("scale_inv")]
    exponents = any(scale.dtype != torch.float32 for scale in scales)
    return Scheme(blocks, module.activation_scheme == "static", exponents)


def _common_scheme(what: str, modules: Iterable[Any]) -> Scheme:
    """The scheme of some layers in FP8.

    Raises:
        UnsupportedModelError: blocks of another size than 128 x 128, one scale a weight with dynamic scales of
            activations, scales in powers of two, or layers of several schemes.
    """
    schemes = dict.fromkeys(map(_scheme_of, modules))
    for scheme in schemes:
        reason = None
        if scheme.exponents:
            reason = "scale_fmt='ue8m0', scales that are powers of two"
        elif scheme.blocks is None and not scheme.static:
            reason = "one scale a weight (weight_block_size=null) with activation_scheme='dynamic'"
        elif scheme.blocks not in (None, (BLOCK, BLOCK)):
            reason = f"weight_block_size={list(scheme.blocks or ())}"
        if reason:
            raise UnsupportedModelError(
                f"{what} is quantised in FP8 with {reason}; supported are blocks of 128 x 128 with scales in float32, "
                "and one scale a weight with static scales of activations"
            )
    if len(schemes) > 1:
        raise UnsupportedModelError(
            f"{what} has layers of several kinds of FP8: {'; '.join(each.in_words for each in schemes)}"
        )
    return next(iter(schemes))


def _faults(module: Any) -> Iterator[str]:
    """Why no operator serves a layer: another form, or scales by which nothing can be multiplied; after its name."""
    own = getattr(type(module), "plain", type(module))  # fused with its siblings by another engine
    kind = _THEIRS.get(own, own)
    if kind not in _OURS:
        yield f" is a {kind.__name__}, an FP8 layer that specdec has no operator for"
    if isinstance(module, FP8Experts):
        if module.activation_scheme == "static" or module.block_size is None:
            yield ": experts in FP8 are served with blocks of 128 x 128 and dynamic scales of activations only"
        if module.has_gate and module.intermediate_dim % BLOCK:
            yield (
                f": experts of {module.intermediate_dim} features, which blocks of {BLOCK} do not divide: their gate "
                "and up projections would share a block"
            )
    else:
        shape = list(module.weight.shape)
        scales = list(module.weight_scale_inv.shape)
        expected = [] if module.block_size is None else [math.ceil(size / BLOCK) for size in shape]
        if scales != expected:
            yield (
                f".weight_scale_inv is {scales}; a weight of {shape} has scales {expected}: is the checkpoint damaged?"
            )
    for weight, parameter in module.named_parameters(recurse=False):
        if weight.endswith(("weight", "_proj")) and parameter.dtype != FP8:
            yield f".{weight} is {parameter.dtype}, not {FP8}"
        if weight.endswith(("scale_inv", "activation_scale")):
            wrong = parameter[~((parameter > 0) & parameter.isfinite())]
            if len(wrong):
                yield f".{weight} holds {wrong[0].item()}: a scale is a positive number; is the checkpoint damaged?"


class Mxfp4Experts(nn.Module):
    """Takes the place of transformers' GptOssExperts; its parameters have the names and shapes of a checkpoint."""

    def __init__(self, config: Any) -> None:
        """config: a GptOssConfig, whose sizes 32 divides."""
        super().__init__()
        self.config = config
        self.num_experts = config.num_local_experts
        self.alpha = float(getattr(config, "swiglu_alpha", 1.702))
        self.limit = float(getattr(config, "swiglu_limit", 7.0))
        hidden = config.hidden_size
        inner = config.intermediate_size
        for name, rows, width in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            shape = (self.num_experts, rows, width // MXFP4_BLOCK)
            blocks, scales = (torch.zeros(*shape, *more, dtype=torch.uint8) for more in ((MXFP4_BLOCK // 2,), ()))
            self.register_parameter(f"{name}_blocks", nn.Parameter(blocks, requires_grad=False))
            self.register_parameter(f"{name}_scales", nn.Parameter(scales, requires_grad=False))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(shape[:2]), requires_grad=False))

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden_states [T, H], index [T, k] int64, weights [T, k] -> [T, H]."""
        return own_form(self, hidden_states, index, weights)


def keep_in_mxfp4(model: nn.Module, config: Any, left_out: list[str] | None = None) -> None:
    """Put empty `Mxfp4Experts` where a model has experts, on the meta device. left_out: modules kept as they are."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # takes a second; other models need it not

    for name, module in list(model.named_modules()):
        if isinstance(module, GptOssExperts) and should_convert_module(name, left_out):
            with torch.device("meta"):
                model.set_submodule(name, Mxfp4Experts(config))


class Fp8Quantizer(FineGrainedFP8HfQuantizer):
    """transformers' quantizer for weights that stay in FP8, on any device. Its own needs accelerate, and dequantises
    silently without a GPU."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Raises UnsupportedModelError: a scheme that no operator serves."""
        super()._process_model_before_weight_loading(model, **kwargs)
        if layers := list(filter(_is_fp8, model.modules())):  # weights are not read yet
            _common_scheme(model.name_or_path or type(model).__name__, layers)


class Mxfp4Quantizer(Mxfp4HfQuantizer):
    """transformers' quantizer for weights that stay as they are. Its own needs accelerate and kernels from the hub."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed."""

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """False for all: names and shapes equal the checkpoint's."""
        return False

    def get_weight_conversions(self) -> list[Any]:
        """None."""
        return []

    def _process_model_before_weight_loading(self, model: Any, use_kernels: bool = False, **kwargs: Any) -> None:
        self.modules_to_not_convert = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        keep_in_mxfp4(model, model.config, self.modules_to_not_convert)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Json, Json]:
        """The state unchanged: it has the checkpoint's format."""
        return model.state_dict(), {}


def own_quantizer(
    config: PreTrainedConfig,
    stored: Config,
    dtype: torch.dtype | str,
    device: torch.device,
    name: str,
    alone: bool,
) -> type[Any] | None:
    """The quantizer that takes the place of transformers' while a target is loaded; None where its own serves.

    MXFP4 stays in 4 bits where the kernels read it: in half precision, on one GPU with all experts.

    Args:
        stored: its `quantization_config`. name: of the target. alone: this process loads the whole model.

    Raises:
        UnsupportedModelError: another format of FP8 than e4m3, or `dequantize`, before weights are read.
    """
    asked = getattr(config.get_text_config(), "dtype", None) if isinstance(dtype, str) else dtype
    if stored.get("quant_method") == MXFP4:
        stays = config.model_type == "gpt_oss" and alone and device.type == "cuda" and asked in HALF
        return Mxfp4Quantizer if stays else None
    if stored.get("dequantize"):
        raise UnsupportedModelError(
            f"{name}: quantization_config of its config.json has dequantize=true, another model whose activations are "
            "not rounded; leave it out, or load the model with transformers and give it as the target"
        )
    if (kind := stored.get("fmt", "e4m3")) != "e4m3":
        raise UnsupportedModelError(f"{name} is quantised in FP8 with fmt={kind!r}; supported is 'e4m3'")
    return Fp8Quantizer


@contextmanager
def loaded_by(method: str, quantizer: type[Any]) -> Iterator[None]:
    """Inside, from_pretrained of a checkpoint quantised by `method` uses this quantizer."""
    quantizers: Json = AUTO_QUANTIZER_MAPPING
    before = quantizers[method]
    quantizers[method] = quantizer  # `register_quantizer` refuses a method that exists
    try:
        yield
    finally:
        quantizers[method] = before
