"""Quantised targets: the packages that a checkpoint needs, how its weights run, and how that is reported.

transformers reads `quantization_config` and calls the library that made the checkpoint. Without that library it
raises deep inside, and without its kernels it multiplies the weights out in floating point, with a log line at most.
Here the first is an error before anything is read, and the second a warning and a line in `specdec inspect`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import import_utils

from attention.backends.limits import dtype_name
from attention.hf.weights import is_quantised
from attention.toml_tables import read_tables
from drafters.checkpoints.config_fields import Config
from drafters.checkpoints.tensor_files import CheckpointFolder, StateDict
from specdec.errors import ModelLoadError
from specdec.user_warnings import warn_user
from specdec.values import Json, Options, short

Dtype = torch.dtype | str
"""A dtype, or "auto": the checkpoint's."""
_SHOWN = ("bits", "group_size", "desc_act", "weights", "weight_bits", "format", "fmt")
"""Fields of a `quantization_config` that describe how numbers are stored, over all methods."""

_SCALES = (".weight._scale", ".weight._shift", ".input_scale", ".output_scale")
"""Last parts of the names of scales and shifts."""
_NESTED = ("qint2", "qint4")
"""Tensors made of packed tensors, which are subclasses too. torch 2.13 raises "Cannot set version_counter for inference
tensor" where such a weight is transposed or detached in inference mode and was made outside of it."""
_ALIGNED = 64
"""Bytes. torch's kernel for bfloat16 times int8 on CPUs reads weights by instructions that need an address that this
divides; tensors in a file that is mapped into memory may lie at any address (torch 2.13: SIGSEGV)."""
GGUF = "gguf"
"""quant_method of weights in a GGUF file, which transformers multiplies out."""
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


_PACKAGES = read_tables("specdec", "loading/quantisation.toml")
"""What each method needs, by the name in transformers' registry; a method that is not here needs nothing."""
_KERNELS, _ACCELERATE = _PACKAGES["eetq"]


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


def stored_quantisation(config: PreTrainedConfig) -> Config | None:
    """The `quantization_config` of a configuration, or of the text configuration inside; None without one.

    Source: transformers/quantizers/auto.py, `get_hf_quantizer`.
    """
    own = getattr(config, "quantization_config", None)
    found = own or getattr(config.get_text_config(), "quantization_config", None)
    return found if found is None or isinstance(found, Mapping) else found.to_dict()


def method_of(stored: Config) -> str | None:
    """The method of a `quantization_config` as transformers' registry names it; None where it names none."""
    for flag, name in (("load_in_8bit", "bitsandbytes_8bit"), ("load_in_4bit", "bitsandbytes_4bit")):
        if stored.get(flag):
            return name
    method = stored.get("quant_method")
    return getattr(method, "value", method)


def check_packages(method: str) -> None:
    """Check that a method's packages are installed.

    Raises:
        ModelLoadError: names what to install.
    """
    missing = _missing(*_PACKAGES.get(method, ()))
    if missing:
        several = "s" if len(missing) > 1 else ""
        install = " ".join(f"'{name}'" if ">" in name else name for name in missing)
        if method == GGUF:
            install = '"specdec-hf[gguf]"'
        raise ModelLoadError(
            f"its weights are quantised, and quant_method {method} needs the package{several} "
            f"{', '.join(missing)}: pip install {install}"
        )


def check_quantisation(stored: Config | None) -> str | None:
    """The method of a `quantization_config`; None without one.

    Raises:
        ModelLoadError: transformers does not know the method (it ignores one, and would read
            packed integers as weights), cannot read it back, or a package that it needs is missing.
    """
    if stored is None:
        return None
    method = method_of(stored) if isinstance(stored, Mapping) else None
    if method == MODELOPT:
        if algorithm := stored.get("quant_algo"):
            raise ModelLoadError(
                f"its weights are quantised by NVIDIA ModelOpt (quant_algo {short(algorithm)}), which transformers "
                "cannot read; take the model without quantisation, or one of compressed-tensors"
            )
        return None  # the KV cache alone, see `stored_scales`
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ModelLoadError(
            f"config.json says quantization_config={short(stored)}, a method that transformers "
            f"{transformers_version} does not know; take the model without quantisation"
        )
    check_packages(str(method))
    if method == "quanto":
        raise ModelLoadError(
            "config.json says quant_method quanto, which transformers quantises to but cannot read back; save "
            "the model with optimum.quanto's QuantizedModelForCausalLM (it writes quanto_qmap.json), or load it with "
            "transformers' QuantoConfig and give the loaded model"
        )
    return method


def _missing(*packages: Sequence[str]) -> list[str]:
    """Which of these are not there, or not new enough, as pip takes them.

    A package is its module, the distribution to install and, unless any will do, the oldest version or the name of
    transformers' constant for it.
    """
    found = []
    for module, distribution, *least in packages:
        oldest = getattr(import_utils, least[0], least[0]) if least else ""
        wanted = f"{distribution}>={oldest}" if oldest else distribution
        try:
            old = oldest and Version(importlib.metadata.version(distribution)) < Version(oldest)
        except (importlib.metadata.PackageNotFoundError, InvalidVersion):  # a checkout: taken as new enough
            old = False
        if old or not _is_importable(module):
            found.append(wanted)
    return found


def placed_at(method: str | None, device: torch.device) -> Options:
    """The options with which from_pretrained loads such weights onto their device: most libraries pack them for it.

    Those of a GGUF file are multiplied out where the package `kernels` would keep them packed, too.
    """
    needs = _ACCELERATE in _PACKAGES.get(method or "", ()) and method != "quanto"
    place: Options = {"device_map": {"": str(device)}} if needs else {}
    if method == GGUF:
        from transformers import GgufConfig

        place["quantization_config"] = GgufConfig(dequantize=True)
    return place


def without_kernels(method: str, device: torch.device) -> str:
    """Why transformers will multiply out the weights of a method on this device, in words; "" where it will not."""
    if method != "mxfp4":
        return ""
    if device.type != "cuda":
        return f"transformers has MXFP4 kernels for CUDA devices only, not for {device.type}"
    missing = _missing(_KERNELS, _ACCELERATE)
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
    for layer in model.modules():
        with torch.no_grad():
            decompress_module(layer, compressor.force_compression_format)  # of layers without a scheme nothing
        scheme: Any = getattr(layer, "quantization_scheme", None)
        status = getattr(getattr(layer, "quantization_status", None), "value", "")
        rounds = scheme is None or scheme.input_activations or scheme.output_activations
        if not rounds and status == "decompressed" and type(layer) is torch.nn.Linear:
            vars(layer).pop("forward", None)
    compressor.remove_decompression_hook(model)


def hold_dtype(model: PreTrainedModel, method: str | None, dtype: Dtype) -> None:
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


def quantisation_of(model: PreTrainedModel, stored: Config | None) -> Quantisation | None:
    """How a loaded model is quantised; `stored`: `quantization_config` before loading, None if unknown."""
    stored = stored or stored_quantisation(model.config)
    # Of a GGUF file transformers notes nothing on how weights are stored; of ModelOpt the KV cache alone is read.
    if stored is None or "gguf_file" in stored or method_of(stored) == MODELOPT:
        kinds = ", ".join(dict.fromkeys(kind_in_words(layer) for layer in model.modules() if is_quantised(layer)))
        return Quantisation(kinds) if kinds else None
    method = method_of(stored) or "unknown"
    return Quantisation(method, _scheme(stored), _why_dense(model, method))


def _why_dense(model: PreTrainedModel, method: str) -> str:
    """Why the weights of a loaded model are no longer as they were stored; "" where they are."""
    if method == "compressed-tensors" and not hasattr(model, "ct_decompress_hook"):
        packed = any(p.element_size() < 2 for p in model.parameters())
        return "" if packed else "transformers runs compressed-tensors decompressed, not by kernels of its own"
    if any(map(is_quantised, model.modules())):
        return ""
    return without_kernels(method, model.device) or "transformers multiplied them out"


def warn_of_dense(name: str, model: PreTrainedModel, found: Quantisation | None) -> None:
    """Warn that weights which are small on disk are not so in memory."""
    if found is not None and found.dequantised:
        warn_user(
            f"{name}: the weights are quantised by {found}, and run dequantised in {dtype_name(model.dtype)}, without "
            f"what that saves in memory and time: {found.dequantised}"
        )


def kind_in_words(layer: torch.nn.Module) -> str:
    weight = getattr(layer, "weight", None)
    held = type(getattr(weight, "data", None))
    return type(layer).__name__ if held in (Tensor, type(None)) else f"{type(layer).__name__} of {held.__name__}"


def _scheme(stored: Config) -> str:
    """How numbers are stored, in a few words of the configuration's own."""
    groups = stored.get("config_groups")
    method = method_of(stored)
    names = _OF_BITSANDBYTES.get(method or "", _SHOWN)  # whose configuration names the fields of both kinds
    words = [f"{name}={short(stored[name])}" for name in names if stored.get(name) is not None]
    for group in (groups or {}).values() if isinstance(groups, Mapping) else ():
        for part in ("weights", "input_activations", "output_activations"):
            if isinstance(group, Mapping) and isinstance(numbers := group.get(part), Mapping):
                words.append(f"{part.replace('input_', '').replace('output_', 'output ')} {numbers_in_words(numbers)}")
    kind = stored.get("quant_type")
    if isinstance(kind, Mapping):  # torchao
        words += [str(inner.get("_type", name)) for name, inner in kind.items() if isinstance(inner, Mapping)]
    elif kind is not None:
        words.append(str(kind))
    return ", ".join(dict.fromkeys(words))


def numbers_in_words(numbers: Config) -> str:
    """A format of compressed-tensors.

    >>> numbers_in_words({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128})
    'int4 by group of 128'
    >>> numbers_in_words({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True})
    'float8 by token, dynamic'
    """
    by, kind = (getattr(numbers.get(n), "value", numbers.get(n)) for n in ("strategy", "type"))
    group = f" of {numbers['group_size']}" if by == "group" and numbers.get("group_size") else ""
    return f"{kind}{numbers.get('num_bits')} by {by or 'tensor'}{group}{', dynamic' * bool(numbers.get('dynamic'))}"


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing, or is no package
        return False


def load_quanto(
    folder: CheckpointFolder,
    layers: Mapping[str, Mapping[str, str]],
    loader: Any,
    config: PreTrainedConfig,
    dtype: Dtype,
) -> tuple[PreTrainedModel, Json]:
    """Load a folder that optimum-quanto saved: packed weights, and a map of how each layer was quantised.

    transformers quantises with this library, but cannot save or read the result; published checkpoints are in the
    library's own format. Its own functions are used here to read one, with transformers' configuration and class.
    Returns the model on the CPU, and the differences between model and files as transformers' loading information.

    Source: optimum/quanto/models/transformers_models.py, `QuantizedTransformersModel.from_pretrained`.

    Args:
        layers: the map, `QUANTO_MAP`.
        loader: the auto class of the configuration. dtype: of unquantised tensors, of the scales, and so of the outputs
            of quantised layers; "auto": the checkpoint's.

    Raises:
        ModelLoadError: a package is missing; the map is damaged, names no layer of the model or weights of fewer than 8
            bits, or scales are too small or too large for the dtype.
    """
    check_packages("quanto")
    from accelerate import init_empty_weights
    from optimum.quanto import requantize

    if not layers or not all(
        isinstance(how, dict) and {"weights", "activations"} <= set(how) for how in layers.values()
    ):
        raise ModelLoadError(f"{QUANTO_MAP} is no map of layers to weights and activations; download it again")
    if nested := sorted({how["weights"] for how in layers.values()} & set(_NESTED)):
        raise ModelLoadError(
            f"its weights are in {', '.join(nested)}, whose packed tensors optimum-quanto cannot multiply in "
            "torch's inference mode, in which this library runs a model; take one quantised to qint8 or qfloat8, or in "
            "4 bits by another method (compressed-tensors, bitsandbytes)"
        )
    tensors = folder.load(folder.tensors)
    kind = _stored_dtype(config, tensors) if isinstance(dtype, str) else dtype
    scaled = _scaled_in(kind, tensors)
    tensors = {name: t if t.data_ptr() % _ALIGNED == 0 else t.clone() for name, t in scaled.items()}
    with init_empty_weights(include_buffers=False):
        model: Any = loader.from_config(config, dtype=kind)
    if unknown := sorted(set(layers) - {name for name, _ in model.named_modules()}):
        raise ModelLoadError(f"{QUANTO_MAP} names layers that the model does not have: {', '.join(unknown[:3])}")
    requantize(model, state_dict=tensors, quantization_map=layers)
    model.tie_weights()
    model.name_or_path = str(folder.path)
    if (folder.path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder.path)
    # The differences in the format of transformers' loading information; tied weights are stored once.
    expected = model.state_dict()
    shapes = ((name, tensors[name].shape, expected[name].shape) for name in expected.keys() & tensors.keys())
    return model.requires_grad_(False), {
        "missing_keys": expected.keys() - tensors.keys() - model.all_tied_weights_keys.keys(),
        "unexpected_keys": tensors.keys() - expected.keys(),
        "mismatched_keys": [(name, stored, wanted) for name, stored, wanted in shapes if stored != wanted],
    }


def _stored_dtype(config: PreTrainedConfig, tensors: StateDict) -> torch.dtype:
    """The dtype of the model that was quantised: its configuration's, else the dtype of the scales, which is equal."""
    if isinstance(config.dtype, torch.dtype):  # a name was made one when the configuration was read
        return config.dtype
    found = {tensor.dtype for name, tensor in tensors.items() if name.endswith(_SCALES) and tensor.is_floating_point()}
    return found.pop() if len(found) == 1 else torch.get_default_dtype()


def _scaled_in(kind: torch.dtype, tensors: StateDict) -> StateDict:
    """The checkpoint with its scales in another dtype, as if the model had been quantised in it.

    A quantised layer computes in the dtype of its scales, which the library takes from the weights that it quantised
    and which cannot be changed later: a model with scales of another dtype than its norms and embeddings fails at the
    first attention.

    Source: optimum/quanto/library/qbytes_mm.py; tensor/weights/qbytes.py, `__torch_dispatch__`.

    Raises:
        ModelLoadError: a scale is out of range there: it would be infinite, or zero.
    """
    cast = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(_SCALES) and tensor.is_floating_point():
            cast[name] = tensor.to(kind)
            lost = (cast[name] == 0) & (tensor != 0)
            if lost.any() or not cast[name].isfinite().all():
                raise ModelLoadError(
                    f"dtype={dtype_name(kind)} cannot hold the scales {name} (largest "
                    f"{float(tensor.abs().max()):.3g}, in {dtype_name(tensor.dtype)}); "
                    "give dtype='bfloat16' or dtype='float32'"
                )
    return cast
