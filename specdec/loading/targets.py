"""Loads the target by a name or from a folder, or takes a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from drafters.checkpoints.layouts import module_names
from specdec.errors import InvalidInputError
from specdec.loading.adapters import applied, unwrapped, with_adapter
from specdec.loading.auto_classes import AutoClass, auto_class, model_class
from specdec.loading.builtin import resolve
from specdec.loading.checkpoint import (
    Checkpoint,
    check_depth,
    check_quantisation,
    check_target_folder,
    check_weight_files,
    find_checkpoint,
)
from specdec.loading.load_errors import check_complete, loading_named
from specdec.loading.memory import check_weights_fit
from specdec.loading.objects import check_loaded_target, check_target_type
from specdec.loading.progress import log
from specdec.loading.quantisation import (
    Quantisation,
    hold_dtype,
    method_of,
    placed_at,
    quantisation_of,
    settle,
    stored_quantisation,
    warn_of_dense,
    without_kernels,
)
from specdec.loading.sizes import resolve_device, resolve_dtype
from specdec.options import LoadOptions
from specdec.values import short
from specdec.wrapped.alterations import without_unpickled
from specdec.wrapped.group import ALONE, Group

OnConfig = Callable[[PreTrainedConfig, "torch.dtype | str", torch.device], None]
"""Called with a target's configuration, the chosen dtype ("auto": the checkpoint's) and its device, before its
weights are read; for a loaded model, before it is run."""


def load_target(
    checkpoint: Checkpoint,
    dtype: torch.dtype | str,
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
    check_target_folder(checkpoint)
    with loading_named(checkpoint, "the target model"):
        config = AutoConfig.from_pretrained(checkpoint.path, **checkpoint.options)
        check_depth(config.to_dict(), f"cannot load the target model {checkpoint.name!r}")
        found = auto_class(config, checkpoint.name)
        stored = stored_quantisation(config)
        method = check_quantisation(stored, f"cannot load the target model {checkpoint.name!r}")
        place = placed_at(method, device)
        if checkpoint.is_folder and not getattr(config, "transformers_weights", None):  # the name of another file
            check_weight_files(Path(checkpoint.path), f"cannot load the target model {checkpoint.name!r}")
        if on_config is not None:
            on_config(config, dtype, device)
        if checkpoint.is_quanto:
            from specdec.loading.quanto import load_quanto

            method = "quanto"
            model, stored = load_quanto(checkpoint, found.loader, config, dtype)
        else:
            kept = _kept_in_mxfp4(config, method, dtype, device, group)
            if method is not None and kept is None and without_kernels(method, device):
                config.quantization_config = {**(stored or {}), "dequantize": True}  # transformers would do so silently
            with kept or nullcontext():
                model = _from_pretrained(checkpoint, config, found, dtype, place, group)
    settle(model)
    hold_dtype(model, method, dtype)
    if checkpoint.adapter is not None:
        model = applied(model, checkpoint.adapter)
    check_weights_fit(model, device, checkpoint.name)
    placed: Any = model  # hides transformers' decorators, behind which type checkers do not see what `to` takes
    if not place:  # a library that packed it for a device may refuse to move it
        placed = placed.to(device)
    placed.eval()
    quantisation = None if method is None else quantisation_of(placed, stored)
    warn_of_dense(checkpoint.name, placed, quantisation)
    if quantisation is not None:
        log.info("the weights are quantised by %s", quantisation, extra={"aside": True})
    return placed, quantisation


def _kept_in_mxfp4(
    config: PreTrainedConfig, method: str | None, dtype: torch.dtype | str, device: torch.device, group: Group
) -> AbstractContextManager[None] | None:
    """A context in which the experts stay in 4 bits; None where they do not, see `stays_in_mxfp4`."""
    if method != "mxfp4":
        return None
    from specdec.wrapped.mxfp4 import kept_in_mxfp4, stays_in_mxfp4

    return kept_in_mxfp4() if stays_in_mxfp4(config, method, dtype, device, group is ALONE) else None


def _from_pretrained(
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    found: AutoClass,
    dtype: torch.dtype | str,
    place: Mapping[str, Any],
    group: Group,
) -> PreTrainedModel:
    """The checkpoint through transformers, or this process's share of it in a group; `place`: see `placed_at`."""
    reading = group.reading(config, found)
    quiet = _without_progress_bar() if checkpoint.builtin else nullcontext()
    with _module_tensors_expected(config, found), _quantiser(config, checkpoint.name), quiet, reading.while_reading():
        loaded: Any = found.loader.from_pretrained(
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
    model: PreTrainedModel
    model, info = loaded
    check_complete(checkpoint.name, model, info)
    reading.finish(model)
    return model


def _quantiser(config: PreTrainedConfig, name: str) -> AbstractContextManager[None]:
    """A context in which a target of this configuration is loaded; see `specdec.wrapped.fp8.fp8_checkpoint`."""
    if method_of(stored_quantisation(config) or {}) != "fp8":
        return nullcontext()
    from specdec.wrapped.fp8 import fp8_checkpoint

    return fp8_checkpoint(config, name)


@contextmanager
def _module_tensors_expected(config: PreTrainedConfig, found: AutoClass) -> Iterator[None]:
    """Keep transformers from reporting multi-token-prediction tensors: it drops them, `load_mtp` reads them.

    Each model class keeps patterns of such names in `_keys_to_ignore_on_load_unexpected`; most cover only the published
    model's number of layers.
    """
    text = config.get_text_config()
    modules = getattr(text, "num_nextn_predict_layers", None) or 0
    patterns = module_names(getattr(text, "num_hidden_layers", 0), modules)
    kind = model_class(config, found)
    before = kind._keys_to_ignore_on_load_unexpected
    own = "_keys_to_ignore_on_load_unexpected" in vars(kind)
    kind._keys_to_ignore_on_load_unexpected = [*(before or ()), *patterns]
    try:
        yield
    finally:
        if own:
            kind._keys_to_ignore_on_load_unexpected = before
        else:
            del kind._keys_to_ignore_on_load_unexpected


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
    target: str | Path | PreTrainedModel, options: LoadOptions, on_config: OnConfig, group: Group = ALONE
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
    dtype, device, revision = options.dtype, options.device, options.revision
    adapter, merge_adapter, trust_remote_code = options.adapter, options.merge_adapter, options.trust_remote_code
    if not isinstance(target, PreTrainedModel):
        place = resolve_device(device)
        kind = resolve_dtype(dtype, place)
        checkpoint = with_adapter(find_checkpoint(target, revision, trust_remote_code), adapter, merge_adapter)
        model, quantisation = load_target(checkpoint, kind, place, on_config, group)
        check_loaded_target(model)
        return model, replace(checkpoint, quantisation=quantisation)
    if not isinstance(dtype, str) or dtype != "auto" or device is not None:
        raise InvalidInputError(
            f"dtype={short(dtype)}, device={short(device)}: the model is loaded already ({target.dtype}, "
            f"{target.device}); move it with model.to(…) before"
        )
    if adapter is not None or merge_adapter != "auto":
        raise InvalidInputError(
            f"adapter={short(adapter)}, merge_adapter={merge_adapter!r}: the model is loaded already; give "
            "peft.PeftModel.from_pretrained(model, adapter) as the target, or what its merge_and_unload() returns"
        )
    if revision is not None:
        raise InvalidInputError(f"revision={revision!r}: the model is loaded already; leave it out")
    check_loaded_target(target)
    without_unpickled(target)
    settle(target)
    on_config(target.config, target.dtype, target.device)
    name, found = target.name_or_path, quantisation_of(target, None)
    warn_of_dense(name or type(target).__name__, target, found)
    if not name:
        return target, None
    return target, Checkpoint(name, resolve(name), trust_remote_code=trust_remote_code, quantisation=found)
