"""The row arithmetic of several modules against a slow recount, and that one module is the ordinary chain."""

from __future__ import annotations

import doctest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import drafters.loops.module_arrays
from drafters.loops.base import DraftingRows
from drafters.loops.chain_arrays import step_arrays
from drafters.loops.module_arrays import module_batch, module_rows, module_step, shifted_batch, step_width

TABLE = np.array(
    [[9, 3, 14, 1, 20, 6, 11, 2], [5, 12, 7, 19, 4, 17, 8, 10], [13, 15, 16, 18, 21, 22, 23, 24]], np.int32
)
ranges = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=3)


@given(ranges, st.integers(1, 4))
def test_every_row_reads_its_own_token_and_the_output_before_it(new: list[tuple[int, int]], modules: int) -> None:
    """A row is named (request, module, index); tokens are named (request, position)."""
    first, lens = (np.array(x) for x in zip(*new, strict=True))
    outputs = [(b, i) for b, (a, n) in enumerate(new) for i in range(a, a + n)]  # module 0's rows
    tokens = [(b, i + 1) for b, i in outputs]
    for m, rows in enumerate(module_rows(first, lens, modules), 1):
        own = [(b, i) for b, (a, n) in enumerate(new) for i in range(max(a - m, 0), max(a + n - m, 0))]
        carried = [(b, a - m) for b, (a, _) in enumerate(new)]  # module m-1's last row of the round before
        assert [tokens[t] for t in rows.tokens] == [(b, i + 1 + m) for b, i in own]
        assert [(carried + outputs)[s] for s in rows.sources] == own
        batch = module_batch(rows, TABLE[: len(new)], 4)
        batch.validate()
        assert batch.positions.tolist() == [i for _, i in own]
        for b, count in enumerate(rows.lens):
            assert not count or own[rows.last_row[b]] == (b, new[b][0] + new[b][1] - m - 1)
        outputs = own


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 7)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_steps_run_the_rows_whose_tokens_are_drafted(rows: list[tuple[int, int]], modules: int, step: int) -> None:
    """Row i of the step's module reads the token at i+1+m; the step's width tokens end at the newest draft."""
    lens, n = (np.array(x) for x in zip(*rows, strict=True))
    table = TABLE[: len(rows)]
    batch = module_step(step, lens, n, table, 4, modules)
    batch.validate()
    width, m = step_width(step, modules), step % modules
    for b, own in enumerate(batch.positions.reshape(len(rows), width)):
        if n[b] > step and lens[b] >= width:
            assert [i + 1 + m - lens[b] for i in own] == list(range(step - width + 1, step + 1))  # draft numbers
            assert own[-1] <= lens[b] + n[b] - 2, "inside the pages that a draft loop of n drafts has"
            assert batch.block_table[b].any()
        else:
            assert not batch.block_table[b].any() and (batch.slot_mapping.reshape(-1, width)[b] < 4).all()


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5)), min_size=1, max_size=3))
def test_one_module_is_the_ordinary_chain(rows: list[tuple[int, int]]) -> None:
    lens, n = (np.array(x) for x in zip(*rows, strict=True))
    table = TABLE[: len(rows)]
    for step, chain in enumerate(step_arrays(DraftingRows(lens, n, table, 4)).batches):
        ours = module_step(step + 1, lens, n, table, 4, 1)
        for name in ("positions", "seq_lens", "slot_mapping", "block_table", "query_start_loc"):
            assert getattr(chain, name).tolist() == getattr(ours, name).tolist(), name
    assert module_rows(lens, np.ones_like(lens), 1) == ()


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(drafters.loops.module_arrays)
    assert outcome.failed == 0 and outcome.attempted >= 8


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_rows_before_a_requests_own_beginning_are_on_the_null_page(
    rows: list[tuple[int, int, int]], module: int
) -> None:
    """What stands before it, on pages of the prefix cache, is another's: module m reads it, and never writes it."""
    begins, read, lens = (np.array(x) for x in zip(*rows, strict=True))
    starts = np.concatenate([[0], np.cumsum(lens)])
    batch = shifted_batch(module, starts, begins + read, TABLE[: len(rows)], 4, begins)
    batch.validate()
    token = 0
    for b, (begin, before, count) in enumerate(rows):
        for i in range(count):
            own = begin + before + i - module
            slot = TABLE[b, own // 4] * 4 + own % 4 if own >= begin else batch.slot_mapping[token]
            assert batch.slot_mapping[token] == slot and (slot >= 4) == (own >= begin)
            assert own < begin or batch.positions[token] == own
            token += 1
    least = np.zeros_like(begins)
    other = shifted_batch(module, starts, begins + read, TABLE[: len(rows)], 4)
    same = shifted_batch(module, starts, begins + read, TABLE[: len(rows)], 4, least)
    assert other.slot_mapping.tolist() == same.slot_mapping.tolist()
