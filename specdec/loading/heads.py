"""A name, a folder or a loaded head -> the draft head, checked against its target; the tokens that it drafts on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from attention.backends.limits import dtype_name
from attention.hf.weights import dense_weight
from drafters.base import DraftsOnSome, Head, TargetFacts
from drafters.checkpoints.config_fields import UNKNOWN, HeadReport, Reported
from drafters.checkpoints.tensor_files import CheckpointFolder, locate, open_folder
from drafters.families import FAMILIES, Family, check_options, family_of
from drafters.vocab import ids_of, most_frequent
from specdec.errors import HeadLoadError, HeadMismatchError, InvalidInputError, ModelLoadError
from specdec.loading.checkpoint import Checkpoint, check_target_folder, find_checkpoint
from specdec.loading.load_errors import loading_named
from specdec.loading.names import BUILTIN_HEADS, DRAFT_WORDS, ModelName, head_for, misspelt_draft, resolve
from specdec.options import LoadOptions
from specdec.options.generation_config import eos_ids
from specdec.requests.prompts import encode_prompts
from specdec.user_warnings import warn_user
from specdec.values import IdSequence, Options, TokenIds, short, token_ids, whole, wrong
from specdec.wrapped.group import ALONE, Group
from specdec.wrapped.probing import TargetProbe

_EMBEDDINGS = ("embed_tokens.weight", "tok_embeddings.weight", "embeddings.weight", "wte.weight")
_OUTPUTS = ("lm_head.weight", "output.weight")
_LARGEST_ID = 2**24 - 1
"""Far more than any vocabulary has: counts are kept for each id up to the largest in the texts."""
Draft = ModelName | Head | PreTrainedModel | None
LOOKUP = "lookup"
IN_TARGET = {family.in_target: family for family in FAMILIES.values() if family.in_target is not None}
"""Families whose heads lie in a target's own checkpoint, by the value of `draft` that selects them."""


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
    with loading_named(checkpoint, "the target model"):
        check_target_folder(checkpoint)
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


def _stored(folder: CheckpointFolder, endings: tuple[str, ...]) -> Tensor | None:
    """The tensor with the shortest name that has one of these endings."""
    for ending in endings:
        found = [name for name in folder.tensors if f".{name}".endswith(f".{ending}")]
        if found:
            name = min(found, key=len)
            return folder.load([name])[name]
    return None


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
        raise wrong("draft", draft, 'of lists, allowed are [head, "lookup"] and ["lookup"]')
    return (heads[0] if heads else None), True


def resolve_head(draft: ModelName, target_name: str | None, gguf_file: str | None = None) -> str:
    """The head's folder or hub name; "auto" and "block" are heads built in for the target.

    Raises:
        HeadLoadError: the target has no built-in head, or the name is a misspelling of a word or of a built-in head.
    """
    word = str(draft)
    if word not in BUILTIN_HEADS:
        if reason := misspelt_draft(draft):
            raise HeadLoadError(f"cannot load the head {word!r}: {reason}")
        return resolve(draft)
    head = head_for(target_name, gguf_file, word)
    if head is None:
        kind = DRAFT_WORDS[word].removeprefix("the ")
        raise HeadLoadError(f"draft={word!r}: {target_name!r} has no {kind}; give the head's folder or hub name")
    return resolve(head)


def target_facts(probed: TargetProbe) -> TargetFacts:
    """What a head's loader must know of its target.

    Raises:
        HeadLoadError: the target has no output embedding, or only a library can read one of its embeddings.
    """
    model = probed.model
    embedding = model.get_input_embeddings()
    output = model.get_output_embeddings()
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


def _shared(module: Any, what: str, model: Any) -> Tensor:
    """The weight of an embedding that a head may share; of a quantised one a copy in floating point."""
    weight = dense_weight(module)
    if weight is None:
        raise HeadLoadError(
            f"{type(model).__name__}'s {what} is quantised ({type(module).__name__}), and a head that shares it needs "
            "its rows; take a target whose embeddings are not quantised (most libraries leave them alone by default)"
        )
    return weight


def reading_options(options: LoadOptions) -> Options:
    """The load options for reading a head's files, of any family, that differ from their defaults."""
    default = LoadOptions()
    values = {name: getattr(options, name) for family in FAMILIES.values() for name in family.options}
    return {name: value for name, value in values.items() if value and value != getattr(default, name)}


def load_head(
    draft: Draft,
    target: Checkpoint | None,
    probed: TargetProbe,
    options: LoadOptions,
    tokenizer: Any,
    group: Group = ALONE,
) -> Head | None:
    """Load a draft head for a probed target, in the target's dtype and on its device; None for none.

    Args:
        draft: folder or hub name of a head or of a small draft model, "auto", or "mtp" for the target checkpoint's own
            multi-token-prediction module; a loaded head or model (see `check_head_type`) is taken as it is, if it fits.
        options: those for reading the files (`drafters.families.Family.options`) count, and `draft_vocab`, as ids.

    Raises:
        HeadLoadError, HeadMismatchError: see the family's `load_head`.
        InvalidInputError: an option for a head of another family or for a head that is loaded already, see `draft_on`.
    """
    given = reading_options(options)
    vocabulary = options.draft_vocab
    if not isinstance(draft, (str, Path, PreTrainedModel)):
        reason = "there is no draft head" if draft is None else "the head is loaded already"
        check_options(given, None, reason)
        if vocabulary is not None:
            own = "" if draft is None else " (it has `draft_on`)"
            raise wrong("draft_vocab", vocabulary, f"{reason}{own}; leave it out")
        if draft is not None:
            _check_fits(draft, probed)
        return draft
    family: Family | None
    found: Path | PreTrainedModel
    if isinstance(draft, PreTrainedModel):
        family = family_of(draft)
        found = draft
    elif (family := IN_TARGET.get(str(draft))) is None:
        path = resolve_head(draft, *(None, None) if target is None else (target.name, target.gguf_file))
        family = family_of(path)
        found = locate(path)
    elif target is None:
        raise HeadLoadError(
            f"draft={str(draft)!r} reads the target's checkpoint, but this model has no name; give a folder"
        )
    else:
        found = locate(target.path, target.revision)
    check_options(given, family)
    if group.size > 1 and not family.among_ranks:
        raise InvalidInputError(
            f"draft: {family.name} drafts for a target in one process, not in {group.size}; give a head or "
            "draft='lookup', or tensor_parallel_size=1"
        )
    head = family.code().load_head(found, probed.model, lambda: target_facts(probed), given)
    if isinstance(found, PreTrainedModel):
        _check_fits(head, probed)
    if isinstance(head, Reported) and head.checkpoint_report is not None:
        _warn_of_unknown_keys(head.checkpoint_report)
    if vocabulary is not None:
        draft_on(head, token_ids("draft_vocab", vocabulary), probed, tokenizer, group)
    return head


def _warn_of_unknown_keys(report: HeadReport) -> None:
    for field in report.fields:
        if field.name == UNKNOWN:
            warn_user(
                f"config.json of the head {report.path} has keys that are not known here and change nothing: "
                f"{field.value}. If one of them is of what the head computes, few drafts will be accepted: `specdec "
                "inspect HEAD --target TARGET` measures it"
            )


def check_head_type(draft: Any) -> None:
    """Check that a draft is a name, a loaded head, or a loaded model.

    Raises:
        HeadLoadError: it has some of a head's members, but not all; the message names those that it lacks.
        InvalidInputError: it is something else, which the message names.
    """
    if isinstance(draft, (str, Path, PreTrainedModel)) or (isinstance(draft, Head) and not isinstance(draft, type)):
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
        "head's folder or hub name, 'auto', 'mtp', a loaded head (drafters.base.Head), a small causal language model "
        "(by name or loaded), or None"
    )


def _check_fits(head: Head, probed: TargetProbe) -> None:
    """Check a loaded head's device and dtype, the width that it fuses and the ids it drafts: it has no record of its
    target.

    Raises:
        HeadMismatchError: it lies elsewhere, which is named, or was made for another target.
    """
    model = probed.model
    _check_place(head, model)
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


def _check_place(head: Any, model: PreTrainedModel) -> None:
    weights = list(head.parameters()) if isinstance(head, torch.nn.Module) else []
    dtypes = {weight.dtype for weight in weights if weight.is_floating_point()}
    places = {weight.device for weight in weights}
    if places <= {model.device} and (not dtypes or model.dtype in dtypes):
        return
    found = ", ".join(sorted(map(dtype_name, dtypes)))
    raise HeadMismatchError(
        f"the head is {found} on {', '.join(sorted(map(str, places)))}, the target "
        f"{dtype_name(model.dtype)} on {model.device}; move it with head.to(device, dtype)"
    )


def draft_vocab_of(texts: Iterable[str | Sequence[int]], size: int, tokenizer: Any = None) -> list[int]:
    """The most frequent tokens of some texts: what `draft_vocab` of `SpeculativeModel.from_pretrained` takes.

    Args:
        texts: texts, or their token ids, like those that the model will write; its own answers are best.
        size: most tokens.
        tokenizer: the target's; needed for texts.

    Returns:
        At most `size` token ids, ascending (fewer where the texts have no more); of equally frequent ones the smaller.

    Raises:
        InvalidInputError: the texts have no token, or an id that no vocabulary has, `size` is less than 1, or texts
            come without a tokenizer.
    """
    # What a tokenizer returns for several texts.
    texts = texts["input_ids"] if isinstance(texts, Mapping) and "input_ids" in texts else texts
    if isinstance(texts, (str, Mapping)) or not isinstance(texts, Iterable):
        raise wrong("texts", texts, "give a list of texts, or of token ids")
    size = whole("size", size, 1, None, "1 or more, a whole number")
    plain = None if tokenizer is None else partial(tokenizer, add_special_tokens=False)
    ids = [_counted(each) for text in texts for each in encode_prompts(text, plain)]
    counts = torch.bincount(torch.cat(ids)) if ids else torch.zeros(0, dtype=torch.int64)
    if not counts.any():
        raise InvalidInputError("0 tokens in the texts: there must be at least 1")
    return ids_of(most_frequent(counts, min(size, int((counts > 0).sum())))).tolist()


def _counted(ids: IdSequence) -> Tensor:
    """A text's token ids, to be counted. Raises InvalidInputError: an id that no vocabulary has."""
    for each in (min(ids, default=0), max(ids, default=0)):
        whole("a token id of texts", each, 0, _LARGEST_ID)
    return torch.tensor(ids, dtype=torch.int64)


def read_draft_vocab(given: str | Sequence[int] | None) -> TokenIds | None:
    """The token ids of the option `draft_vocab`; a text is the name of a JSON file with a list of them.

    Raises:
        InvalidInputError: the file does not exist or has no such list.
    """
    if not isinstance(given, str):
        return None if given is None else tuple(given)
    try:
        found = json.loads(Path(given).read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"draft_vocab={given!r}: give a JSON file with a list of token ids, as json.dump(specdec.draft_vocab_of("
            f"texts, size, tokenizer), file) makes one: {error}"
        ) from error
    if not isinstance(found, list):
        raise InvalidInputError(f"draft_vocab={given!r}: the file holds {short(found)}, not a list of token ids")
    return token_ids(f"draft_vocab={given!r}", found)


def draft_on(head: Head, ids: IdSequence, probed: TargetProbe, tokenizer: Any, group: Group = ALONE) -> None:
    """Let a head that was just read draft on some tokens, and on the target's end and special tokens.

    group: all of it call this and draft on the same tokens, though the first process alone has the tokenizer.

    Raises:
        InvalidInputError: a head that brings its own draft vocabulary, or ids that the target does not have.
    """
    if not isinstance(head, DraftsOnSome):
        raise InvalidInputError(
            f"draft_vocab: it is for multi-token-prediction modules; the checkpoint of {type(head).__name__} decides "
            "what that drafts on (its own map, or all); leave it out"
        )
    largest = max(ids)
    vocab_size = probed.vocab_size
    if largest >= vocab_size:
        raise InvalidInputError(f"draft_vocab: token {largest}; the target has the tokens 0 … {vocab_size - 1}")
    own = {*ids, *eos_ids(probed.model.generation_config), *_special_ids(tokenizer)}
    left_out = group.least([int(token not in own) for token in range(vocab_size)])
    head.draft_on(torch.tensor([token for token, out in enumerate(left_out) if not out]))


def _special_ids(tokenizer: Any) -> set[int]:
    """A tokenizer's special tokens, including its chat template's; empty if it has none."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {*(getattr(tokenizer, "all_special_ids", None) or ()), *(i for i, t in added.items() if t.special)}
