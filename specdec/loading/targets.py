"""Names and folders -> a target model with its tokenizer, and a draft head that fits it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from drafters.base import Head
from drafters.eagle3.checkpoint import TargetFacts, load_eagle3
from drafters.mtp.checkpoint import has_mtp, load_mtp, module_names
from drafters.mtp.spec import MtpReading, mtp_target
from drafters.mtp.stack import MtpStack
from specdec.errors import HeadLoadError, HeadMismatchError, InvalidInputError, ModelLoadError
from specdec.loading.builtin import builtin_names, builtin_path
from specdec.loading.memory import check_weights_fit
from specdec.target.target import TargetProbe

AUTO_HEAD = "auto"
MTP_HEAD = "mtp"
_BUILTIN_HEADS = {"gsm-llama": "gsm-llama-eagle3", "gsm-deepseek": "gsm-deepseek"}


def resolve(name: str | Path) -> str:
    """A built-in model's name -> its folder; anything else stays (a local folder or a hub name)."""
    text = str(name)
    return str(builtin_path(text)) if text in builtin_names() and not Path(text).exists() else text


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device asked for; by default CUDA where there is one.

    Raises:
        InvalidInputError: the name is no device of torch.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise InvalidInputError(f"device={device!r} is not a torch device: {error}") from error


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """A torch dtype; "auto" is float32 on CPU and the checkpoint's own on a GPU.

    Raises:
        InvalidInputError: the name is no floating-point dtype of torch.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidInputError(f"dtype={dtype!r}: allowed are auto, float32, bfloat16, float16, float64")
    return found


def load_target(name: str | Path, dtype: torch.dtype | str, device: torch.device) -> PreTrainedModel:
    """Load a causal language model through transformers.

    Raises:
        ModelLoadError: it is missing, transformers cannot load it, or the device has no room for it.
    """
    path = resolve(name)
    try:
        config = AutoConfig.from_pretrained(path)
        with _module_tensors_expected(config), nullcontext() if path == str(name) else _without_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelLoadError(
            f"cannot load the target model {str(name)!r}: {error}\nGive a folder, a hub name, or a built-in name "
            f"({', '.join(_BUILTIN_HEADS)})."
        ) from error
    check_weights_fit(model, device, str(name))
    return model.to(device).eval()  # type: ignore[arg-type]


@contextmanager
def _module_tensors_expected(config: PreTrainedConfig) -> Iterator[None]:
    """transformers reports no multi-token-prediction tensors as unexpected: it drops them, `load_mtp` reads them.

    Each model class keeps patterns of such names in `_keys_to_ignore_on_load_unexpected`; most cover only the published
    model's number of layers.
    """
    text = config.get_text_config()
    modules = getattr(text, "num_nextn_predict_layers", None) or 0
    patterns = module_names(getattr(text, "num_hidden_layers", 0), modules)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), PreTrainedModel)
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
    """A built-in model loads in a blink: transformers shows no bar for it."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def open_target(
    target: str | Path | PreTrainedModel, dtype: str | torch.dtype, device: str | torch.device | None
) -> tuple[PreTrainedModel, str | None]:
    """Load a target by name, or take a loaded model as it is; with the name its tokenizer and head are found by.

    Raises:
        ModelLoadError: it is missing or transformers cannot load it.
        InvalidInputError: a dtype or device for a model that is loaded already, or a model in training mode.
    """
    if not isinstance(target, PreTrainedModel):
        place = resolve_device(device)
        return load_target(target, resolve_dtype(dtype, place), place), str(target)
    if dtype != "auto" or device is not None:
        raise InvalidInputError(
            f"dtype={dtype!r}, device={device!r}: the model is loaded already ({target.dtype}, {target.device}); "
            "move it with model.to(…) before"
        )
    if target.training:
        raise InvalidInputError("the model is in training mode, where dropout changes its output; call model.eval()")
    return target, target.name_or_path or None


def open_tokenizer(tokenizer: Any, name: str | None) -> Any:
    """The tokenizer given, else the target's own.

    Raises:
        InvalidInputError: neither a tokenizer nor a name to load one by.
        ModelLoadError: it cannot be loaded.
    """
    if tokenizer is not None:
        return tokenizer
    if name is None:
        raise InvalidInputError("the model has no name to load a tokenizer by; give tokenizer=…")
    return load_tokenizer(name)


def load_tokenizer(name: str | Path) -> Any:
    """Load a tokenizer through transformers.

    Raises:
        ModelLoadError: it is missing or cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(resolve(name))
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"cannot load the tokenizer of {str(name)!r}: {error}") from error


def has_builtin_head(target: str | Path) -> bool:
    """Whether draft="auto" means something for this target."""
    return str(target) in _BUILTIN_HEADS


def resolve_head(draft: str | Path, target_name: str | None) -> str:
    """The head's folder or hub name; "auto" is the head that was built in with the target.

    Raises:
        HeadLoadError: "auto" for a target without a built-in head.
    """
    if str(draft) != AUTO_HEAD:
        return resolve(draft)
    head = _BUILTIN_HEADS.get(target_name or "")
    if head is None:
        raise HeadLoadError(f"draft='auto': {target_name!r} has no built-in head; give the head's folder or hub name")
    return resolve(head)


def target_facts(probed: TargetProbe) -> TargetFacts:
    """What a head's loader must know of its target.

    Raises:
        HeadLoadError: the target has no output embedding.
    """
    model = probed.model
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if output is None:
        raise HeadLoadError(f"{type(model).__name__} has no output embedding (lm_head) that a head could share")
    return TargetFacts(
        hidden_size=model.config.get_text_config().hidden_size,
        vocab_size=probed.vocab_size,
        num_layers=len(probed.layers),
        embedding=embedding.weight,  # type: ignore[arg-type]
        lm_head=output.weight,
    )


def load_head(
    draft: str | Path | Head, target_name: str | None, probed: TargetProbe, reading: MtpReading | None = None
) -> Head:
    """Load a draft head for a probed target, in the target's dtype and on its device.

    Args:
        draft: folder or hub name of a head, "auto", or "mtp" for the target checkpoint's own multi-token-prediction
            module; a loaded head is taken as it is, if it fits.
        reading: how to read a multi-token-prediction module; default as its family's reference code does.

    Raises:
        HeadLoadError, HeadMismatchError: see `drafters.eagle3.checkpoint.load_eagle3` and `drafters.mtp.checkpoint`.
        InvalidInputError: a reading for a head that is none of these modules, or is loaded already.
    """
    how = reading or MtpReading()
    if not isinstance(draft, (str, Path)):
        _check_no_reading(how, "the head is loaded already")
        _check_is_head(draft)
        _check_fits(draft, probed)
        return draft
    if str(draft) == MTP_HEAD:
        if target_name is None:
            raise HeadLoadError("draft='mtp' reads the target's checkpoint, but this model has no name; give a folder")
        return _load_mtp_head(resolve(target_name), probed, how)
    path, model = resolve_head(draft, target_name), probed.model
    if has_mtp(path):
        return _load_mtp_head(path, probed, how)
    _check_no_reading(how, f"{path} has no multi-token-prediction module")
    return load_eagle3(path, target_facts(probed), model.dtype, model.device)


def _check_no_reading(reading: MtpReading, reason: str) -> None:
    if reading != MtpReading():
        raise InvalidInputError(
            f"mtp_concat={reading.concat!r}, mtp_feedback={reading.feedback!r} say how a multi-token-prediction module "
            f"is read from a checkpoint, but {reason}; leave them out"
        )


def _load_mtp_head(path: str, probed: TargetProbe, reading: MtpReading) -> Head:
    model = probed.model
    modules = load_mtp(path, mtp_target(model), model.dtype, model.device, reading)
    return modules[0] if len(modules) == 1 else MtpStack(modules)


def _check_is_head(head: Head) -> None:
    """Name what a loaded object lacks."""
    members = (*Head.__annotations__, *(name for name in vars(Head) if not name.startswith("_")))
    missing = [name for name in dict.fromkeys(members) if not hasattr(head, name)]
    if missing:
        raise HeadLoadError(
            f"{type(head).__name__} is no draft head: it has no {', '.join(missing)}; see drafters.base.Head"
        )


def _check_fits(head: Head, probed: TargetProbe) -> None:
    """A loaded head brings no record of its target: look at the width it fuses and at the ids it drafts."""
    model = probed.model
    width = model.config.get_text_config().hidden_size
    tapped = torch.zeros(1, len(head.taps) * width, dtype=model.dtype, device=model.device)
    try:
        with torch.no_grad():
            head.fuse(tapped)
    except RuntimeError as error:
        raise HeadMismatchError(
            f"the head was made for another target: it cannot read {len(head.taps)} states of width {width}: {error}"
        ) from error
    largest = int(head.to_target_ids(torch.arange(head.draft_vocab_size, device=model.device)).max())
    if largest >= probed.vocab_size:
        raise HeadMismatchError(
            f"the head was made for another target: it drafts token {largest}, the target has {probed.vocab_size}"
        )
