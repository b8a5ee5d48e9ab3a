"""What a row reads next: its prefill in chunks, then its bonus token."""

from __future__ import annotations

import numpy as np

from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import RowTable

ROWS = np.array([0, 1])


def opened() -> RowTable:
    """Row 0 is new, with a prompt of 7 tokens; row 1 comes back with 9 tokens, the last of them its bonus token."""
    table = RowTable(2, 32)
    assert table.open(np.arange(7), 20, 3, 1, SamplingParams()) == 0
    assert table.open(np.arange(9), 20, 3, 1, SamplingParams(), prefill=8) == 1
    return table


def test_a_new_row_reads_its_whole_prompt_and_a_resumed_one_all_but_its_bonus_token() -> None:
    table = opened()
    assert table.prefilling(ROWS).tolist() == [True, True] and table.pending(ROWS).tolist() == [7, 8]
    table.computed[ROWS] += 5
    assert table.prefilling(ROWS).tolist() == [True, True] and table.pending(ROWS).tolist() == [2, 3]


def test_then_both_are_at_their_bonus_tokens() -> None:
    table = opened()
    table.computed[ROWS] = (7, 8)
    table.length[0] += 1  # the first token, of the prompt's last position
    assert table.prefilling(ROWS).tolist() == [False, False] and table.pending(ROWS).tolist() == [1, 1]


def test_a_row_used_again_keeps_nothing() -> None:
    table = opened()
    table.computed[1] = 8
    table.close(1)
    assert table.open(np.arange(4), 20, 0, 2, SamplingParams()) == 1
    assert table.prefilling(ROWS).tolist() == [True, True] and table.pending(ROWS).tolist() == [7, 4]


def test_rows_are_sampled_by_their_own_temperature_alone() -> None:
    table = RowTable(3, 32)
    for temperature in (0.0, 0.7, 0.0):
        table.open(np.arange(7), 20, 3, 1, SamplingParams(temperature=temperature, top_k=5))
    assert [table.any_sampled(np.array(rows)) for rows in ([0, 2], [1], [2, 1])] == [False, True, True]
    table.close(1)
    table.open(np.arange(4), 20, 0, 2, SamplingParams())
    assert not table.any_sampled(np.arange(3))
