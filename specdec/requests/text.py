"""From tokens to text while they arrive: what may be shown, and where a stop string ends the request.

A request ends with the first token after which its text contains a stop string. Its text after n tokens is
`tokenizer.decode(first n tokens, skip_special_tokens=True)` without U+FFFD at the end (a character that is not finished
yet). A stop string may also contain special tokens: it is looked for in the same text with every special token written
out at its place. Both are looked at token by token, so that the place does not depend on how many tokens a round
brings.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.requests.detokenize import UNFINISHED, Detokenizer, Tokenizer, Vocabulary

__all__ = ["TextStream", "Tokenizer", "Vocabulary"]


class TextStream:
    """The text of one request. Shown text is final and never goes beyond the text that the request ends with."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._stops = tuple(stops)
        self._start()

    def _start(self) -> None:
        self._detokenizer = Detokenizer(self._vocabulary)
        self._known = 0
        self._sent = 0  # characters shown
        self._unsent = ""  # final text after them that the detokenizer has left behind
        self._specials: list[tuple[int, str]] = []  # (characters before it, as it is written) of each special token
        self._cut: int | None = None

    @property
    def num_shown(self) -> int:
        """Characters shown so far."""
        return self._sent

    def rewind(self, token_ids: Sequence[int], num_shown: int) -> None:
        """Back to where only these new tokens were read, and `num_shown` characters of their text shown."""
        self._start()
        self.push(token_ids, len(token_ids))
        self._mark_shown(num_shown)

    def push(self, token_ids: Sequence[int], num: int) -> int | None:
        """Read on to the first `num` of the request's new tokens.

        Returns:
            With how many tokens the request ends, where a stop string is complete; else None.
        """
        if not self._stops:
            self._read(token_ids, num)
            return None
        for n in range(self._known + 1, num + 1):
            special = self._vocabulary.spelling(token_ids[n - 1]).special
            if special:
                self._specials.append((self._sent + len(self._text().rstrip(UNFINISHED)), special))
            self._read(token_ids, n)
            self._cut = self._find()
            if self._cut is not None:
                return n
        return None

    def show(self) -> str:
        """Text that has become certain since the last call: complete characters, no part of a stop string."""
        final = self._detokenizer.start + self._detokenizer.stable - self._sent
        text = self._text()[: max(final, 0)]
        if self._stops:
            text = text[: self._held_from(text)]
        self._mark_shown(len(text))
        return text

    def _mark_shown(self, count: int) -> None:
        self._sent += count
        self._unsent = self._unsent[count:]
        if self._specials:
            self._specials = [(at, special) for at, special in self._specials if at >= self._sent]

    def finish(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """The whole text of a request that ended with these new tokens, and the part that was not shown yet."""
        text = self._vocabulary.decode(list(token_ids))[: self._cut]
        return text, text[self._sent :]

    def _read(self, token_ids: Sequence[int], num: int) -> None:
        moved = self._detokenizer.settle()
        if moved:
            self._unsent += moved[max(self._sent - (self._detokenizer.start - len(moved)), 0) :]
        self._detokenizer.push(token_ids[self._known : num])
        self._known = num

    def _text(self) -> str:
        """The text that is not shown yet."""
        return self._unsent + self._detokenizer.tail[max(self._sent - self._detokenizer.start, 0) :]

    def _find(self) -> int | None:
        """Number of characters before the first stop string, if there is one."""
        text = self._text().rstrip(UNFINISHED)
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if self._specials:
            woven, places = self._woven(text)
            found += [places[at] for at in (woven.find(stop) for stop in self._stops) if at >= 0]
        return self._sent + min(found) if found else None

    def _held_from(self, text: str) -> int:
        """Where the longest end of `text` begins that may become a stop string."""
        held = min(_held_from(text, stop) for stop in self._stops)
        if self._specials:
            woven, places = self._woven(text)
            held = min([held, *(places[_held_from(woven, stop)] for stop in self._stops)])
        return held

    def _woven(self, text: str) -> tuple[str, list[int]]:
        """`text` with the special tokens in it written out; and for each of its places the place in `text`."""
        pieces, places, done = [], [], 0
        for at, special in self._specials:
            place = at - self._sent
            if place > len(text):
                break
            place = max(place, done)
            pieces += [text[done:place], special]
            places += [*range(done, place), *[place] * len(special)]
            done = place
        return "".join([*pieces, text[done:]]), [*places, *range(done, len(text) + 1)]


def _held_from(text: str, stop: str) -> int:
    r"""Where the longest end of `text` begins that is a beginning of `stop`, but not the whole; else its length.

    >>> _held_from("the answer\n", "\nQ:")
    10
    """
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return at
        at = text.find(stop[0], at + 1)
    return len(text)
