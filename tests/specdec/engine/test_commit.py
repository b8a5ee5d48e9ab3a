"""What verification results mean for rows: tokens committed, eos ids, limits, KV lengths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from specdec.acceptance.packed import Outcome
from specdec.engine.commit import Committed, commit, ending_tokens
from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import RowTable, Schedule

EOS = 9


def opened(*limits: int) -> RowTable:
    """Rows with 4 tokens, the last of them pending; the second one heeds no eos id."""
    table = RowTable(len(limits), 32)
    for i, limit in enumerate(limits):
        table.open(np.arange(4), limit, 2, 1, SamplingParams(), () if i == 1 else (EOS,))
    table.computed[:] = 3
    return table


def committed(
    table: RowTable, accepted: list[int], tokens: list[list[int]], decided: list[int] | None = None
) -> Committed:
    count = len(table.limit)
    rows, ones, drafts = np.arange(count), np.ones(count, np.int64), np.full(count, 2)
    index = rows if decided is None else np.array(decided)
    places = np.arange(count + 1) * 3
    target: Any = SimpleNamespace(decided=index, num_drafts=drafts[index], query_start_loc=places)
    target.extras = ()
    outcome = Outcome(np.array(accepted), np.array(tokens), np.array(tokens)[:, :2])
    return commit(Schedule(rows, ones, drafts), target, outcome, table)


def test_a_row_keeps_its_accepted_drafts_and_the_bonus_token() -> None:
    table = opened(20, 20)
    done = committed(table, [1, 0], [[5, 6, 0], [7, 0, 0]])
    assert done.count.tolist() == [2, 1] and not (done.at_eos | done.at_limit).any()
    assert table.committed(0).tolist() == [0, 1, 2, 3, 5, 6] and table.committed(1).tolist() == [0, 1, 2, 3, 7]
    assert table.computed.tolist() == [5, 4]
    assert done.verified.num_accepted.tolist() == [1, 0]


def test_one_token_is_pending_after_a_commit() -> None:
    table = opened(20, 20, 20)
    committed(table, [2, 1, 0], [[5, 6, 7]] * 3)
    assert table.pending(np.arange(3)).tolist() == [1, 1, 1]


def test_an_eos_id_ends_a_row_where_it_stands_and_only_a_row_that_heeds_it() -> None:
    table = opened(20, 20)
    done = committed(table, [2, 2], [[5, EOS, 6], [5, EOS, 6]])
    assert done.at_eos.tolist() == [True, False] and done.count.tolist() == [2, 3]
    assert table.committed(0).tolist()[4:] == [5, EOS] and table.committed(1).tolist()[4:] == [5, EOS, 6]


def test_an_eos_id_behind_the_accepted_tokens_is_none() -> None:
    done = committed(opened(20), [0], [[5, EOS, EOS]])
    assert not done.at_eos.any() and done.count.tolist() == [1]


def test_a_limit_cuts_the_tokens_and_ends_the_row() -> None:
    table = opened(6, 7)
    done = committed(table, [2, 2], [[5, 6, 7]] * 2)
    assert done.count.tolist() == [2, 3] and done.at_limit.tolist() == [True, True]
    assert table.length.tolist() == [6, 7]


def test_an_eos_id_beyond_the_limit_is_not_the_reason() -> None:
    done = committed(opened(5), [2], [[5, EOS, 6]])
    assert done.at_limit.tolist() == [True] and done.at_eos.tolist() == [False]


def test_a_row_in_the_middle_of_its_prompt_reads_and_gets_nothing() -> None:
    table = opened(20, 20)
    table.computed[0] = 1
    done = committed(table, [1], [[5, 6, 0]], decided=[1])
    assert done.rows.tolist() == [1] and table.length.tolist() == [4, 6] and table.computed.tolist() == [2, 5]


def test_a_rows_share_is_what_it_kept_of_its_own_drafts() -> None:
    shares = committed(opened(20, 5), [1, 2], [[5, 6, 0], [7, 8, 1]]).rounds
    assert [tuple(share) for share in shares] == [([5, 6], 1, (5, 6), None), ([7], 2, (7, 8), None)]


def test_ending_tokens_are_those_of_each_rows_own_ids() -> None:
    tokens, ids = np.array([[1, 2], [2, 1]]), np.array([[2, -1], [-1, -1]])
    assert ending_tokens(tokens, np.array([2, 2]), ids).tolist() == [[False, True], [False, False]]
    assert not ending_tokens(tokens, np.array([1, 1]), ids).any()


def read_by_the_head(head_has_read: bool) -> list[int]:
    """Rows 0 and 2 verify 2 drafts and accept 1, row 1 has none; before, 3 tokens of each were read by the target."""
    table = opened(20, 20, 20)
    table.head_computed[:] = 1
    target: Any = SimpleNamespace(decided=np.arange(3), num_drafts=np.array([2, 2, 0]), query_start_loc=np.zeros(4))
    target.extras = ()
    schedule = Schedule(np.array([0, 2, 1]), np.ones(3, np.int64), np.array([2, 2, 0]))
    outcome = Outcome(np.array([1, 1, 0]), np.full((3, 3), 5), np.full((3, 2), 5))
    commit(schedule, target, outcome, table, head_has_read)
    return table.head_computed.tolist()


def test_how_far_the_head_has_read_decides_which_of_its_pages_are_found() -> None:
    """Its drafts came from a pass over what was committed before the round; a pass that is launched goes to its end."""
    assert read_by_the_head(False) == [3, 1, 3]
    assert read_by_the_head(True) == [5, 4, 5]


def test_any_of_several_eos_ids_ends_a_row() -> None:
    tokens, ids = np.array([[1, 2], [3, 1]]), np.array([[7, 2], [3, 8]])
    assert ending_tokens(tokens, np.array([2, 2]), ids).tolist() == [[False, True], [True, False]]
    assert ending_tokens(np.array([[2, 2]]), np.array([1]), np.array([[2]])).tolist() == [[True, False]]


def test_a_rows_share_has_no_drafts_that_it_did_not_have() -> None:
    table = opened(20, 20)
    target: Any = SimpleNamespace(decided=np.arange(2), num_drafts=np.array([2, 1]), query_start_loc=np.zeros(3))
    target.extras = ()
    schedule = Schedule(np.arange(2), np.ones(2, np.int64), np.array([2, 1]))
    done = commit(schedule, target, Outcome(np.array([2, 0]), np.full((2, 3), 5), np.full((2, 2), 6)), table)
    assert [share.drafts for share in done.rounds] == [(6, 6), (6,)]
