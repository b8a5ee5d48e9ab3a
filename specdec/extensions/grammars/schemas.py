"""JSON schemas rewritten so that llguidance reads them correctly: with replaced bounds, or refused. Begin markers.

Source: guidance-ai/llguidance, parser/src/json/numeric.rs and compiler.rs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from attention.cached import cached_property
from specdec.values import Json, TokenIds, short

_BY_NAME = ("properties", "$defs", "definitions", "patternProperties")
_VALUES = ("const", "enum", "default", "examples")
_LOWER = ("minimum", "exclusiveMinimum", 1)
_UPPER = ("maximum", "exclusiveMaximum", -1)
_MOST_EXACT = 2**53
"""Whole numbers up to it are floats, all of them."""
_MOST_OF_64_BITS = 2**63 - 1024
"""The largest float that 64 bits hold as a whole number."""
_DIGITS = 15
"""Digits of other numbers that llguidance reads exactly; with more digits the last may differ."""


@dataclass(frozen=True)
class MarkerFinder:
    """A marker as symbols: the bytes of its text, or token ids.

    A state is how many of its symbols the text ends with (the Knuth-Morris-Pratt automaton), 0 at first.

    symbols: of the marker, at least one. spelled: the symbols of a token. is_text: they are bytes.
    """

    symbols: TokenIds
    spelled: Callable[[int], Sequence[int]]
    is_text: bool = False

    @cached_property
    def _back(self) -> list[int]:
        """How many symbols to go on with where the one after so many does not come."""
        back = [0]
        for symbol in self.symbols[1:]:
            at = back[-1]
            while at and self.symbols[at] != symbol:
                at = back[at - 1]
            back.append(at + (self.symbols[at] == symbol))
        return back

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


def readable(schema: Any, llguidance: Any) -> Any:
    """A schema for llguidance, changed in place. llguidance: the package.

    Raises:
        ValueError: an answer could still violate it, or come to a place where no token is allowed.
    """
    schemas = list(_schemas(schema))
    for value in _leaves([[own.get("const"), own.get("enum")] for own in schemas]):
        if _is_number(value) and not _is_exact(value):
            raise ValueError(f"const or enum has {value}: allowed are whole numbers up to 2**53, others of 15 digits")
    _set_bounds(schemas)
    within = {id(part) for own in schemas for part in _joined(own) if part is not own}
    for own in schemas:
        if id(own) not in within:
            _check_names(list(_joined(own)), llguidance)
    return schema


def strings_of(schema: Any) -> Iterator[str]:
    """Names of properties and constant strings, which a schema's JSON contains word for word."""
    for own in _schemas(schema):
        yield from _texts(own.get("properties"))
        yield from _texts(list(_leaves([own.get("const"), own.get("enum")])))


def _schemas(given: Any, by_name: bool = False) -> Iterator[Json]:
    """A schema and all inside it. by_name: it is a dict of schemas."""
    if isinstance(given, list):
        for each in given:
            yield from _schemas(each)
    elif isinstance(given, dict):
        if not by_name:
            yield given
        for key, value in given.items():
            if by_name or key not in _VALUES:
                yield from _schemas(value, not by_name and key in _BY_NAME)


def _joined(schema: Json) -> Iterator[Json]:
    """A schema and what its allOf adds to it."""
    yield schema
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        if isinstance(each, dict):
            yield from _joined(each)


def _texts(given: Any) -> list[str]:
    """The strings of a list, or of a dict's keys."""
    return [text for text in given if isinstance(text, str)] if isinstance(given, (dict, list)) else []


def _check_names(parts: Sequence[Json], llguidance: Any) -> None:
    """parts: of one object's schema. Raises ValueError: see `readable`."""
    names = {name for part in parts for key in ("properties", "required") for name in _texts(part.get(key))}
    least = max(part["minProperties"] if isinstance(part.get("minProperties"), int) else 0 for part in parts)
    if least > len(names) + 1:
        raise ValueError(
            f"minProperties {least}: {len(names)} names are in properties or required, and others could come twice; "
            "name more of them in required, or lower it"
        )
    for pattern in {pattern for part in parts for pattern in _texts(part.get("patternProperties"))} if names else ():
        if _has_no_other(pattern, names, llguidance):
            raise ValueError(
                f"patternProperties {short(pattern)} matches no name but {', '.join(sorted(names))}, which are in "
                "properties or required; leave the pattern out, and write what it demands into properties"
            )


def _has_no_other(pattern: str, names: set[str], llguidance: Any) -> bool:
    """Whether a pattern matches only these names: llguidance fails where it would need another name."""
    others = {"properties": dict.fromkeys(names, False), "additionalProperties": False}
    schema = json.dumps({"type": "object", "patternProperties": {pattern: True}} | others)
    make = llguidance.LLMatcher
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = make(tokenizer, make.grammar_from_json_schema(schema), log_level=0)
    return not matcher.is_error() and matcher.try_consume_tokens(tokenizer.tokenize_bytes(b'{"')) < 2


def _set_bounds(schemas: Sequence[Json]) -> None:
    """Replace bounds that llguidance misreads, in place, by the next number inside of them that it reads correctly.

    For more than 1 and at most 1.25 it allows 1 itself, and likewise -1 for less than -1 and at least -1.25. It reads
    integers as floats, so that 2**53 + 1 is 2**53. It refuses integers of more than 64 bits, or crashes (segmentation
    fault: from -10**20 to -10**19). A bound may join another schema's (allOf, $ref), so all schemas' bounds count.
    """
    each = [(own, *end) for own in schemas for end in (_LOWER, _UPPER)]
    sizes = {abs(own[name]) for own, *names, _ in each for name in names if _is_number(own.get(name))}
    for own, plain, exclusive, sign in each:
        if own.get(exclusive) is True and _is_number(own.get(plain)):  # the form of draft 4
            own[exclusive] = own.pop(plain)
        for name in (plain, exclusive):
            bound: Any = own.get(name)
            strict = name == exclusive
            if not _is_number(bound):
                continue
            near = [size for size in sizes if 0 < size - abs(bound) < 1]
            beside = strict and bound * sign >= 0 and bound % 1 == 0 and near
            if beside or not _is_exact(bound) or (strict and abs(bound) >= _MOST_EXACT):
                inner = _next(own.pop(name) * sign, strict, near)
                also: Any = own.get(plain)
                own[plain] = sign * (max(inner, also * sign) if _is_number(also) else inner)


def _next(bound: float, strict: bool, near: Sequence[float]) -> float:
    """The first number that llguidance reads right from a bound on, or above it if strict."""
    if bound % 1 == 0 and abs(bound) >= _MOST_EXACT:
        large = float(max(bound, -_MOST_OF_64_BITS))
        while large < bound or (strict and large == bound):
            large = math.nextafter(large, math.inf)
        return int(large)
    found = _rounded(bound)
    step = 10.0 ** (math.floor(math.log10(abs(bound) or min(near))) - _DIGITS + 1)
    while found < bound or (strict and found == bound):
        found = _rounded(found + step)
    return found


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


def _is_exact(number: float) -> bool:
    """Whether llguidance has it as it is written."""
    return _rounded(number) == number if number % 1 else abs(number) <= _MOST_EXACT


def _is_number(given: Any) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool) and abs(given) < math.inf


def _leaves(given: Any) -> Iterator[Any]:
    """Names and values in a value of JSON."""
    if isinstance(given, (dict, list)):
        for each in [*given, *given.values()] if isinstance(given, dict) else given:
            yield from _leaves(each)
    else:
        yield given
