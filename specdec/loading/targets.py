"""Names and folders -> a target model with its tokenizer, and a draft head that fits it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from drafters.base import Head
from drafters.checkpoints.config_fields import HeadReport
from drafters.checkpoints.tensor_files import locate
from drafters.eagle3.checkpoint import TargetFacts, describe_eagle3, load_eagle3
from drafters.mtp.checkpoint import describe_mtp, has_mtp, load_mtp, module_names
from drafters.mtp.spec import MtpReading, mtp_target
from drafters.mtp.stack import MtpStack
from specdec.arguments import shown
from specdec.errors import HeadLoadError, HeadMismatchError, InvalidInputError, ModelLoadError
from specdec.loading.builtin import BUILTIN_HEADS, builtin_names, builtin_path
from specdec.loading.checkpoint import Checkpoint, check_target_folder, find_checkpoint, resolve
from specdec.loading.devices import resolve_device, resolve_dtype
from specdec.loading.load_errors import loading_named
from specdec.loading.memory import check_weights_fit
from specdec.loading.objects import check_head_place, check_head_type, check_loaded_target, check_target_type
from specdec.loading.strictness import check_complete
from specdec.target.target import TargetProbe

AUTO_HEAD = "auto"
MTP_HEAD = "mtp"


def load_target(name: str | Path | Checkpoint, dtype: torch.dtype | str, device: torch.device) -> PreTrainedModel:
    """Load a causal language model through transformers.

    Raises:
        ModelLoadError: it is missing, damaged or no causal language model, its checkpoint and its configuration do not
            fit (see `specdec.loading.strictness`), or the device has no room for it.
    """
    checkpoint = name if isinstance(name, Checkpoint) else find_checkpoint(name)
    check_target_folder(checkpoint)
    with loading_named(checkpoint, "the target model"):
        config = AutoConfig.from_pretrained(checkpoint.path, **checkpoint.options)
        check_causal(config, checkpoint)
        with _module_tensors_expected(config), _without_progress_bar() if checkpoint.builtin else nullcontext():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                checkpoint.path,
                config=config,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported by name in check_complete
                **checkpoint.options,
            )
        model, found = loaded
        check_complete(checkpoint.name, model, found)
    check_weights_fit(model, device, checkpoint.name)
    placed: PreTrainedModel = model.to(device).eval()
    return placed


def check_causal(config: PreTrainedConfig, checkpoint: Checkpoint) -> None:
    """Refuse encoders, image models and the like.

    Raises:
        ModelLoadError: transformers has no causal language model for this configuration.
    """
    kind, custom = type(config), getattr(config, "auto_map", None) or {}
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in custom:
        reason = "an encoder and a decoder" if getattr(config, "is_encoder_decoder", False) else "no such model"
    elif kind in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", True) is False:
        reason = "an encoder (is_decoder is false)"
    else:
        return
    raise ModelLoadError(
        f"cannot load the target model {checkpoint.name!r}: causal language models are supported, and "
        f"model_type={config.model_type!r} is {reason}"
    )


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
    target: str | Path | PreTrainedModel,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, Checkpoint | None]:
    """Load a target by name, or take a loaded model as it is; with the checkpoint its tokenizer and head are found by.

    Raises:
        ModelLoadError: it is missing or transformers cannot load it.
        UnsupportedModelError: a loaded model that is no causal language model.
        InvalidInputError: an object that is no model, an option for a model that is loaded already, or a model in
            training mode.
    """
    check_target_type(target)
    if not isinstance(target, PreTrainedModel):
        place = resolve_device(device)
        kind = resolve_dtype(dtype, place)
        checkpoint = find_checkpoint(target, revision, trust_remote_code)
        model = load_target(checkpoint, kind, place)
        check_loaded_target(model)
        return model, checkpoint
    if not isinstance(dtype, str) or dtype != "auto" or device is not None:
        raise InvalidInputError(
            f"dtype={shown(dtype)}, device={shown(device)}: the model is loaded already ({target.dtype}, "
            f"{target.device}); move it with model.to(…) before"
        )
    if revision is not None:
        raise InvalidInputError(f"revision={revision!r}: the model is loaded already; leave it out")
    check_loaded_target(target)
    name = target.name_or_path
    return target, Checkpoint(name, resolve(name), trust_remote_code=trust_remote_code) if name else None


def builtin_name(target: str | Path | None) -> str | None:
    """The built-in model that this name or folder is; None where it is none.

    A model loaded from a built-in folder is known by that folder: transformers keeps it as `name_or_path`.
    """
    if target is None:
        return None
    folder = Path(resolve(target)).resolve()
    return next((name for name in builtin_names() if builtin_path(name).resolve() == folder), None)


def has_builtin_head(target: str | Path) -> bool:
    """Whether draft="auto" means something for this target."""
    return builtin_name(target) in BUILTIN_HEADS


def resolve_head(draft: str | Path, target_name: str | None) -> str:
    """The head's folder or hub name; "auto" is the head that was built in with the target.

    Raises:
        HeadLoadError: "auto" for a target without a built-in head.
    """
    if str(draft) != AUTO_HEAD:
        return resolve(draft)
    head = BUILTIN_HEADS.get(builtin_name(target_name) or "")
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
    draft: str | Path | Head,
    target_name: str | Checkpoint | None,
    probed: TargetProbe,
    reading: MtpReading | None = None,
) -> Head:
    """Load a draft head for a probed target, in the target's dtype and on its device.

    Args:
        draft: folder or hub name of a head, "auto", or "mtp" for the target checkpoint's own multi-token-prediction
            module; a loaded head is taken as it is, if it fits.
        reading: how to read a multi-token-prediction module; default as its family's reference code does.

    Raises:
        HeadLoadError, HeadMismatchError: see `drafters.eagle3.checkpoint.load_eagle3` and `drafters.mtp.checkpoint`.
        InvalidInputError: no head, or a reading for a head that is none of these modules, or is loaded already.
    """
    check_head_type(draft)
    how = reading or MtpReading()
    if not isinstance(draft, (str, Path)):
        _check_no_reading(how, "the head is loaded already")
        check_head_place(draft, probed.model)
        _check_fits(draft, probed)
        return draft
    target = Checkpoint(target_name, resolve(target_name)) if isinstance(target_name, str) else target_name
    if str(draft) == MTP_HEAD:
        if target is None:
            raise HeadLoadError("draft='mtp' reads the target's checkpoint, but this model has no name; give a folder")
        return _load_mtp_head(locate(target.path, target.revision), probed, how)
    path, model = resolve_head(draft, None if target is None else target.name), probed.model
    if has_mtp(path):
        return _load_mtp_head(path, probed, how)
    _check_no_reading(how, f"{path} has no multi-token-prediction module")
    return load_eagle3(path, target_facts(probed), model.dtype, model.device)


def head_report(
    draft: str | Path, target_name: str, probed: TargetProbe, reading: MtpReading | None = None
) -> HeadReport:
    """Every resolved field of a head and where it came from.

    Args:
        draft: folder or hub name of the head, "auto" or "mtp", as for `load_head`; reading: likewise.

    Raises:
        HeadLoadError, HeadMismatchError: see `drafters.eagle3.checkpoint.describe_eagle3`.
    """
    path = resolve(target_name) if str(draft) == MTP_HEAD else resolve_head(draft, target_name)
    if str(draft) == MTP_HEAD or has_mtp(path):
        return describe_mtp(path, mtp_target(probed.model), reading)
    return describe_eagle3(path, target_facts(probed))


def _check_no_reading(reading: MtpReading, reason: str) -> None:
    if reading != MtpReading():
        raise InvalidInputError(
            f"mtp_concat={reading.concat!r}, mtp_feedback={reading.feedback!r} choose how a multi-token-prediction "
            f"module is read from a checkpoint, but {reason}; leave them out"
        )


def _load_mtp_head(path: str | Path, probed: TargetProbe, reading: MtpReading) -> Head:
    model = probed.model
    modules = load_mtp(path, mtp_target(model), model.dtype, model.device, reading)
    return modules[0] if len(modules) == 1 else MtpStack(modules)


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
