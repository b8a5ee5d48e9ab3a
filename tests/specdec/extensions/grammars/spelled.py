"""A vocabulary of 64 tokens of one to four characters, and what a regular expression allows, by brute force."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import regex
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessor, PreTrainedTokenizerFast

PAD, END, MARK = 0, 1, 2
SPELLED = [
    *("<pad>", "<end>", "<mark>"),
    *'{}[]":,-. \n<>/',
    *"0123456789",
    *"abcdefilnorstuy",
    *(
        '{"',
        '":',
        '"}',
        '",',
        "</",
        "</e>",
        ">{",
        ">7",
        "e>",
        "true",
        "ab",
        "ba",
        "12",
        "  ",
        " \n",
        "fa",
        "ls",
        "nu",
        "ll",
    ),
    *("xyz", "rs", "st"),
]
VOCAB = 64
WHITE = r"[ \n\r\t]"


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, without merges; its ids are places in SPELLED."""
    assert len(SPELLED) == VOCAB and len(set(SPELLED)) == len(SPELLED)
    written = [text.replace(" ", "Ġ").replace("\n", "Ċ") for text in SPELLED]
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(written)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<end>", "<mark>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def text_of(ids: Sequence[int]) -> str:
    """Of tokens that have a text."""
    return "".join(SPELLED[i] for i in ids)


@dataclass(frozen=True)
class Allowed(LogitsProcessor):
    """What may come next, by trying every token; as transformers' processor and as a grammar of the user's own.

    pattern: of the text in the grammar, as a whole. begin, end: its markers.
    """

    pattern: str
    begin: str = ""
    end: str = ""
    prompt_len: int = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        may = self.next_ids(input_ids[0, self.prompt_len :].tolist())
        return scores.masked_fill(~torch.tensor([i in may for i in range(scores.shape[1])]), float("-inf"))

    def next_ids(self, new_ids: Sequence[int]) -> frozenset[int]:
        return next_ids(Allowed(self.pattern, self.begin, self.end), text_of(new_ids))

    def forced(self, text: str) -> str:
        """The first of two or more characters that must come: llguidance allows the tokenizer's own tokens alone there.

        Not of one, which a longer token may begin with.
        """
        found = ""
        while self._rest(text + found) is not None and not self.complete(text + found) and len(found) < 2:
            one = [own for own in SPELLED if len(own) == 1 and self.possible(text + found + own)]
            if len(one) != 1:
                break
            found += one[0]
        return found[:1] if len(found) == 2 else ""

    def free(self, text: str) -> set[int]:
        """Tokens without a text of their own may come outside of the grammar."""
        return set(range(VOCAB)) if self.begin and self._rest(text) is None else set()

    def possible(self, text: str) -> bool:
        """Whether a text can still become one that is allowed."""
        rest = self._rest(text)
        return rest is None or regex.fullmatch(self._whole, rest, partial=True) is not None

    def complete(self, text: str) -> bool:
        """Whether the request may end here."""
        rest = self._rest(text)
        return rest is None or (not self.end and regex.fullmatch(self._whole, rest) is not None)

    @property
    def _whole(self) -> str:
        return f"(?:{self.pattern}){regex.escape(self.end)}"

    def _rest(self, text: str) -> str | None:
        """What stands in the grammar so far; None outside of it."""
        if not self.begin:
            return text
        while True:
            _, mark, rest = text.partition(self.begin)
            if not mark:
                return None
            ended = self.end and next((n for n in range(len(rest) + 1) if regex.fullmatch(self._whole, rest[:n])), None)
            if not self.end or ended is None:
                return rest
            text = rest[ended:]


@functools.cache
def next_ids(allowed: Allowed, text: str) -> frozenset[int]:
    """Each of 64 tokens tried after the text; the same beginnings are asked for by many tests."""
    forced = allowed.forced(text)
    if forced:
        return frozenset({SPELLED.index(forced)})
    found = {i for i, own in enumerate(SPELLED) if i not in (END, PAD) and allowed.possible(text + own)}
    if not allowed.begin:
        found -= {MARK}
    ends = {END} if allowed.complete(text) else set()
    return frozenset(found | ends | ({PAD, *range(len(SPELLED), VOCAB)} & allowed.free(text)))


class Matcher:
    """The same as `fill`, `advance` and `rollback`."""

    def __init__(self, pattern: str) -> None:
        self._allowed, self._ids = Allowed(pattern), list[int]()

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0
        bits = mask.view(np.uint32)
        for token_id in self._allowed.next_ids(self._ids):
            bits[token_id // 32] |= np.uint32(1 << token_id % 32)

    def advance(self, token_id: int) -> bool:
        if token_id == END or token_id not in self._allowed.next_ids(self._ids):
            return False
        self._ids.append(token_id)
        return True

    def rollback(self, count: int) -> None:
        del self._ids[len(self._ids) - count :]


def right(target: Any, prompt: list[int], oracle: Allowed, new: int, **options: Any) -> list[int]:
    """What transformers' own `generate` says with the oracle as a processor."""
    ids = torch.tensor([prompt])
    own = Allowed(oracle.pattern, oracle.begin, oracle.end, len(prompt))
    with torch.no_grad():
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=PAD,
            logits_processor=[own],
            **options,
        )
    return [int(i) for i in out[0, len(prompt) :]]
