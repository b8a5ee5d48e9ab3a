"""Quantised targets: the packages that a checkpoint needs, how its weights run, and how that is reported.

transformers reads `quantization_config` and calls the library that made the checkpoint. Without that library it
raises deep inside, and without its kernels it multiplies the weights out in floating point, with a log line at most.
Here the first is an error before anything is read, and the second a warning and a line in `specdec inspect`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import import_utils

from attention.hf.weights import is_quantised
from specdec.errors import ModelLoadError
from specdec.user_warnings import warn_user
from specdec.values import short

_SHOWN = ("bits", "group_size", "desc_act", "weights", "weight_bits", "format", "fmt")
"""Fields of a `quantization_config` that describe how numbers are stored, over all methods."""

_ROUNDED = (
    "rounded at every call: a value between two steps goes to either, so tokens whose logits are close may come out "
    "otherwise in another batch, as in half precision"
)
MODELOPT = "modelopt"
"""quant_method of NVIDIA ModelOpt, which transformers does not know."""
MODELOPT_FILE = "hf_quant_config.json"
"""ModelOpt's description of what it quantised, in the folder of config.json."""
QUANTO_MAP = "quanto_qmap.json"
"""A folder that optimum-quanto wrote has this file."""
_OF_BITSANDBYTES = {
    "bitsandbytes_4bit": ("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant"),
    "bitsandbytes_8bit": ("llm_int8_threshold",),
}


@dataclass(frozen=True)
class Package:
    """A package that a method needs.

    Attributes:
        module: the name to import; distribution: the name to install.
        least: name of transformers' constant for the oldest version, or that version itself, or "" for any.
    """

    module: str
    distribution: str
    least: str = ""

    @property
    def oldest(self) -> str:
        """The oldest version that transformers accepts; "" for any."""
        known: str = getattr(import_utils, self.least, "") if self.least.endswith("VERSION") else self.least
        return known

    @property
    def missing(self) -> str:
        """What to install, for pip; "" when it is there, and new enough."""
        wanted = self.distribution + (f">={self.oldest}" if self.oldest else "")
        if not _is_importable(self.module):
            return wanted
        try:
            found = Version(importlib.metadata.version(self.distribution))
        except (importlib.metadata.PackageNotFoundError, InvalidVersion):  # a checkout: taken as new enough
            return ""
        return wanted if self.oldest and found < Version(self.oldest) else ""


_TABLE = tomllib.loads(files("specdec").joinpath("loading/quantisation.toml").read_text("utf-8"))
PACKAGES = {method: tuple(Package(*package) for package in packages) for method, packages in _TABLE.items()}
"""What each method needs, by the name in transformers' registry; a method that is not here needs nothing."""
_KERNELS, _ACCELERATE = PACKAGES["eetq"]


@dataclass(frozen=True)
class Quantisation:
    """How a target's weights are stored in its checkpoint, and how they run.

    Attributes:
        method: the checkpoint's quant_method, as in its config.json. scheme: the format of its numbers, in words.
        dequantised: why the weights run in floating point, in words; "" where they run as they are stored.
    """

    method: str
    scheme: str = ""
    dequantised: str = ""

    def __str__(self) -> str:
        return f"{self.method} ({self.scheme})" if self.scheme else self.method


def stored_quantisation(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """The `quantization_config` of a configuration, or of the text configuration inside; None without one.

    Source: transformers/quantizers/auto.py, `get_hf_quantizer`.
    """
    own = getattr(config, "quantization_config", None)
    found = own or getattr(config.get_text_config(), "quantization_config", None)
    return found if found is None or isinstance(found, Mapping) else found.to_dict()


def method_of(stored: Mapping[str, Any]) -> str | None:
    """The method of a `quantization_config` as transformers' registry names it; None where it names none."""
    for flag, name in (("load_in_8bit", "bitsandbytes_8bit"), ("load_in_4bit", "bitsandbytes_4bit")):
        if stored.get(flag):
            return name
    method = stored.get("quant_method")
    return getattr(method, "value", method)


def check_packages(method: str, what: str) -> None:
    """Check that a method's packages are installed.

    Raises:
        ModelLoadError: `what` cannot be loaded; names what to install.
    """
    missing = [package.missing for package in PACKAGES.get(method, ()) if package.missing]
    if missing:
        several = "s" if len(missing) > 1 else ""
        install = " ".join(f"'{name}'" if ">" in name else name for name in missing)
        raise ModelLoadError(
            f"{what}: its weights are quantised, and quant_method {method} needs the package{several} "
            f"{', '.join(missing)}: pip install {install}"
        )


def placed_at(method: str | None, device: torch.device) -> dict[str, Any]:
    """The option with which from_pretrained loads such weights onto their device: most libraries pack them for it."""
    needs = _ACCELERATE in PACKAGES.get(method or "", ()) and method != "quanto"
    return {"device_map": {"": str(device)}} if needs else {}


def without_kernels(method: str, device: torch.device) -> str:
    """Why transformers will multiply out the weights of a method on this device, in words; "" where it will not."""
    if method != "mxfp4":
        return ""
    if device.type != "cuda":
        return f"transformers has MXFP4 kernels for CUDA devices only, not for {device.type}"
    missing = [package.missing for package in (_KERNELS, _ACCELERATE) if package.missing]
    return f"transformers' MXFP4 kernels need the packages {', '.join(missing)}" if missing else ""


def settle(model: PreTrainedModel) -> None:
    """Decompress a model of compressed-tensors now, as its own first forward would.

    The library's hook would do so in the middle of a forward, and put each module's parameters behind an offloading
    cache, which no compiler looks through. Layers of which only the weights were quantised then compute what a plain
    `nn.Linear` does, so they get that forward back, which can be compiled.

    Source: compressed_tensors/compressors/model_compressors/model_compressor.py, `decompress_model`;
    quantization/lifecycle/forward.py, `set_forward_quantized`.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if not hasattr(model, "ct_decompress_hook") or quantizer is None:
        return
    from compressed_tensors.compressors import decompress_module

    compressor = quantizer.compressor
    with torch.no_grad():
        for layer in model.modules():
            decompress_module(layer, compressor.force_compression_format)  # of layers without a scheme nothing
    compressor.remove_decompression_hook(model)
    for layer in model.modules():
        scheme: Any = getattr(layer, "quantization_scheme", None)
        status = getattr(getattr(layer, "quantization_status", None), "value", "")
        rounds = scheme is None or scheme.input_activations or scheme.output_activations
        if not rounds and status == "decompressed" and type(layer) is torch.nn.Linear:
            vars(layer).pop("forward", None)


def hold_dtype(model: PreTrainedModel, method: str | None, dtype: torch.dtype | str) -> None:
    """Cast the parameters that bitsandbytes left in floating point to `dtype`; "auto" keeps the stored dtypes.

    transformers reads such a checkpoint's norms, embeddings and output layer in the dtype they are stored in, whatever
    `dtype` is, and refuses to cast the model afterwards. The quantised layers return the dtype of their inputs.

    Source: transformers/quantizers/base.py, `get_new_dtype`; bitsandbytes/nn/modules.py, `Linear4bit.forward`.
    """
    if not (method or "").startswith("bitsandbytes") or isinstance(dtype, str):
        return
    # transformers' lists of modules that stay in float32 whatever `dtype` is; it has no public name for them.
    kept = (*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ()))
    for name, layer in model.named_modules():
        if is_quantised(layer) or any(part in kept for part in name.split(".")):
            continue
        for parameter in layer.parameters(recurse=False):
            # Not isinstance: bitsandbytes' packed weights are subclasses of Parameter.
            if parameter.is_floating_point() and type(parameter) is torch.nn.Parameter:
                parameter.data = parameter.data.to(dtype)
    model.config.get_text_config().dtype = dtype
    model.config.dtype = dtype


def quantisation_of(model: PreTrainedModel, stored: Mapping[str, Any] | None) -> Quantisation | None:
    """How a loaded model is quantised; `stored`: `quantization_config` before loading, None if unknown."""
    stored = stored or stored_quantisation(model.config)
    if stored is None or method_of(stored) == MODELOPT:  # of which the KV cache alone is read, see `kv_scales`
        kinds = ", ".join(dict.fromkeys(_kind(layer) for layer in model.modules() if is_quantised(layer)))
        return Quantisation(kinds) if kinds else None
    method = method_of(stored) or "unknown"
    return Quantisation(method, _scheme(stored), _why_dense(model, method))


def _why_dense(model: PreTrainedModel, method: str) -> str:
    """Why the weights of a loaded model are no longer as they were stored; "" where they are."""
    if method == "compressed-tensors" and not hasattr(model, "ct_decompress_hook"):
        packed = any(p.element_size() < 2 for p in model.parameters())
        return "" if packed else "transformers runs compressed-tensors decompressed, not by kernels of its own"
    if any(is_quantised(layer) for layer in model.modules()):
        return ""
    return without_kernels(method, model.device) or "transformers multiplied them out"


def warn_of_dense(name: str, model: PreTrainedModel, found: Quantisation | None) -> None:
    """Warn that weights which are small on disk are not so in memory."""
    if found is not None and found.dequantised:
        warn_user(
            f"{name}: the weights are quantised by {found}, and run dequantised in {_dtype(model)}, without what that "
            f"saves in memory and time: {found.dequantised}"
        )


def facts_of_quantisation(model: PreTrainedModel, found: Quantisation | None) -> dict[str, Any] | None:
    """For `describe`: method, scheme, what runs, and which layers; None for a model that is not quantised."""
    found = found or quantisation_of(model, None)
    if found is None:
        return None
    from specdec.selftest.quantised import rounds_activations

    layers = Counter(_kind(layer) for layer in model.modules() if is_quantised(layer))
    runs = f"dequantised in {_dtype(model)}: {found.dequantised}" if found.dequantised else "as stored"
    return {
        "method": found.method,
        "scheme": found.scheme or None,
        "runs": runs,
        "layers": ", ".join(f"{count} {kind}" for kind, count in layers.items()) or None,
        "activations": _ROUNDED if rounds_activations(model) else "not rounded",
    }


def _kind(layer: torch.nn.Module) -> str:
    weight = getattr(layer, "weight", None)
    held = type(getattr(weight, "data", None))
    return type(layer).__name__ if held in (torch.Tensor, type(None)) else f"{type(layer).__name__} of {held.__name__}"


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _scheme(stored: Mapping[str, Any]) -> str:
    """How numbers are stored, in a few words of the configuration's own."""
    groups, method = stored.get("config_groups"), method_of(stored)
    names = _OF_BITSANDBYTES.get(method or "", _SHOWN)  # whose configuration names the fields of both kinds
    words = [f"{name}={short(stored[name])}" for name in names if stored.get(name) is not None]
    for group in (groups or {}).values() if isinstance(groups, Mapping) else ():
        for part in ("weights", "input_activations", "output_activations"):
            if isinstance(group, Mapping) and isinstance(numbers := group.get(part), Mapping):
                words.append(f"{part.replace('input_', '').replace('output_', 'output ')} {_numbers(numbers)}")
    kind = stored.get("quant_type")
    if isinstance(kind, Mapping):  # torchao
        words += [str(inner.get("_type", name)) for name, inner in kind.items() if isinstance(inner, Mapping)]
    elif kind is not None:
        words.append(str(kind))
    return ", ".join(dict.fromkeys(words))


def _numbers(numbers: Mapping[str, Any]) -> str:
    """'int4 by group of 128', 'float8 by token, dynamic'."""
    by = getattr(numbers.get("strategy"), "value", numbers.get("strategy"))
    kind = getattr(numbers.get("type"), "value", numbers.get("type"))
    group = f" of {numbers['group_size']}" if by == "group" and numbers.get("group_size") else ""
    dynamic = ", dynamic" if numbers.get("dynamic") else ""
    return f"{kind}{numbers.get('num_bits')} by {by}{group}{dynamic}"


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing, or is no package
        return False
