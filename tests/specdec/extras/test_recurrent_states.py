"""How many tokens of a row its recurrent states have: see also tests/specdec/rounds/test_verification.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attention.errors import InvariantError
from attention.recurrence.index import FoldRule
from specdec.extras.recurrent_states import FoldedTokens
from specdec.requests.sampling import SamplingParams


def test_a_row_that_is_opened_again_has_all_that_was_read_in_its_states() -> None:
    """And one that leaves must have."""
    columns, table = FoldedTokens(FoldRule.every_launch(3), 2), SimpleNamespace(computed=np.array([0, 7]))
    opened: Any = table
    columns.open(opened, 1, SamplingParams())
    assert columns.folded.tolist() == [0, 7]
    columns.check_leaving(opened, 1)
    table.computed[1] = 9
    with pytest.raises(InvariantError, match="leaves with 7 of its 9 tokens"):
        columns.check_leaving(opened, 1)
