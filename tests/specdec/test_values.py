"""Values of any type: one rule for each kind, one message, one representation."""

from __future__ import annotations

import doctest
import json
from decimal import Decimal
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import specdec.values
from specdec.errors import InvalidInputError
from specdec.values import MOST_COUNT, choice, flag, least_bytes, only, real, share, short, whole


@pytest.mark.parametrize("given", [5, np.int8(5), np.array(5), torch.tensor(5)])
def test_whole_numbers_of_other_types_become_int(given: Any) -> None:
    assert whole("x", given, 1) == 5 and type(whole("x", given, 1)) is int


@pytest.mark.parametrize(
    "given", [True, np.bool_(True), torch.tensor(True), 5.0, "5", None, [5], np.array([5]), torch.tensor([5]), 1j]
)
def test_what_is_no_whole_number_is_refused_with_its_type(given: Any) -> None:
    with pytest.raises(
        InvalidInputError, match=rf"x=.* \({type(given).__name__}\): allowed is a whole number, 1 or more"
    ):
        whole("x", given, 1)


@pytest.mark.parametrize(
    ("given", "most", "message"),
    [
        (0, MOST_COUNT, "x=0: allowed is 1 or more"),
        (2**63, MOST_COUNT, f"x={2**63}: allowed is 1 … {MOST_COUNT}"),
        (9, 8, "x=9: allowed is 1 … 8"),
        (10**5000, MOST_COUNT, f"x=<an integer of 16610 bits>: allowed is 1 … {MOST_COUNT}"),
    ],
    ids=["small", "beyond a count", "beyond most", "beyond print"],
)
def test_a_number_out_of_range(given: int, most: int, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        whole("x", given, 1, most)
    assert str(caught.value) == message
    assert whole("x", given + 1, 0, None) == given + 1


@pytest.mark.parametrize("given", [0.5, np.float32(0.5), torch.tensor(0.5), Decimal("0.5")])
def test_a_share_and_a_real_number(given: Any) -> None:
    assert share("x", given) == real("x", given, "any") == 0.5


@pytest.mark.parametrize("given", [0, 1.5, float("nan"), -1, True, np.bool_(True), "0.5", None, torch.tensor([0.5])])
def test_what_is_no_share(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="allowed is more than 0, at most 1"):
        share("x", given)


def test_flags_and_choices() -> None:
    assert flag("x", np.bool_(False)) is False and choice("x", "a", ("a", "b")) == "a"
    for given in (1, "yes", None, np.array([True])):
        with pytest.raises(InvalidInputError, match="allowed are True and False"):
            flag("x", given)
    with pytest.raises(InvalidInputError, match="x=3: allowed are a, b"):
        choice("x", 3, ("a", "b"))


def test_a_representation_is_one_short_line() -> None:
    class Loud:
        def __repr__(self) -> str:
            return "line\n" * 1000

    class Broken:
        def __repr__(self) -> str:
            raise ValueError

    for value in ("a\n" * 10**5, [10**5000] * 100, Loud(), Broken(), torch.zeros(500, 500), {"a": [Loud()]}):
        assert len(short(value)) < 600 and "\n" not in short(value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-99, 99)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=3), inside, max_size=4),
    max_leaves=12,
)


@hypothesis.given(JSON, st.integers(0, 60))
def test_json_has_at_least_the_bytes_counted(value: Any, most: int) -> None:
    written = len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())
    assert least_bytes(value, 10**6) <= written
    assert (least_bytes(value, most) > most) <= (written > most)


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(specdec.values)
    assert outcome.failed == 0 and outcome.attempted == 2


def test_fields_keep_their_order_and_others_are_not_read() -> None:
    class Lazy(dict[str, int]):
        def __getitem__(self, name: str) -> int:
            assert name != "c"
            return super().__getitem__(name)

    found = only(Lazy(b=1, c=2, a=3), {"a", "b", "d"})
    assert list(found.items()) == [("b", 1), ("a", 3)]
