"""The arrays of rounds with further cache groups: fixed shapes hold the rows of ragged ones, and what is sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import attention.batch.transforms.windowed as windowed_module
import specdec.rounds.buckets
from attention.spec import Reach
from attention.staging import Staged, StagingArena, layout_of
from drafters.loops.base import FixedShape, PrefillPasses
from specdec.config import EngineConfig, WindowedPool
from specdec.rounds.buckets import fixed_entries, fixed_shape, group_entries, power_of_two
from specdec.rounds.fixed import fixed_target
from specdec.rounds.transfer import RoundTransfer, staging_bytes
from specdec.rounds.verification import RoundTables, TargetArrays, WindowedTable

CPU = torch.device("cpu")
ROWS, DRAFTS, LONGEST = 4, 3, 400
REACHES = Reach(96, 96), Reach(40), Reach(9)


def config(page_size: int, reaches: tuple[Reach, ...] = REACHES) -> EngineConfig:
    pools = tuple(WindowedPool(reach, 2000) for reach in reaches)
    return EngineConfig(DRAFTS, LONGEST, ROWS, ROWS * (DRAFTS + 1), page_size, 2000, windowed=pools)


def table(rows: int, page_size: int, first: int) -> np.ndarray:
    width = -(-LONGEST // page_size)
    return np.arange(first, first + rows * width, dtype=np.int32).reshape(rows, width)


def group_table(page_size: int, window: int) -> np.ndarray:
    """As a group has it: a row more, and room for padding tokens."""
    width = -(-(LONGEST + DRAFTS + 1) // page_size)
    pages = np.arange(10000 * window, 10000 * window + (ROWS + 1) * width, dtype=np.int32).reshape(ROWS + 1, width)
    pages[-1] = 0
    return pages


def target_of(rows: list[tuple[int, int]], page_size: int, reaches: tuple[Reach, ...] = REACHES) -> TargetArrays:
    start, drafts = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    ones, count = np.ones(len(rows), np.int64), len(rows)
    windowed = tuple(WindowedTable(r, group_table(page_size, r.tokens), np.arange(count)[::-1]) for r in reaches)
    return TargetArrays(
        start=start,
        num_new=ones,
        drafts=drafts,
        num_drafting=count,
        tokens=np.zeros((count, 1), np.int32),
        decided=np.arange(count),
        wanted=ones,
        room=ones,
        following=ones,
        request_rows=np.arange(count),
        pages=RoundTables(table(count, page_size, 1), table(count, page_size, 5000), page_size, windowed),
    )


PLACES = st.tuples(st.integers(0, LONGEST - 2 * DRAFTS), st.integers(0, DRAFTS))


@settings(deadline=None)
@given(
    st.lists(st.lists(PLACES, min_size=1, max_size=ROWS), min_size=1, max_size=3),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([8, 128]),
)
@pytest.mark.thorough
def test_a_fixed_shape_lists_the_pages_of_a_ragged_round(
    rounds: list[list[tuple[int, int]]], page_size: int, tile: int
) -> None:
    """And where rows are padded with tokens, the pages after them; nothing of an earlier round is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windowed_module, "TILE_KEYS", tile)
        fixed = fixed_target(config(page_size), ROWS, PrefillPasses(1), CPU)
        for rows in rounds:
            target = target_of(rows, page_size)
            batch, (head,), staged = fixed.send(target)
            whole = replace(target, drafts=np.full(len(rows), DRAFTS))
            assert not head.other_groups and len(batch.other_groups) == len(REACHES)
            ragged = whole.inputs.batch.other_groups
            for number, (group, right) in enumerate(zip(batch.other_groups, ragged, strict=True), 1):
                group.validate()
                right.validate()
                for name in ("seq_lens", "num_computed_tokens", "page_indptr", "page_indices", "query_start_loc"):
                    assert getattr(group, name).dtype == getattr(right, name).dtype == np.int32, name
                count = len(rows)
                assert group.seq_lens[:count].tolist() == right.seq_lens.tolist()
                assert group.num_computed_tokens[:count].tolist() == right.num_computed_tokens.tolist()
                assert group.page_indptr[: count + 1].tolist() == right.page_indptr.tolist()
                assert group.page_indices[: len(right.page_indices)].tolist() == right.page_indices.tolist()
                assert not group.page_indices[len(right.page_indices) :].any(), "rows that are added: the null page"
                slots = group.slot_mapping.reshape(ROWS, DRAFTS + 1)
                for i, (_, drafts) in enumerate(rows):
                    own = right.slot_mapping.reshape(count, DRAFTS + 1)[i]
                    assert slots[i].tolist() == [*own[: drafts + 1].tolist(), *[0] * (DRAFTS - drafts)]
                view = staged[f"target.group{number}.page_indices"]
                assert view[: len(group.page_indices)].tolist() == group.page_indices.tolist()
                assert staged[f"target.group{number}.page_indptr"].tolist() == group.page_indptr.tolist()
                assert staged[f"target.group{number}.slot_mapping"].tolist() == group.slot_mapping.tolist()


def test_entries_are_bounded_by_the_window_not_by_the_row() -> None:
    """32,768 tokens a row: 2,048 pages in the first group, 73 in one with a window of 1,024."""
    sizes = EngineConfig(5, 32768, 256, 2048, 16, 10**6, windowed=(WindowedPool(Reach(1024), 10**5),))
    shape = fixed_shape(sizes, 256)
    assert fixed_entries(sizes, shape) == (256 * 73,) and shape.page_entries > 256 * 2048
    assert group_entries(sizes) == (256 * 73 + 128,)
    small = FixedShape(2, 6, 16, 100)
    assert fixed_entries(EngineConfig(5, 64, 2, 16, 16, 99, windowed=(WindowedPool(Reach(60), 9),)), small) == (2 * 5,)
    chunks = replace(sizes, windowed=(WindowedPool(Reach(8192, 8192), 10**5),))
    assert fixed_entries(chunks, shape) == (256 * 513,), "a chunk of 512 pages, and the one after it begun"


def sent_bytes(sizes: EngineConfig) -> int:
    """Bytes that a verification of a fixed shape sends in its one transfer."""
    sent: list[int] = []
    plain = StagingArena.end

    def end(self: StagingArena, bucket: object) -> Staged:
        sent.append(layout_of(self._fields, bucket).nbytes)  # type: ignore[attr-defined, arg-type]
        return plain(self, bucket)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        made = StagingArena.__init__

        def init(self: StagingArena, fields: object, *more: object) -> None:
            made(self, fields, *more)  # type: ignore[arg-type]
            self._fields = fields  # type: ignore[attr-defined]

        patch.setattr(StagingArena, "__init__", init)
        patch.setattr(StagingArena, "end", end)
        reaches = tuple(pool.reach for pool in sizes.windowed)
        fixed_target(sizes, ROWS, PrefillPasses(1), CPU).send(target_of([(300, 3)] * ROWS, 16, reaches))
    return sent[-1]


def test_a_group_more_sends_slots_and_page_lists_more() -> None:
    """Not lengths, positions, token ids nor anything else of the batch; 64 bytes are what a field is aligned to."""
    one, two = config(16, ()), config(16, (Reach(40),))
    (entries,) = fixed_entries(two, fixed_shape(two, ROWS))
    own = 8 * ROWS * (DRAFTS + 1) + 4 * (ROWS + 1) + 4 * entries
    assert own <= sent_bytes(two) - sent_bytes(one) < own + 3 * 64


def test_a_ragged_round_sends_its_groups_in_the_one_transfer() -> None:
    transfer = RoundTransfer(None, config(16), CPU)
    target = target_of([(300, 3), (20, 0), (150, 1)], 16)
    metadata = transfer.send(target.inputs, None, None)[0].metadata
    assert transfer.arena.generation == 1
    for group, host in zip(metadata.other_groups, target.inputs.batch.other_groups, strict=True):
        assert group.page_indices.tolist() == host.page_indices.tolist()
        assert group.slot_mapping.tolist() == host.slot_mapping.tolist()
        assert group.seq_lens is metadata.seq_lens and group.positions is metadata.positions
    assert [power_of_two(len(g.page_indices)) for g in target.inputs.batch.other_groups] == [32, 16, 8]
    assert staging_bytes(None, config(16)) > staging_bytes(None, config(16, ()))


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.integers(1, 13), min_size=1, max_size=ROWS), st.integers(0, 380), st.sampled_from([1, 3, 16]))
def test_the_arena_has_room_for_every_round(lens: list[int], start: int, page_size: int) -> None:
    """Chunks of prompts, as long as they may be together."""
    lens = lens if sum(lens) <= ROWS * (DRAFTS + 1) else [13]
    rows = [(start, 0)] * len(lens)
    target = replace(target_of(rows, page_size), num_new=np.array(lens), tokens=np.zeros((len(lens), 13), np.int32))
    assert specdec.rounds.buckets.most_pages(config(page_size)) * page_size >= LONGEST
    metadata = RoundTransfer(None, config(page_size), CPU).send(target.inputs, None, None)[0].metadata
    assert all(len(group.page_indices) for group in metadata.other_groups)
