"""From the schedule and the row table to what a draft loop starts from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec.requests.sampling import SamplingParams
from specdec.rounds.drafting import accepted_by_row, draft_input, drafts_after, rows_after
from specdec.rounds.rows import RowTable, Schedule, draft_room, drafts_within
from specdec.rounds.verification import RoundTables, TargetArrays, Verified, target_arrays

PAGES = np.arange(1, 65, dtype=np.int32).reshape(4, 16)


def table_of(lengths: list[int], computed: list[int], drafts: int = 3) -> RowTable:
    """Rows that emitted their last token; a row with fewer computed tokens still reads its prompt."""
    table = RowTable(4, 60)
    for length, known in zip(lengths, computed, strict=True):
        row = table.open(np.arange(length), 60, drafts, 1, SamplingParams())
        table.computed[row] = known
        table.prefill[row] = length - 1 if known == length - 1 else length
    return table


def test_drafting_rows_come_first_in_the_schedules_order_then_prompts_that_go_on() -> None:
    """Row 1 is in the middle of its prompt; rows 2 and 0 draft; row 3 has ended."""
    table = table_of([12, 30, 8, 9], [11, 16, 7, 8])
    rows = np.array([0, 1, 2, 3])
    table.mark_batch(rows)
    table.close(3)
    verified = Verified(np.array([0, 4, 12, 15, 17]), rows, np.array([3, 0, 2, 1]), np.array([1, 0, 2, 0]))
    schedule = Schedule(np.array([2, 0, 1]), np.array([1, 1, 8]), np.array([3, 2, 0]))
    draft = draft_input(verified, schedule, table, PAGES, 4)
    assert draft is not None
    assert draft.order.tolist() == draft.request_rows.tolist() == [2, 0, 1]
    assert draft.committed_lens.tolist() == [7, 11, 16] and draft.num_drafts_next.tolist() == [3, 2]
    assert draft.block_table[:, 0].tolist() == [33, 1, 17]
    assert draft.drafting.committed_lens.tolist() == [7, 11] and draft.drafting.num_drafts.max() == 3


def test_nothing_to_read_is_no_draft_loop() -> None:
    """The only row of the verification has ended, and the one that joins has no states yet."""
    table = table_of([12, 9], [11, 0])
    table.mark_batch(np.array([0]))
    table.close(0)
    verified = Verified(np.array([0, 4]), np.array([0]), np.array([3]), np.array([1]))
    assert draft_input(verified, Schedule(np.array([1]), np.array([9]), np.array([0])), table, PAGES, 4) is None


@given(
    st.lists(st.tuples(st.integers(1, 54), st.integers(0, 3)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(50, 60),
)
def test_what_is_known_before_the_commit_is_what_the_scheduler_finds_after_it(
    rows: list[tuple[int, int]], wanted: int, limit: int
) -> None:
    """drafts_after and rows_after from accepted counts alone, against lengths advanced and limits asked anew."""
    rows = [(min(start, limit - 2), accepted) for start, accepted in rows]
    table = table_of([start + 1 for start, _ in rows], [start for start, _ in rows], wanted)
    table.limit[: len(rows)] = limit
    own = np.arange(len(rows))
    accepted = np.array([min(accepted, limit - start - 2) for start, accepted in rows])
    target: TargetArrays = target_arrays(
        Schedule(own, np.ones_like(own), accepted), table, RoundTables(PAGES, PAGES, 4)
    )
    found, after = drafts_after(target, accepted), rows_after(target, accepted)
    table.computed[own] += 1 + accepted
    table.length[own] += 1 + accepted
    left = table.limit[own] - table.length[own]
    assert found.tolist() == drafts_within(table.drafts[own], draft_room(60, table.computed[own], left)).tolist()
    assert after.committed_lens.tolist() == table.computed[own].tolist()
    assert after.num_drafts.tolist() == found.tolist()


def test_the_head_reads_no_prompt_of_a_request_without_drafts_and_no_drafts_that_arrived() -> None:
    """Row 0 drafts; row 1 reads on without drafts, row 2 with them; row 3 has brought its own from another engine."""
    table = table_of([12, 30, 30, 9], [11, 16, 8, 8])
    table.drafts[1] = 0
    rows = np.array([0, 1, 2])
    table.mark_batch(rows)
    verified = Verified(np.array([0, 4, 12, 20]), rows, np.array([3, 0, 0]), np.array([1, 0, 0]))
    schedule = Schedule(np.array([0, 3, 1, 2]), np.array([1, 1, 8, 8]), np.array([3, 2, 0, 0]), num_arrived=1)
    draft = draft_input(verified, schedule, table, PAGES, 4)
    assert draft is not None
    assert draft.request_rows.tolist() == [0, 2] and draft.num_drafts_next.tolist() == [3]
    alone = draft_input(verified, schedule, table, PAGES, 4, reading=False)
    assert alone is not None and alone.request_rows.tolist() == [0]


def test_rows_are_found_where_they_stood_in_the_last_batch() -> None:
    """The rows of the next round come in another order than those of the last one."""
    table = table_of([12, 10, 8], [11, 9, 7])
    rows = np.array([2, 0, 1])
    table.mark_batch(rows)
    verified = Verified(np.array([0, 4, 8, 12]), rows, np.array([3, 3, 3]), np.array([1, 2, 0]))
    draft = draft_input(verified, Schedule(np.array([0, 1, 2]), np.ones(3, int), np.full(3, 3)), table, PAGES, 4)
    assert draft is not None and draft.order.tolist() == [1, 2, 0] and draft.request_rows.tolist() == [0, 1, 2]


def test_a_prompt_that_goes_on_accepts_nothing() -> None:
    """Rows 0 and 2 of the batch are decided, row 1 is not."""
    target: Any = SimpleNamespace(decided=np.array([0, 2]), start=np.zeros(3))
    assert accepted_by_row(target, np.array([2, 1])).tolist() == [2, 0, 1]
    every: Any = SimpleNamespace(decided=np.arange(2), start=np.zeros(2))
    assert accepted_by_row(every, np.array([2, 1])).tolist() == [2, 1]


def test_accepted_drafts_take_from_what_the_limits_leave() -> None:
    target: Any = SimpleNamespace(wanted=np.array([3, 3, 3, 0]), room=np.array([4, 4, 2, 9]))
    assert drafts_after(target, np.array([0, 2, 3, 0])).tolist() == [3, 2, 0, 0]
