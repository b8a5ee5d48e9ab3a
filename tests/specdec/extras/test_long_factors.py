"""Which factors requests of a longrope model have, and how far they reach: see also tests/specdec/wrapped."""

from __future__ import annotations

import pytest

from specdec.extras.long_factors import LONG_FACTORS, LongFactors
from specdec.wrapped.long_rope import LongRopeRule

KEEPS, REREADS = LongFactors(LongRopeRule(8)), LongFactors(LongRopeRule(8, rereads=True))


@pytest.mark.parametrize(
    ("extra", "variant", "reach"),
    [(REREADS, 0, 8), (REREADS, LONG_FACTORS, None), (KEEPS, 0, None), (KEEPS, LONG_FACTORS, None)],
)
def test_short_factors_reach_as_far_as_a_request_is_not_read_again(
    extra: LongFactors, variant: int, reach: int | None
) -> None:
    """To the length up to which they are short; where the keys before stay, as far as the model goes."""
    assert extra.reach(variant) == reach


@pytest.mark.parametrize(
    ("extra", "prompt_len", "committed", "is_long"),
    [(KEEPS, 8, 9, False), (KEEPS, 9, 9, True), (REREADS, 3, 8, False), (REREADS, 3, 9, True), (REREADS, 9, 9, True)],
)
def test_a_request_begins_with_the_factors_of_its_length(
    extra: LongFactors, prompt_len: int, committed: int, is_long: bool
) -> None:
    """Of its prompt's, or, where requests are read again, of all that is read then."""
    assert extra.variant(prompt_len, committed) == (LONG_FACTORS if is_long else 0)
