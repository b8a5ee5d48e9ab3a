"""Values of any type: a whole number, a number and a flag are read strictly, and others are named in the error."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from specdec.errors import InvalidInputError
from specdec.values import flag, is_whole, real, short, whole

WHOLE = [3, np.int64(3), np.uint8(3), torch.tensor(3)]
NOT_WHOLE = [True, np.True_, 3.0, "3", None, np.float32(3), np.array([3]), torch.tensor([3]), torch.tensor(True), [3]]


@pytest.mark.parametrize("value", WHOLE, ids=repr)
def test_whole_numbers_come_back_as_int(value: Any) -> None:
    found = whole("k", value, 0, 3, "0 … 3")
    assert is_whole(value) and type(found) is int and found == 3


@pytest.mark.parametrize("value", [*NOT_WHOLE, -1, 4, 10**400], ids=lambda v: repr(v)[:20])
def test_others_are_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^k=.*allowed is 0 … 3"):
        whole("k", value, 0, 3, "0 … 3")


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
def test_what_is_not_whole_is_not_whole(value: Any) -> None:
    assert not is_whole(value)


@pytest.mark.parametrize("value", [1.5, np.float32(1.5), torch.tensor(1.5), Decimal("1.5")], ids=repr)
def test_numbers_come_back_as_float(value: Any) -> None:
    found = real("t", value, "any")
    assert type(found) is float and found == 1.5


@pytest.mark.parametrize(
    "value", [True, np.True_, "1.5", None, np.array([1.5]), 10**400, 1j], ids=lambda v: repr(v)[:20]
)
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^t=.*allowed is a number"):
        real("t", value, "a number")


def test_flags_are_bools() -> None:
    assert flag("f", True) is flag("f", np.True_) is True and flag("f", np.False_) is False
    for value in (1, 0, "yes", None, torch.tensor(True)):
        with pytest.raises(InvalidInputError, match=r"^f=.*allowed is True or False"):
            flag("f", value)


LONG = {"str": "x" * 10_000, "array": np.zeros((30, 30)), "list": [[0] * 1000] * 1000, "int": 10**5000}


@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
def test_long_values_are_cut_and_stay_on_a_line(value: Any) -> None:
    """Python writes no whole number of 5000 digits."""
    shown = short(value)
    assert 0 < len(shown) <= 250 and "\n" not in shown
