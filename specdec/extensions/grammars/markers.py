"""MarkerFinder: where a marker ends in a text that comes token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MarkerFinder:
    """A marker as symbols: the bytes of its text, or token ids.

    A state is how many of its symbols the text ends with (the Knuth-Morris-Pratt automaton), 0 at first.

    symbols: of the marker, at least one. spelled: the symbols of a token. is_text: they are bytes.
    """

    symbols: tuple[int, ...]
    spelled: Callable[[int], Sequence[int]]
    is_text: bool = False
    _back: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        back = [0]
        for symbol in self.symbols[1:]:
            at = back[-1]
            while at and self.symbols[at] != symbol:
                at = back[at - 1]
            back.append(at + (self.symbols[at] == symbol))
        object.__setattr__(self, "_back", back)  # the dataclass is frozen

    def after(self, state: int, token_id: int) -> tuple[int, bytes | None]:
        """The state after a token; and once the marker is complete, the rest of the token's text after it.

        >>> finder = MarkerFinder(tuple(b"abab!"), lambda token_id: [b"ab", b"!", b"!{"][token_id], True)
        >>> state, rests = 0, []
        >>> for token_id in (0, 0, 0, 2):
        ...     state, rest = finder.after(state, token_id)
        ...     rests.append((state, rest))
        >>> rests
        [(2, None), (4, None), (4, None), (0, b'{')]
        """
        spelled = self.spelled(token_id)
        for place, symbol in enumerate(spelled):
            while state and self.symbols[state] != symbol:
                state = self._back[state - 1]
            state += self.symbols[state] == symbol
            if state == len(self.symbols):
                return 0, bytes(spelled[place + 1 :]) if self.is_text else b""
        return state, None

    def overhanging(self, state: int, token_ids: Sequence[int]) -> dict[int, bytes]:
        """Tokens in which the marker ends before the token does, with the rest of their text."""
        found = {}
        for token_id in token_ids:
            _, rest = self.after(state, token_id)
            if rest:
                found[token_id] = rest
        return found
