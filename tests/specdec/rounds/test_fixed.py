"""Verifications in a fixed shape: what CUDA graphs read. (Rounds from them: test_graphs.py; draft steps:
tests/drafters/loops/test_chain_fixed.py.)"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.batch.host import HostBatch, slots_of
from drafters.loops.base import PrefillPasses
from drafters.loops.prefill import module_batch, module_rows, rows_before
from specdec.config import EngineConfig
from specdec.requests.sampling import SamplingArrays, SamplingParams
from specdec.rounds.buckets import fixed_shape
from specdec.rounds.fixed import FixedSampling, FixedTarget
from specdec.rounds.randomness import SamplingRound
from specdec.rounds.verification import RoundTables, TargetArrays

CPU = torch.device("cpu")
ROWS, DRAFTS, LONGEST = 4, 3, 44
Rows = list[tuple[int, int]]
"""(position of the bonus token, drafts) of each row."""


def config(page_size: int) -> EngineConfig:
    return EngineConfig(DRAFTS, LONGEST, ROWS, ROWS * (DRAFTS + 1), page_size, 1000)


def table(rows: int, page_size: int, first: int) -> np.ndarray:
    width = -(-LONGEST // page_size)
    return np.arange(first, first + rows * width, dtype=np.int32).reshape(rows, width)


def target_of(rows: Rows, page_size: int, sources: list[int] | None = None) -> TargetArrays:
    start, drafts = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    ones = np.ones(len(rows), np.int64)
    return TargetArrays(
        start=start,
        num_new=ones,
        drafts=drafts,
        num_drafting=len(rows),
        tokens=(start[:, None] + 100).astype(np.int32),
        decided=np.arange(len(rows)),
        wanted=ones * DRAFTS,
        room=ones * DRAFTS,
        following=ones * 0,
        request_rows=np.arange(len(rows)) + 7,
        pages=RoundTables(table(len(rows), page_size, 1), table(len(rows), page_size, 500), page_size),
        sources=None if sources is None else np.array(sources),
    )


def check_rows(batch: HostBatch, rows: Rows, pages: np.ndarray, page_size: int, most: int = DRAFTS) -> None:
    batch.validate()
    slots, positions = (a.reshape(ROWS, most + 1) for a in (batch.slot_mapping, batch.positions))
    for i, (first, drafts) in enumerate(rows):
        own = np.arange(first, first + drafts + 1)
        assert positions[i, : len(own)].tolist() == own.tolist()
        assert slots[i, : len(own)].tolist() == slots_of(pages, np.full(len(own), i), own, page_size).tolist()
        assert not slots[i, len(own) :].any() and not positions[i, len(own) :].any()
    assert not slots[len(rows) :].any() and not batch.block_table[len(rows) :].any()
    assert batch.seq_lens.tolist() == [n + most + 1 for n in [r[0] for r in rows] + [0] * (ROWS - len(rows))]


rows_lists = st.lists(st.tuples(st.integers(0, 36), st.integers(0, DRAFTS)), min_size=1, max_size=ROWS)


@given(st.lists(rows_lists, min_size=1, max_size=4), st.sampled_from([1, 3, 16]))
def test_verifications_of_one_shape_one_after_the_other(rounds: list[Rows], page_size: int) -> None:
    """Nothing of an earlier and larger round is left in a later one."""
    fixed = FixedTarget(fixed_shape(config(page_size), ROWS), PrefillPasses(1), CPU)
    for rows in rounds:
        target = target_of(rows, page_size)
        batch, (head,), staged = fixed.send(target)
        assert target.pages.head is not None
        check_rows(batch, rows, target.pages.target, page_size)
        check_rows(head, rows, target.pages.head, page_size)
        for name, host in (("target", batch), ("head", head)):
            flat = staged[f"{name}.page_indices"][: len(host.page_indices)]
            assert flat.tolist() == host.page_indices.tolist()
        plain = HostBatch(*(getattr(batch, name) for name in HostBatch.__dataclass_fields__))
        assert staged["target.page_indptr"].tolist() == plain.page_indptr.tolist()
        assert staged["target.last_page_len"].tolist() == plain.last_page_len.tolist()
        assert staged["target.num_drafts"].tolist() == [n for _, n in rows] + [0] * (ROWS - len(rows))
        bonus = staged["target.token_ids"].view(ROWS, DRAFTS + 1)[: len(rows), 0]
        assert bonus.tolist() == [first + 100 for first, _ in rows]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(3, 36), st.integers(0, DRAFTS)), min_size=1, max_size=ROWS),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([1, 3, 16]),
    st.integers(2, 4),
    st.integers(0, DRAFTS),
)
def test_passes_of_later_modules_hold_the_rows_of_a_ragged_round(
    rounds: list[Rows], page_size: int, modules: int, accepted: int
) -> None:
    """The first accepted+1 rows of pass m are those of `module_rows`; all others are past its end or nowhere."""
    fixed = FixedTarget(fixed_shape(config(page_size), ROWS), PrefillPasses(modules), CPU)
    for rows in rounds:
        target = target_of(rows, page_size)
        _, attended, carried = fixed.device(target)
        passes = tuple(own.host for own in attended)
        assert target.pages.head is not None and len(passes) == modules and carried is not None
        added = [-1] * (ROWS - len(rows))
        assert carried.request_rows.tolist() == target.request_rows.tolist() + added
        assert carried.sources.tolist() == rows_before(passes[0].query_start_loc, ROWS).tolist()
        first = target.start
        lens = np.array([min(accepted, drafts) + 1 for _, drafts in rows])
        for m, right in enumerate(module_rows(first, lens, modules), 1):
            passes[m].validate()
            ragged = module_batch(right, target.pages.head, page_size)
            slots, positions = (a.reshape(ROWS, DRAFTS + 1) for a in (passes[m].slot_mapping, passes[m].positions))
            kept = np.arange(DRAFTS + 1) < lens[:, None]
            assert positions[: len(rows)][kept].tolist() == ragged.positions.tolist()
            assert slots[: len(rows)][kept].tolist() == ragged.slot_mapping.tolist()
            assert right.last_row.tolist() == (np.cumsum(lens) - 1).tolist()  # the last accepted one, as of module 0
            for i, (start, drafts) in enumerate(rows):
                written = positions[i, lens[i] : drafts + 1]
                assert (written >= start + lens[i] - m).all() and not slots[i, drafts + 1 :].any()
            assert not slots[len(rows) :].any()
            plain = HostBatch(*(getattr(passes[m], name) for name in HostBatch.__dataclass_fields__))
            views = attended[m]
            for name in ("positions", "seq_lens", "slot_mapping", "page_indptr", "last_page_len"):
                assert getattr(views, name).tolist() == getattr(plain, name).tolist(), name
            assert views.page_indices[: len(plain.page_indices)].tolist() == plain.page_indices.tolist()


@given(st.lists(rows_lists, min_size=1, max_size=3), st.sampled_from([1, 3, 16]))
def test_a_pass_with_the_bonus_token_has_a_token_more(rounds: list[Rows], page_size: int) -> None:
    """The drafts of each row, one further on: its first token, and a token for each logits row of the verification."""
    fixed = FixedTarget(fixed_shape(config(page_size), ROWS), PrefillPasses(1, bonus=1), CPU)
    for rows in rounds:
        target = target_of(rows, page_size)
        round_, (attended,), carried = fixed.device(target)
        assert target.pages.head is not None and carried is None
        check_rows(round_.metadata.host, rows, target.pages.target, page_size)
        longer = [(first, drafts + 1) for first, drafts in rows]
        check_rows(attended.host, longer, target.pages.head, page_size, DRAFTS + 1)
        plain = HostBatch(*(getattr(attended.host, name) for name in HostBatch.__dataclass_fields__))
        for name in ("positions", "seq_lens", "slot_mapping", "page_indptr", "last_page_len"):
            assert getattr(attended, name).tolist() == getattr(plain, name).tolist(), name
        assert attended.page_indices[: len(plain.page_indices)].tolist() == plain.page_indices.tolist()


def test_worked_example() -> None:
    """A row at position 20 with 1 of 3 drafts: its two slots, then the null page; seq_len 24."""
    shape = fixed_shape(EngineConfig(DRAFTS, LONGEST, 1, 4, 16, 100), 1)
    target = target_of([(20, 1)], 16)
    target.pages.target[0, :2] = [7, 9]
    batch, _, _ = FixedTarget(shape, PrefillPasses(), CPU).send(target)
    assert batch.slot_mapping.tolist() == [148, 149, 0, 0]
    assert batch.seq_lens.tolist() == [24] and batch.page_counts.tolist() == [2]


def test_drafts_may_stand_in_other_rows() -> None:
    """Rows that were rows 2 and 0 of the batch that drafted; what is added keeps to itself."""
    fixed = FixedTarget(fixed_shape(config(16), ROWS), PrefillPasses(1), CPU)
    _, _, staged = fixed.send(target_of([(5, 1), (9, 2)], 16, [2, 0]))
    assert staged["target.sources"].tolist() == [2, 0, 2, 3]
    _, _, staged = fixed.send(target_of([(5, 1), (9, 2)], 16))
    assert staged["target.sources"].tolist() == [0, 1, 2, 3]


def test_page_lists_have_room_for_a_full_pool_and_the_padding() -> None:
    """Their room follows from the pool, not from the longest row there could be."""
    small = EngineConfig(DRAFTS, 4000, ROWS, ROWS * (DRAFTS + 1), 4, 12)  # 11 pages of 4 tokens
    shape = fixed_shape(small, ROWS)
    assert shape.page_entries < 40
    rows = [(15, 3), (15, 3), (8, 0)]  # 5 + 5 pages (one more for padding tokens each), and the last page of all
    batch, (head,), _ = FixedTarget(shape, PrefillPasses(1), CPU).send(target_of(rows, 4))
    assert batch.page_counts.tolist() == [5, 5, 3, 1] and head is not None


def test_rows_that_are_not_there_are_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that draw read what belongs to a sampled row, such as its accepted count: padding has none."""
    monkeypatch.setattr("attention.staging._RING", 1)  # as on a GPU, where rounds share the device's memory
    fixed = FixedSampling(ROWS, DRAFTS, CPU)
    sampled = SamplingParams(temperature=0.7)
    for count in (ROWS, ROWS, 2, 1, 3):
        nothing = np.zeros(count, np.int64)
        arrays = SamplingArrays.of([sampled] * count)
        fixed.send(SamplingRound(arrays, nothing.astype(np.uint64), nothing, count, count, DRAFTS))
        found = fixed.device.tensors.temperature.tolist()
        assert found == [np.float32(0.7)] * count + [0.0] * (ROWS - count)
