"""JSON schemas with bounds: what llguidance would allow against them, at the level of its matcher."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import cache
from typing import Any

import pytest

from specdec import Grammar, InvalidInputError
from specdec.extensions.grammars.compiled import CompiledGrammar, compiler_of
from specdec.extensions.grammars.schemas import readable
from tests.specdec.extensions.grammars.spelled import END, tokenizer

llguidance = pytest.importorskip("llguidance")
NUMBERS = (0, 0.5, 0.0625, 1, 1.05, 1.5, 2, 9.5, 10, 99.99)
BOUNDS = sorted({sign * number for number in NUMBERS for sign in (1, -1)})
KEYS = (("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum"))


@cache
def alone() -> Any:
    return llguidance.LLTokenizer("byte")


def accepts(schema: Any, mend: bool = True) -> Callable[[str], bool]:
    """Whether a whole text is of the schema; an AssertionError where llguidance refuses the schema."""
    own = json.loads(json.dumps(schema))
    make = llguidance.LLMatcher
    written = make.grammar_from_json_schema(json.dumps(readable(own, llguidance) if mend else own))
    matcher = make(alone(), written, log_level=0)
    assert not matcher.is_error(), (schema, matcher.get_error())

    def accepted(text: str) -> bool:
        copy, ids = matcher.deep_copy(), alone().tokenize_bytes(text.encode())
        return bool(copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting())

    return accepted


def takes(schema: Any, text: str) -> bool:
    return accepts(schema)(text)


def compiled(schema: Any) -> CompiledGrammar:
    return compiler_of(tokenizer(), 64, END).compiled(Grammar.json(schema))


def inside(schema: dict[str, Any], text: str) -> bool:
    """Whether a number is within the bounds as it is written, with any number of digits."""
    own = Decimal(text)
    return (
        own >= Decimal(str(schema.get("minimum", own)))
        and own <= Decimal(str(schema.get("maximum", own)))
        and own > Decimal(str(schema.get("exclusiveMinimum", own - 1)))
        and own < Decimal(str(schema.get("exclusiveMaximum", own + 1)))
    )


def written(bounds: Iterable[float]) -> set[str]:
    """Numbers near bounds, in several ways each."""
    found = {"0", "-0", "0.0", "-0.0", "0.00000001", "-0.00000001"}
    for bound in map(str, bounds):
        whole = bound.removesuffix(".0")
        found |= {whole, whole + "0" if "." in whole else whole + ".0", whole + "00" if "." in whole else whole + ".00"}
        found |= {whole + "0001" if "." in whole else whole + ".0001"}
    return found


def wrong(schema: dict[str, Any]) -> list[str]:
    """Texts that are taken and out of bounds."""
    bounds = [own for own in schema.values() if isinstance(own, (int, float))]
    accepted = accepts(schema)
    return [text for text in sorted(written(bounds)) if accepted(text) and not inside(schema, text)]


@pytest.mark.parametrize("strict", [("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum")])
def test_bounds_in_one_unit_interval(strict: tuple[str, str]) -> None:
    """A whole number that is excluded, with the other bound less than 1 away."""
    for low, high in ((0, 0.5), (1, 1.25), (7, 7.0625), (0, 1e-9), (0.0, 0.5), (10, 10.001)):
        bounds = (low, high) if strict[0] == "exclusiveMinimum" else (-high, -low)
        schema = {"type": "number", **dict(zip(strict, bounds, strict=True))}
        assert wrong(schema) == []
        assert takes(schema, f"{(Decimal(str(bounds[0])) + Decimal(str(bounds[1]))) / 2:f}")


@pytest.mark.slow
@pytest.mark.parametrize("keys", [*KEYS, ("exclusiveMinimum", "exclusiveMaximum")])
@pytest.mark.parametrize("kind", ["number", pytest.param("integer", marks=pytest.mark.long)])
@pytest.mark.cases(1)
def test_every_two_bounds(keys: tuple[str, str], kind: str) -> None:
    for low, high in itertools.combinations(BOUNDS, 2):
        schema = {"type": kind, keys[0]: low, keys[1]: high}
        try:
            found = wrong(schema)
        except AssertionError as error:  # no whole number is between them
            assert kind == "integer" and ("no integer values" in str(error) or "integer range" in str(error))
            continue
        assert found == [], schema


def test_a_bound_alone_or_in_another_schema() -> None:
    """The form of draft 4, a reference, allOf, no type; a property with the name of a bound is none."""
    schemas: Sequence[dict[str, Any]] = (
        {"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5},
        {"exclusiveMinimum": 0, "maximum": 0.5},
        {"minimum": 0, "exclusiveMinimum": 0, "maximum": 0.5},
        {"minimum": -7, "exclusiveMinimum": 0, "maximum": 0.5},
        {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]},
        {"$defs": {"low": {"exclusiveMinimum": 0}}, "$ref": "#/$defs/low", "maximum": 0.5},
        {"exclusiveMinimum": 0, "anyOf": [{"type": "string"}, {"type": "number", "maximum": 0.5}]},
    )
    for schema in schemas:
        assert not takes(schema, "0") and not takes(schema, "0.0") and takes(schema, "0.25"), schema
        assert accepts(schema, mend=False)("0"), "llguidance has mended it: schemas.py need not"
    assert takes({"properties": {"exclusiveMinimum": {"type": "number"}}}, '{"exclusiveMinimum":0}')
    assert takes({"const": {"exclusiveMinimum": 0, "maximum": 0.5}}, '{"exclusiveMinimum":0,"maximum":0.5}')
    assert takes({"type": "number", "exclusiveMinimum": 0}, "0.5")


def test_bounds_that_floats_do_not_have() -> None:
    big = 2**53
    for schema, no, yes in (
        ({"type": "integer", "minimum": big + 1}, big, big + 2),
        ({"type": "integer", "exclusiveMinimum": big}, big, big + 2),
        ({"type": "integer", "maximum": -big - 1}, -big, -big - 2),
        ({"type": "number", "exclusiveMaximum": -big}, -big, -big - 2),
        ({"type": "integer", "minimum": 0, "maximum": big + 3}, big + 4, big + 2),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, 2**63, -(2**62)),
        ({"type": "number", "minimum": -1e30, "maximum": 1e30}, 10**31, 10**18),
    ):
        assert takes(schema, str(yes)) and not takes(schema, str(no)), schema
    for schema in (
        {"type": "integer", "minimum": 2**64},
        {"type": "integer", "minimum": -(10**20), "maximum": -(10**19)},  # a segmentation fault of llguidance
        {"type": "integer", "minimum": -1.7e308, "maximum": -1.6e308},
        {"type": "integer", "minimum": -(10**400), "maximum": -(10**399)},
        {"type": "number", "exclusiveMinimum": 1.7976931348623157e308},
    ):
        with pytest.raises(InvalidInputError, match="grammar json"):
            compiled(schema)


def test_numbers_of_many_digits() -> None:
    """llguidance reads some of 16 digits or more as the next float."""
    own = 451705.20289303036
    assert takes({"type": "number", "minimum": own}, "451705.202893031") and not takes(
        {"minimum": own}, "451705.202893"
    )
    assert not takes({"type": "number", "maximum": own, "minimum": 451705}, "451705.2028930304")
    assert takes({"enum": [2**53, 0.30000000000001, 1e-9]}, "9007199254740992")
    for value in (own, 2**53 + 1, [{"a": own}], 10**20):
        for schema in ({"const": value}, {"properties": {"b": {"enum": [1, value]}}}):
            with pytest.raises(InvalidInputError, match="const or enum has"):
                compiled(schema)


def test_objects_that_would_come_to_an_end_are_refused_by_name() -> None:
    """A pattern without another name fails while an answer is generated; names that nobody gave can come twice."""
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema: dict[str, Any]
    closed: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {"a": digit, "b": digit}}
    for schema in (
        closed | {"patternProperties": {"^a$": digit}},
        closed | {"patternProperties": {"^[ab]$": digit}},
        {"type": "object", "required": ["a"], "patternProperties": {"^a$": digit}},
        {"allOf": [closed, {"patternProperties": {"^b$": digit}}]},
        {"properties": {"below": closed | {"patternProperties": {"^b$": digit}}}},
    ):
        with pytest.raises(InvalidInputError, match=r"patternProperties '\^.* matches no name but a"):
            compiled(schema)
    for schema in (
        closed | {"patternProperties": {"^[a-c]$": digit}},
        closed | {"patternProperties": {"^c$": digit}},
        {"properties": {"a": closed, "b": {"patternProperties": {"^a$": digit}}}},
    ):
        assert compiled(schema)
    for schema in ({"minProperties": 2}, {"required": ["a"], "minProperties": 3, "patternProperties": {"^b": digit}}):
        with pytest.raises(InvalidInputError, match=r"minProperties .* could come twice"):
            compiled({"type": "object"} | schema)
    assert compiled({"type": "object", "required": ["a", "b"], "minProperties": 3})
    assert compiled({"allOf": [{"minProperties": 2}, {"type": "object", "required": ["a", "b"]}]})
