"""Checks of objects that are given as a target or as a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from drafters.base import Head
from specdec.errors import HeadLoadError, HeadMismatchError, InvalidInputError, UnsupportedModelError
from specdec.values import short
from specdec.wrapped.model_check import part_in_training

_GIVE = "give a built-in name, a folder, a hub name, or a loaded transformers model (PreTrainedModel)"
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


def check_loaded_target(model: PreTrainedModel) -> None:
    """Check that a loaded model can generate here, whatever its attention.

    Raises:
        UnsupportedModelError: an encoder and decoder, or no output layer over a vocabulary.
        InvalidInputError: weights without values, on several devices, or on a device other than CPU and CUDA; a model
            in training mode.
    """
    name = type(model).__name__
    _check_not_dispatched(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} has an encoder and a decoder; causal language models are supported")
    if not model.can_generate():
        raise UnsupportedModelError(
            f"{name} has no output layer over the vocabulary; load the model as AutoModelForCausalLM"
        )
    places = sorted({str(parameter.device) for parameter in model.parameters()})
    if "meta" in places:
        raise InvalidInputError("the model's weights lie on device 'meta' and have no values; load them first")
    if len(places) > 1:
        raise InvalidInputError(f"the model's weights lie on several devices ({', '.join(places)}); move it to one")
    if model.device.type not in ("cpu", "cuda"):
        raise InvalidInputError(f"the model is on {model.device}; CPU and CUDA are supported; use model.to(…)")
    part = part_in_training(model)
    if part is not None:
        raise InvalidInputError(
            f"the model is in training mode ({part}), where dropout changes its output; call model.eval()"
        )


def _check_not_dispatched(model: PreTrainedModel) -> None:
    """Check that accelerate moves no parts of a model between devices in each forward (`device_map`, offload).

    Raises:
        InvalidInputError: it does; the message names the hook, and where the parts lie.
    """
    # `_hf_hook` is accelerate's mark of a module that it runs; accelerate itself need not be installed.
    hooked = [(name, m._hf_hook) for name, m in model.named_modules() if getattr(m, "_hf_hook", None) is not None]
    if not hooked:
        return
    name, hook = hooked[0]
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    spread = f", its parts lie on {', '.join(sorted(places))}" if places else ""
    raise InvalidInputError(
        f"the model is run by hooks of accelerate ({type(hook).__name__} on {name or type(model).__name__!r}{spread}): "
        "they move weights or inputs between devices in each forward (device_map with several devices, CPU or disk "
        "offload), which is not supported; load the model onto one device (device_map={'': 0}, or without device_map), "
        "or take the hooks off with accelerate.hooks.remove_hook_from_module(model, recurse=True)"
    )


def check_head_type(draft: Any) -> None:
    """Check that a draft is a name or a loaded head.

    Raises:
        HeadLoadError: it has some of a head's members, but not all; the message names those that it lacks.
        InvalidInputError: it is something else, which the message names.
    """
    if isinstance(draft, (str, Path)) or (isinstance(draft, Head) and not isinstance(draft, type)):
        return
    # A protocol's members: annotated attributes, then methods and properties. isinstance names none that is missing.
    members = dict.fromkeys((*Head.__annotations__, *(name for name in vars(Head) if not name.startswith("_"))))
    missing = [name for name in members if not hasattr(draft, name)]
    if hasattr(draft, "fuse") and missing and not isinstance(draft, type):
        raise HeadLoadError(
            f"{type(draft).__name__} is no draft head: it has no {', '.join(missing)}; see drafters.base.Head"
        )
    raise InvalidInputError(
        f"draft={short(draft)} (of type {type(draft).__name__}) is no draft head; give the "
        "head's folder or hub name, 'auto', 'mtp', a loaded head (drafters.base.Head), or None"
    )


def check_head_place(head: Any, model: PreTrainedModel) -> None:
    """Check that a loaded head has the target's device and dtype.

    Raises:
        HeadMismatchError: names both.
    """
    weights = list(head.parameters()) if isinstance(head, torch.nn.Module) else []
    dtypes = {weight.dtype for weight in weights if weight.is_floating_point()}
    places = {weight.device for weight in weights}
    if places <= {model.device} and (not dtypes or model.dtype in dtypes):
        return
    found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    raise HeadMismatchError(
        f"the head is {found} on {', '.join(sorted(map(str, places)))}, the target "
        f"{str(model.dtype).removeprefix('torch.')} on {model.device}; move it with head.to(device, dtype)"
    )
