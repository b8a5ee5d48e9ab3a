"""Loads the target by a name or from a folder, or takes a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from attention.hf.patches import borrowed
from drafters.checkpoints.config_fields import Config
from drafters.checkpoints.layouts import module_names
from drafters.checkpoints.tensor_files import open_folder, read_json
from specdec.errors import InvalidInputError, ModelLoadError
from specdec.loading.adapters import applied, unwrapped, with_adapter
from specdec.loading.checkpoint import (
    Checkpoint,
    check_depth,
    check_target_folder,
    check_weight_files,
    find_checkpoint,
    gguf_types,
)
from specdec.loading.load_errors import check_complete, loading_named
from specdec.loading.names import ModelName, resolve
from specdec.loading.progress import log
from specdec.loading.quantisation import (
    QUANTO_MAP,
    Dtype,
    Quantisation,
    check_quantisation,
    hold_dtype,
    load_quanto,
    method_of,
    placed_at,
    quantisation_of,
    settle,
    stored_quantisation,
    warn_of_dense,
    without_kernels,
)
from specdec.loading.sizes import check_weights_fit
from specdec.options import LoadOptions
from specdec.values import Options, short, wrong
from specdec.wrapped.alterations import without_unpickled
from specdec.wrapped.group import ALONE, Group
from specdec.wrapped.probing import check_loaded_target

Target = ModelName | PreTrainedModel
_GIVE = "give a built-in name, a folder, a hub name, or a loaded transformers model (PreTrainedModel)"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_WRAPPERS = {
    "OptimizedModule": "a model compiled by torch.compile; give the model itself, cuda_graphs=True compiles it here",
    "DataParallel": "a model wrapped in DataParallel; give the model inside, its attribute .module",
    "DistributedDataParallel": "a model wrapped for several processes; give the model inside, its attribute .module",
    "FullyShardedDataParallel": "a model sharded by FSDP, whose weights are spread over processes; load it unsharded",
    "FSDPModule": "a model sharded by FSDP, whose weights are spread over processes; load it unsharded",
    "PeftMixedModel": "a model with adapters of several kinds; give what its merge_and_unload() returns",
    "SpeculativeModel": "a SpeculativeModel already; give its hf_model to wrap it anew",
}
"""By class name: no package is imported to recognise its classes."""


class AutoClass(NamedTuple):
    """An auto class, with the model classes that it loads by their configurations'."""

    loader: Any
    mapping: Any


_CAUSAL = AutoClass(AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)
_AUTO_CLASSES = (
    _CAUSAL,
    AutoClass(AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    AutoClass(AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
)
"""The last two: a language model inside a model that reads images or sound too."""


def auto_class(config: PreTrainedConfig) -> AutoClass:
    """The auto class for a configuration: the one for causal language models if it knows it, else one of wrappers.

    Raises:
        ModelLoadError: an encoder, with or without a decoder, or no language model.
    """
    kind = type(config)
    custom = getattr(config, "auto_map", None) or {}
    found = next((each for each in _AUTO_CLASSES if kind in each.mapping or each.loader.__name__ in custom), None)
    if found is _CAUSAL and kind in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", True) is False:
        reason = "an encoder (is_decoder is false)"
    elif found is not _CAUSAL and config.is_encoder_decoder:
        reason = "an encoder and a decoder"
    elif found is None:
        reason = "no such model"
    else:
        return found
    raise ModelLoadError(f"causal language models are supported, and model_type={config.model_type!r} is {reason}")


def model_class(config: PreTrainedConfig, found: AutoClass) -> Any:
    """The class of a configuration's model; PreTrainedModel where it is the checkpoint's own code."""
    return found.mapping.get(type(config), PreTrainedModel)


OnConfig = Callable[[PreTrainedConfig, Dtype, torch.device], None]
"""Called with a target's configuration, the chosen dtype and its device, before its weights are read; for a loaded
model, before it is run."""


def check_target_type(target: Any) -> None:
    """Check that a target is a name or a loaded model.

    Raises:
        InvalidInputError: it is something else, which the message names.
    """
    names = {kind.__name__ for kind in type(target).__mro__}
    found = next((text for name, text in _WRAPPERS.items() if name in names), None)
    if found is not None:
        raise InvalidInputError(f"the target is {found}")
    if isinstance(target, torch.nn.Module) and not isinstance(target, PreTrainedModel):
        raise InvalidInputError(f"the target is a plain torch module ({type(target).__name__}); {_GIVE}")
    if not isinstance(target, (str, Path, PreTrainedModel)):
        raise InvalidInputError(f"target={short(target)} (of type {type(target).__name__}) is no model; {_GIVE}")


def resolve_device(device: Any) -> torch.device:
    """The chosen device (a name, a torch.device, or the index of a GPU); by default CUDA if available.

    Raises:
        InvalidInputError: the name is no device of torch, or the device is not supported or not present.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return torch.device("cuda" if count else "cpu")
    present = ", ".join(["cpu", "cuda", *(f"cuda:{i}" for i in range(count))])
    allowed = f"allowed are {present if count else 'cpu (there is no CUDA device here)'}"
    try:
        if isinstance(device, bool):  # it is an int, and True would be GPU 1
            raise TypeError("a bool names no device")
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        kind = "" if isinstance(device, str) else f" ({type(device).__name__})"
        raise InvalidInputError(f"device={short(device)}{kind} is not a torch device: {allowed}") from error
    if place.type == "cpu":
        return torch.device("cpu")
    if place.type != "cuda":
        reason = "CPU and CUDA are supported"
    elif not count:
        reason = "torch finds no CUDA device on this machine"
    elif place.index is None or place.index < count:
        return place
    else:
        reason = "this machine has no such GPU"
    raise wrong("device", device, f"{reason}; {allowed}")


def resolve_dtype(dtype: Any) -> Dtype:
    """A torch dtype, or "auto".

    Raises:
        InvalidInputError: no dtype of models.
    """
    if isinstance(dtype, str) and dtype == "auto":
        return dtype
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in _DTYPES.values():
        raise wrong("dtype", dtype, f"allowed are auto, {', '.join(_DTYPES)}")
    return found


def dtype_on(device: torch.device, config: PreTrainedConfig, plain: bool) -> Dtype:
    """What "auto" is: on a GPU the checkpoint's own dtype; on a CPU bfloat16, if that is the checkpoint's and the
    processor multiplies it, else float32, which a line of the log says where it is not the checkpoint's.

    plain: whether it is for users' own weights that are not quantised; others are in float32 on a CPU.
    """
    if device.type != "cpu":
        return "auto"
    own = config.get_text_config().dtype or torch.float32
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if plain and native and own == torch.bfloat16:
        return torch.bfloat16
    if own != torch.float32:
        log.info("the weights are stored in %s and computed in float32", own, extra={"aside": True})
    return torch.float32


def load_target(
    checkpoint: Checkpoint,
    dtype: Dtype,
    device: torch.device,
    on_config: OnConfig | None = None,
    group: Group = ALONE,
) -> tuple[PreTrainedModel, Quantisation | None]:
    """Load a causal language model, or a model with one inside (`auto_classes`); returns it and how its weights are
    stored.

    group: the processes that load it together, all of which call it.

    Raises:
        ModelLoadError: it is missing, damaged or no causal language model, its checkpoint and its configuration do not
            fit (see `specdec.loading.load_errors`), or the device has no room for it.
        UnsupportedModelError: it is quantised in FP8 by a scheme that no operator serves.
    """
    with loading_named(checkpoint, "the target model"):
        check_target_folder(checkpoint)
        packed = None if checkpoint.gguf_file is None else gguf_types(checkpoint)
        config = AutoConfig.from_pretrained(checkpoint.path, **checkpoint.options)
        check_depth(config.to_dict())
        found = auto_class(config)
        stored = packed or stored_quantisation(config)
        method = check_quantisation(stored)
        if dtype == "auto":
            dtype = dtype_on(device, config, method is None and not checkpoint.builtin)
        place = placed_at(method, device)
        if checkpoint.is_folder and not getattr(config, "transformers_weights", None):  # the name of another file
            check_weight_files(Path(checkpoint.path))
        if on_config is not None:
            on_config(config, dtype, device)
        if checkpoint.is_quanto:
            layers = read_json(Path(checkpoint.path) / QUANTO_MAP)
            model, info = load_quanto(open_folder(checkpoint.path), layers, found.loader, config, dtype)
            check_complete(model, info)
            kinds = sorted({f"{name}={how[name]}" for how in layers.values() for name in ("weights", "activations")})
            method = "quanto"
            stored = {"quant_method": "quanto", "weights": ", ".join(kinds)}
        else:
            with _own_quantizer(checkpoint, config, stored or {}, dtype, device, group):
                model = _from_pretrained(checkpoint, config, found, dtype, place, group)
    settle(model)
    hold_dtype(model, method, dtype)
    if checkpoint.adapter is not None:
        model = applied(model, checkpoint.adapter)
    check_weights_fit(model, device, checkpoint.name)
    if not place:  # a library that packed it for a device may refuse to move it
        placed: Any = model  # hides transformers' decorators, behind which type checkers do not see what `to` takes
        placed.to(device)
    model.eval()
    quantisation = None if method is None else quantisation_of(model, stored)
    warn_of_dense(checkpoint.name, model, quantisation)
    if quantisation is not None:
        log.info("the weights are quantised by %s", quantisation, extra={"aside": True})
    return model, quantisation


def _own_quantizer(
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    stored: Config,
    dtype: Dtype,
    device: torch.device,
    group: Group,
) -> AbstractContextManager[None]:
    """A context in which a target is loaded by specdec's own quantizer, where transformers' does not serve."""
    method = method_of(stored)
    if method in ("fp8", "mxfp4"):
        from specdec.wrapped.quantised_layers import loaded_by, own_quantizer

        found = own_quantizer(config, stored, dtype, device, checkpoint.name, group is ALONE)
        if found is not None:
            return loaded_by(method, found)
    if method is not None and without_kernels(method, device):
        config.quantization_config = {**stored, "dequantize": True}  # transformers would do so silently
    return nullcontext()


def _from_pretrained(
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    found: AutoClass,
    dtype: Dtype,
    place: Options,
    group: Group,
) -> PreTrainedModel:
    """The checkpoint through transformers, or this process's share of it in a group; `place`: see `placed_at`."""
    model: PreTrainedModel
    reading = group.reading(config, found)
    quiet = _without_progress_bar() if checkpoint.builtin else nullcontext()
    with _module_tensors_expected(config, found), quiet, reading.while_reading():
        model, info = found.loader.from_pretrained(
            checkpoint.path,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported by name in check_complete
            # transformers looks for an adapter where peft is installed: not on the hub for a model that is cached
            adapter_kwargs={"local_files_only": checkpoint.local_files_only},
            **place,
            **reading.options,
            **checkpoint.options,
        )
    check_complete(model, info)
    reading.finish(model)
    return model


def _module_tensors_expected(config: PreTrainedConfig, found: AutoClass) -> AbstractContextManager[None]:
    """Keep transformers from reporting multi-token-prediction tensors: it drops them, `load_mtp` reads them.

    Each model class keeps patterns of such names in `_keys_to_ignore_on_load_unexpected`; most cover only the published
    model's number of layers.
    """
    text = config.get_text_config()
    modules = getattr(text, "num_nextn_predict_layers", None) or 0
    patterns = module_names(getattr(text, "num_hidden_layers", 0), modules)
    kind = model_class(config, found)
    ignored = [*(kind._keys_to_ignore_on_load_unexpected or ()), *patterns]
    return borrowed([(kind, "_keys_to_ignore_on_load_unexpected", ignored)])


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bar, for built-in models, which load at once."""
    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()


def open_target(
    target: Target, options: LoadOptions, on_config: OnConfig, group: Group = ALONE
) -> tuple[PreTrainedModel, Checkpoint | None]:
    """Load a target by name, or take a loaded model as it is; with the checkpoint its tokenizer and head are found by.

    Of a PeftModel the model inside is taken. group: the processes that load it together, all of which call it.

    Raises:
        ModelLoadError: it is missing or transformers cannot load it.
        UnsupportedModelError: a loaded model that is no causal language model, or an adapter that is not supported.
        InvalidInputError: an object that is no model, an option for a model that is loaded already, or a model in
            training mode.
    """
    target = unwrapped(target)
    check_target_type(target)
    if not isinstance(target, PreTrainedModel):
        place = resolve_device(options.device)
        kind = resolve_dtype(options.dtype)
        found = find_checkpoint(target, options.revision, options.trust_remote_code, gguf_file=options.gguf_file)
        checkpoint = with_adapter(found, options.adapter, options.merge_adapter)
        model, quantisation = load_target(checkpoint, kind, place, on_config, group)
        check_loaded_target(model)
        return model, replace(checkpoint, quantisation=quantisation)
    for names, advice in (
        (("dtype", "device"), f" ({target.dtype}, {target.device}); move it with model.to(…) before"),
        (
            ("adapter", "merge_adapter"),
            "; give peft.PeftModel.from_pretrained(model, adapter) as the target, or its merge_and_unload()",
        ),
        (("revision", "gguf_file"), "; leave it out"),
    ):
        if any(getattr(options, name) != getattr(LoadOptions, name) for name in names):
            given = ", ".join(f"{name}={short(getattr(options, name))}" for name in names)
            raise InvalidInputError(f"{given}: the model is loaded already{advice}")
    check_loaded_target(target)
    without_unpickled(target)
    settle(target)
    on_config(target.config, target.dtype, target.device)
    name = target.name_or_path
    quantisation = quantisation_of(target, None)
    warn_of_dense(name or type(target).__name__, target, quantisation)
    if not name:
        return target, None
    trusted = options.trust_remote_code
    file = (stored_quantisation(target.config) or {}).get("gguf_file")
    return target, Checkpoint(name, resolve(name), trust_remote_code=trusted, quantisation=quantisation, gguf_file=file)
