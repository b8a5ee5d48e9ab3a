"""A name, a folder or a loaded head -> the draft head, checked against its target."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig

from attention.hf.weights import dense_weight
from drafters.base import Head, TargetFacts
from drafters.checkpoints.config_fields import UNKNOWN, HeadReport, Reported
from drafters.checkpoints.tensor_files import CheckpointFolder, is_hub_name, locate, open_folder
from drafters.families import FAMILIES, check_options, family_of
from specdec.errors import HeadLoadError, HeadMismatchError, InvalidInputError, ModelLoadError
from specdec.loading.builtin import AUTO_HEAD, BUILTIN_HEADS, builtin_name, misspelt, resolve
from specdec.loading.checkpoint import Checkpoint, check_target_folder, find_checkpoint
from specdec.loading.load_errors import loading_named
from specdec.loading.objects import check_head_place, check_head_type
from specdec.options import LoadOptions
from specdec.user_warnings import warn_user
from specdec.values import short
from specdec.wrapped.probing import TargetProbe

_EMBEDDINGS = ("embed_tokens.weight", "tok_embeddings.weight", "embeddings.weight", "wte.weight")
_OUTPUTS = ("lm_head.weight", "output.weight")


@dataclass(frozen=True)
class TargetOutline:
    """A target that is not loaded, by hub name or folder.

    architectures: from its config.json. facts: its sizes, embedding and lm_head.
    """

    name: str
    architectures: tuple[str, ...]
    facts: TargetFacts


def outline_target(name: str) -> TargetOutline:
    """Read a target's configuration and its two embeddings.

    Raises:
        ModelLoadError: it is missing or cannot be read, or its embeddings are stored under no name that is known.
        HeadLoadError: its files are damaged.
    """
    checkpoint = find_checkpoint(name)
    check_target_folder(checkpoint)
    with loading_named(checkpoint, "the target model"):
        config = AutoConfig.from_pretrained(checkpoint.path, **checkpoint.options)
    text = config.get_text_config()
    folder = open_folder(locate(checkpoint.path))
    embedding = _stored(folder, _EMBEDDINGS)
    if embedding is None:
        raise ModelLoadError(f"{name}: none of its tensors is an input embedding ({', '.join(_EMBEDDINGS)})")
    lm_head = _stored(folder, _OUTPUTS)
    facts = TargetFacts(
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
        embedding=embedding,
        lm_head=embedding if lm_head is None else lm_head,
        model_type=text.model_type,
    )
    place = str(Path(checkpoint.path).resolve()) if checkpoint.is_folder else checkpoint.path
    return TargetOutline(place, tuple(config.architectures or ()), facts)


def _stored(folder: CheckpointFolder, endings: tuple[str, ...]) -> torch.Tensor | None:
    """The tensor with the shortest name that has one of these endings."""
    for ending in endings:
        found = [name for name in folder.tensors if name == ending or name.endswith(f".{ending}")]
        if found:
            name = min(found, key=len)
            return folder.load([name])[name]
    return None


def target_of_head(head: str | Path) -> str | None:
    """The target that a head (folder, or hub name) was made for, by its own files: a built-in head's, the checkpoint
    that holds a module, or the one that config.json names. None where they name none.

    Raises:
        HeadLoadError: the files cannot be read.
    """
    built_in = builtin_name(head)
    for target, own in BUILTIN_HEADS.items():
        if built_in == own:
            return target
    return family_of(head).code().target_of(head)


def is_available(target: str) -> bool:
    """Whether a target lies on this machine: a built-in one, a folder, or a hub model in the local cache."""
    if builtin_name(target) is not None or os.path.isdir(os.path.expanduser(target)):
        return True
    return is_hub_name(target) and isinstance(try_to_load_from_cache(target, "config.json"), str)


LOOKUP = "lookup"
IN_TARGET = {family.in_target: family for family in FAMILIES.values() if family.in_target is not None}
"""Families whose heads lie in a target's own checkpoint, by the value of `draft` that selects them."""


def split_draft(draft: Any) -> tuple[Any, bool]:
    """The head that a draft names, or None, and whether requests draft by lookup (besides).

    draft: a head (by name or loaded), "lookup", [head, "lookup"] or "HEAD,lookup".

    Raises:
        InvalidInputError: a list that is no head and "lookup".

    >>> split_draft("lookup"), split_draft("auto,lookup"), split_draft(["mtp", "lookup"]), split_draft("auto")
    ((None, True), ('auto', True), ('mtp', True), ('auto', False))
    """
    if isinstance(draft, (str, Path)):
        head, comma, last = str(draft).rpartition(",")
        if last.strip() != LOOKUP:
            return draft, False
        return (head.strip() if comma else None), True
    if not isinstance(draft, (list, tuple)):
        return draft, False
    heads = [each for each in draft if not isinstance(each, str) or each != LOOKUP]
    if len(heads) == len(draft):
        return draft, False
    if len(heads) > 1 or len(draft) - len(heads) > 1:
        raise InvalidInputError(f'draft={short(draft)}: of lists, allowed are [head, "lookup"] and ["lookup"]')
    return (heads[0] if heads else None), True


def resolve_head(draft: str | Path, target_name: str | None) -> str:
    """The head's folder or hub name; "auto" is the head built in with the target.

    Raises:
        HeadLoadError: the target has no built-in head, or the name is a misspelling of a built-in head's.
    """
    if str(draft) != AUTO_HEAD:
        if get_close_matches(str(draft), [LOOKUP], 1, 0.8) and not Path(draft).exists():
            raise HeadLoadError(f"there is no head {str(draft)!r}; did you mean {LOOKUP!r}, drafts without a head?")
        if reason := misspelt(draft):
            raise HeadLoadError(f"cannot load the head {str(draft)!r}: {reason}")
        return resolve(draft)
    head = BUILTIN_HEADS.get(builtin_name(target_name) or "")
    if head is None:
        raise HeadLoadError(f"draft='auto': {target_name!r} has no built-in head; give the head's folder or hub name")
    return resolve(head)


def target_facts(probed: TargetProbe) -> TargetFacts:
    """What a head's loader must know of its target. Raises HeadLoadError: the target has no output embedding."""
    model = probed.model
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if output is None:
        raise HeadLoadError(f"{type(model).__name__} has no output embedding (lm_head) that a head could share")
    return TargetFacts(
        hidden_size=model.config.get_text_config().hidden_size,
        vocab_size=probed.vocab_size,
        num_layers=len(probed.layers),
        embedding=_shared(embedding, "input embedding", model),
        lm_head=_shared(output, "output embedding (lm_head)", model),
        model_type=model.config.get_text_config().model_type,
    )


def _shared(module: Any, what: str, model: Any) -> torch.Tensor:
    """The weight of an embedding that a head may share; of a quantised one a copy in floating point.

    Raises:
        HeadLoadError: only its library can read it.
    """
    weight = dense_weight(module)
    if weight is None:
        raise HeadLoadError(
            f"{type(model).__name__}'s {what} is quantised ({type(module).__name__}), and a head that shares it needs "
            "its rows; take a target whose embeddings are not quantised (most libraries leave them alone by default)"
        )
    return weight


def reading_options(options: LoadOptions) -> dict[str, Any]:
    """The load options for reading a head's files, of any family, that differ from their defaults."""
    default = LoadOptions()
    values = {name: getattr(options, name) for family in FAMILIES.values() for name in family.options}
    return {name: value for name, value in values.items() if value and value != getattr(default, name)}


def load_head(
    draft: str | Path | Head,
    target_name: str | Checkpoint | None,
    probed: TargetProbe,
    options: Mapping[str, Any] | None = None,
) -> Head:
    """Load a draft head for a probed target, in the target's dtype and on its device.

    Args:
        draft: folder or hub name of a head, "auto", or "mtp" for the target checkpoint's own multi-token-prediction
            module; a loaded head is taken as it is, if it fits.
        options: load options for reading the files (`drafters.families.Family.options`) that differ from their
            defaults.

    Raises:
        HeadLoadError, HeadMismatchError: see the family's `load_head`.
        InvalidInputError: no head, or an option for a head of another family or for a head that is loaded already.
    """
    check_head_type(draft)
    given = options or {}
    if not isinstance(draft, (str, Path)):
        check_options(given, None, "the head is loaded already")
        check_head_place(draft, probed.model)
        _check_fits(draft, probed)
        return draft
    target = Checkpoint(target_name, resolve(target_name)) if isinstance(target_name, str) else target_name
    family = IN_TARGET.get(str(draft))
    if family is None:
        path: str | Path = resolve_head(draft, None if target is None else target.name)
        family = family_of(path)
    elif target is None:
        raise HeadLoadError(
            f"draft={str(draft)!r} reads the target's checkpoint, but this model has no name; give a folder"
        )
    else:
        path = locate(target.path, target.revision)
    check_options(given, family)
    head = family.code().load_head(locate(path), probed.model, lambda: target_facts(probed), given)
    _warn_of_unknown_keys(head.checkpoint_report if isinstance(head, Reported) else None)
    return head


def _warn_of_unknown_keys(report: HeadReport | None) -> None:
    unknown = next((field for field in report.fields if field.name == UNKNOWN), None) if report is not None else None
    if report is not None and unknown is not None:
        warn_user(
            f"config.json of the head {report.path} has keys that are not known here and change nothing: "
            f"{unknown.value}. If one of them is of what the head computes, few drafts will be accepted: "
            "`specdec inspect HEAD --target TARGET` measures it"
        )


def _check_fits(head: Head, probed: TargetProbe) -> None:
    """Check the width that a loaded head fuses and the ids it drafts, since it has no record of its target."""
    model = probed.model
    width = model.config.get_text_config().hidden_size
    aux_hidden_states = torch.zeros(1, len(head.aux_layers) * width, dtype=model.dtype, device=model.device)
    try:
        with torch.no_grad():
            head.fuse(aux_hidden_states)
    except RuntimeError as error:
        raise HeadMismatchError(
            f"the head was made for another target: it cannot read {len(head.aux_layers)} states of width {width}: "
            f"{error}"
        ) from error
    largest = int(head.to_target_ids(torch.arange(head.draft_vocab_size, device=model.device)).max())
    if largest >= probed.vocab_size:
        raise HeadMismatchError(
            f"the head was made for another target: it drafts token {largest}, the target has {probed.vocab_size}"
        )
