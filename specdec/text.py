"""From tokens to text while they arrive: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specdec.errors import InvalidInputError


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class TextStream:
    """Decodes new tokens as they come, in complete characters; holds back what may become a stop string.

    Source: huggingface/text-generation-inference, server/text_generation_server/models/model.py (decode_token): decode
    a short tail twice, emit the difference once it ends in a complete character.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._prefix = 0
        self._read = 0
        self._held = ""
        self._emitted = 0

    def push(self, token_ids: list[int]) -> str:
        """Text that became certain with these tokens; `token_ids` is the whole sequence of new tokens so far."""
        before = self.decode(token_ids[self._prefix : self._read])
        after = self.decode(token_ids[self._prefix :])
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._prefix, self._read = self._read, len(token_ids)
        text = self._held + after[len(before) :]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        self._emitted += len(text) - keep
        return text[: len(text) - keep]

    def finish(self, final: str) -> str:
        """What is left to emit of the whole text `final`."""
        return final[self._emitted :]

    def decode(self, token_ids: list[int]) -> str:
        """The text of these tokens, without special tokens."""
        return decode(self._tokenizer, token_ids, skip_special_tokens=True)


_UNDECODABLE = (IndexError, KeyError, TypeError, OverflowError)
"""What tokenizers raise for ids that they do not know: by table, by dictionary, by joining None, in Rust."""


def decode(tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool) -> str:
    """The text of these tokens.

    Raises:
        InvalidInputError: the tokenizer cannot decode them; the message names the first such id. A model may say more
            tokens than its tokenizer has, where its vocabulary is padded.
    """
    try:
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    except _UNDECODABLE as error:
        bad = next((t for t in token_ids if not _decodes(tokenizer, t)), None)
        which = f"token ids {token_ids}" if bad is None else f"token id {bad}, which the model said"
        raise InvalidInputError(
            f"the tokenizer cannot decode {which} ({type(error).__name__}: {error}): does it belong to this model?"
        ) from error


def _decodes(tokenizer: Tokenizer, token_id: int) -> bool:
    try:
        tokenizer.decode([token_id], skip_special_tokens=False)
    except _UNDECODABLE:
        return False
    return True


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`.

    >>> _overlap("the answer\\n", "\\nQ:")
    1
    """
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0


class StopFinder:
    """Finds the first token after which a stop string stands in the text.

    Looks at a tail only: a stop of n bytes spans at most n tokens of at least one byte each. Special tokens are decoded
    too, so that a stop string may be one.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._look_back = max((len(s.encode()) for s in stops), default=0)

    def find(self, token_ids: list[int], num_new: int) -> int | None:
        """Number of tokens to keep, or None when no stop string is complete. The last `num_new` tokens are new."""
        if not self._stops or not self._hit(token_ids, num_new):
            return None
        done = len(token_ids) - num_new
        return next(
            n for n in range(done + 1, len(token_ids) + 1) if n == len(token_ids) or self._hit(token_ids[:n], 1)
        )

    def cut(self, text: str) -> str:
        """`text` up to the first stop string."""
        places = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        return text[: min(places)] if places else text

    def _hit(self, token_ids: list[int], num_new: int) -> bool:
        start = max(0, len(token_ids) - self._look_back - num_new)
        tail = decode(self._tokenizer, token_ids[start:], skip_special_tokens=False)
        return any(stop in tail for stop in self._stops)
