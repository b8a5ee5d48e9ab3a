"""TokenIndex: finds earlier occurrences of a text's last tokens, and the tokens after them. Neither numpy nor torch.

A dictionary holds the last place of every n-gram of the least length, a list holds the place before each place:
together a chain of places, newest first. A match is searched for at the first few places of a chain, by comparing
tokens backwards. So the result depends only on the text, never on the time of the search: a preempted request that is
read again drafts the same tokens.

Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); the number of drafts by length and count
of the match after SuffixDecoding (Oliaro et al. 2024, section 4); chains of places as in RFC 1951, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PLACES = 8
"""Places of an n-gram that are compared, from the last one back: it bounds the time of a look."""
END = -1
"""Separator between two texts of an index. It is no token id, so that no match crosses it."""
_BASE = 1 << 32
"""Larger than every token id, so that two n-grams never have one key."""


class Match(NamedTuple):
    """The longest match of the last tokens of a text.

    Attributes:
        place: index of its last token; -1 for none. length: number of equal tokens, at most `longest`.
        agreeing: number of places with this match length that continue with the same token, including this one; 1 where
            `longest` match.
    """

    place: int
    length: int
    agreeing: int


class TokenIndex:
    """The n-grams of a text that grows at its end.

    Appending a token and looking for a match take the same time however long the text is; a token takes 160 bytes.

    Attributes:
        tokens: the text.
    """

    def __init__(self, least: int, longest: int) -> None:
        """least: tokens of the shortest match. longest: longer matches are not distinguished."""
        self.tokens: list[int] = []
        self._least = least
        self._longest = longest
        self._modulus = _BASE ** (least - 1)
        self._key = 0
        self._last: dict[int, int] = {}
        self._before: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens.

        >>> index = TokenIndex(2, 8)
        >>> index.extend([5, 6, 7, 5, 6])
        >>> index.longest(index.tokens), index.propose(4)
        (Match(place=1, length=2, agreeing=1), [7, 5])
        """
        key = self._key
        modulus = self._modulus
        last = self._last
        before = self._before
        first = len(self.tokens)
        self.tokens.extend(tokens)
        for place, token in enumerate(tokens, first):
            key = (key % modulus) * _BASE + token
            before.append(last.get(key, -1))
            last[key] = place
        self._key = key

    def longest(self, text: Sequence[int]) -> Match:
        """The longest match of the last tokens of `text`: this index's own, or any other; the last one of several."""
        place = -1
        if len(text) >= self._least:
            place = self._before[-1] if text is self.tokens else self._last.get(self._key_of(text), -1)
        found: list[tuple[int, int]] = []
        while place >= 0 and len(found) < PLACES:
            found.append((self._common(text, place), place))
            if found[-1][0] == self._longest:
                break
            place = self._before[place]
        tokens = self.tokens
        going_on = [(n, p) for n, p in found if n >= self._least and tokens[p + 1] != END]  # that a token follows
        if not going_on:
            return Match(-1, 0, 0)
        length, place = max(going_on)
        return Match(place, length, sum(tokens[p + 1] == tokens[place + 1] for n, p in going_on if n == length))

    def propose(self, most: int) -> list[int]:
        """At most `most` tokens that followed the longest match of the last tokens, one for each token of it and place
        that agrees; [] without a match. A match that overlaps its continuation is repeated as a period.

        >>> index = TokenIndex(2, 8)
        >>> index.extend([1, 2, 3, 1, 2, 3, 1])
        >>> index.propose(6)
        [2, 3, 1, 2]
        """
        return self.proposed(self.longest(self.tokens), most)

    def proposed(self, match: Match, most: int) -> list[int]:
        """See `propose`; fewer tokens where another text begins."""
        first = match.place + 1
        end = len(self.tokens)
        count = min(most, match.length * match.agreeing)
        found = self.tokens[first : first + count]
        while len(found) < count and end > first:
            found += self.tokens[first:end][: count - len(found)]
        return found[: found.index(END)] if END in found else found

    def _key_of(self, text: Sequence[int]) -> int:
        """The key of the last n-gram, as `extend` makes it."""
        key = 0
        for token in text[-self._least :]:
            key = key * _BASE + token
        return key

    def _common(self, text: Sequence[int], place: int) -> int:
        """How many tokens up to `place` are those at the end of `text`, at most `longest`."""
        tokens = self.tokens
        i = len(text) - 1
        most = min(self._longest, place + 1, len(text))
        count = 0
        while count < most and tokens[place - count] == text[i - count]:
            count += 1
        return count


class SharedTexts:
    """The latest texts of several requests, between half of `capacity` and `capacity` tokens in total.

    Two indexes, of which the older one is dropped when the newer one has half of the tokens.
    """

    def __init__(self, least: int, longest: int, capacity: int) -> None:
        """least, longest: see `TokenIndex`."""
        self._least = least
        self._longest = longest
        self._half = capacity // 2
        self._old = TokenIndex(least, longest)
        self._new = TokenIndex(least, longest)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all texts, including separators."""
        return len(self._old.tokens) + len(self._new.tokens)

    def add(self, text: Sequence[int]) -> None:
        """Add a text; of one that is too long its last tokens."""
        own = text[-(self._half - 1) :]
        if len(self._new.tokens) + len(own) + 1 > self._half:
            self._old = self._new
            self._new = TokenIndex(self._least, self._longest)
        self._new.extend([*own, END])

    def propose(self, most: int, text: Sequence[int], longer_than: int) -> list[int]:
        """As `TokenIndex.propose`, of a match of more than `longer_than` tokens."""
        index = self._new
        match = self._new.longest(text)
        if (other := self._old.longest(text)).length > match.length:
            index = self._old
            match = other
        return index.proposed(match, most) if match.length > longer_than else []
