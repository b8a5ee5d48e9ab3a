"""From tokens to text while they arrive: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class TextState(NamedTuple):
    """How far a `TextStream` is: the tail of tokens it decodes, the text it holds back, the characters it emitted."""

    prefix: int = 0
    read: int = 0
    held: str = ""
    emitted: int = 0


class TextStream:
    """Decodes new tokens as they come, in complete characters; holds back what may become a stop string.

    Source: huggingface/text-generation-inference, server/text_generation_server/models/model.py (decode_token): decode
    a short tail twice, emit the difference once it ends in a complete character.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self.state = TextState()

    def push(self, token_ids: list[int]) -> str:
        """Text that became certain with these tokens; `token_ids` is the whole sequence of new tokens so far."""
        prefix, read, held, emitted = self.state
        before = self.decode(token_ids[prefix:read])
        after = self.decode(token_ids[prefix:])
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        text = held + after[len(before) :]
        sure = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self.state = TextState(read, len(token_ids), text[sure:], emitted + sure)
        return text[:sure]

    def finish(self, final: str) -> str:
        """What is left to emit of the whole text `final`."""
        return final[self.state.emitted :]

    def decode(self, token_ids: list[int]) -> str:
        """The text of these tokens, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


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
        tail = self._tokenizer.decode(token_ids[start:], skip_special_tokens=False)
        return any(stop in tail for stop in self._stops)
