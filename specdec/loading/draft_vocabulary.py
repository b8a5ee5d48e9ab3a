"""draft_vocab: the tokens of the target on which a multi-token-prediction module drafts, and how they are chosen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drafters.base import DraftsOnSome, Head
from drafters.vocab import ids_of, most_frequent
from specdec.errors import InvalidInputError
from specdec.options.generation_config import eos_ids
from specdec.requests.prompts import encode_prompts
from specdec.values import short, token_ids, whole
from specdec.wrapped.group import ALONE, Group
from specdec.wrapped.probing import TargetProbe

_LARGEST_ID = 2**24 - 1
"""Far more than any vocabulary has: counts are kept for each id up to the largest in the texts."""


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
        raise InvalidInputError(f"texts={short(texts)}: give a list of texts, or of token ids")
    size = whole("size", size, 1, None, "1 or more, a whole number")
    plain = None if tokenizer is None else partial(tokenizer, add_special_tokens=False)
    ids = [_counted(each) for text in texts for each in encode_prompts(text, plain)]
    counts = torch.bincount(torch.cat(ids)) if ids else torch.zeros(0, dtype=torch.int64)
    if not counts.any():
        raise InvalidInputError(f"{int(counts.sum())} tokens in the texts: there must be at least 1")
    return ids_of(most_frequent(counts, min(size, int((counts > 0).sum())))).tolist()


def _counted(ids: Sequence[int]) -> torch.Tensor:
    """A text's token ids, to be counted. Raises InvalidInputError: an id that no vocabulary has."""
    for each in (min(ids, default=0), max(ids, default=0)):
        whole("a token id of texts", each, 0, _LARGEST_ID)
    return torch.tensor(ids, dtype=torch.int64)


def read_draft_vocab(given: str | Sequence[int] | None) -> tuple[int, ...] | None:
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


def check_draft_vocab(given: object, reason: str) -> None:
    """Raises InvalidInputError: the option is given, where it means nothing for a reason."""
    if given is not None:
        raise InvalidInputError(f"draft_vocab={short(given)}: {reason}; leave it out")


def draft_on(head: Head, ids: Sequence[int], probed: TargetProbe, tokenizer: Any, group: Group = ALONE) -> None:
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
    largest, vocab_size = max(ids), probed.vocab_size
    if largest >= vocab_size:
        raise InvalidInputError(f"draft_vocab: token {largest}; the target has the tokens 0 … {vocab_size - 1}")
    own = {*ids, *eos_ids(probed.model.generation_config), *_special_ids(tokenizer)}
    left_out = group.least([int(token not in own) for token in range(vocab_size)])
    head.draft_on(torch.tensor([token for token, out in enumerate(left_out) if not out]))


def _special_ids(tokenizer: Any) -> set[int]:
    """A tokenizer's special tokens, including its chat template's; empty if it has none."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {*(getattr(tokenizer, "all_special_ids", None) or ()), *(i for i, t in added.items() if t.special)}
