"""Rounds with short prompts in rows of a fixed shape: every token of the ragged round, once, where it belongs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.batch.host import HostBatch
from specdec.config import EngineConfig
from specdec.rounds.ahead import ahead_inputs
from specdec.rounds.buckets import static_shape
from specdec.rounds.static import FixedTarget
from specdec.rounds.verification import TargetArrays
from specdec.rounds.virtual_rows import num_virtual_rows, virtual_rows

ROWS, DRAFTS, LONGEST, PAGE_SIZE = 12, 3, 60, 4
QUERY_LEN = DRAFTS + 1
SHAPE = static_shape(EngineConfig(DRAFTS, LONGEST, ROWS, ROWS * QUERY_LEN, PAGE_SIZE, 1000), ROWS)
Row = tuple[int, int, int, bool]
"""(first position, committed tokens, drafts, whether its next token is decided)."""
rows_st = st.one_of(
    st.tuples(st.integers(0, 40), st.just(1), st.integers(0, DRAFTS), st.just(True)),
    st.tuples(st.integers(0, 40), st.integers(1, 14), st.just(0), st.booleans()),
)
rounds_st = st.lists(rows_st, min_size=1, max_size=4).filter(
    lambda rows: sum(1 + -(-(num_new - 1) // QUERY_LEN) for _, num_new, _, _ in rows) <= ROWS
)


def target_of(rows: list[Row]) -> TargetArrays:
    """Token id = 1000 · row + position; drafts are filled in on the device."""
    rows = sorted(rows, key=lambda row: 0 if row[2] else 2 - row[3])
    start, num_new, drafts, decided = (np.array(column) for column in zip(*rows, strict=True))
    index, width = np.arange(len(rows)), int(num_new.max())
    tokens = 1000 * index[:, None] + start[:, None] + np.arange(width)
    table = np.arange(1, 1 + len(rows) * 16, dtype=np.int32).reshape(len(rows), 16)
    return TargetArrays(
        start=start,
        num_new=num_new,
        drafts=drafts,
        num_drafting=int(np.count_nonzero(drafts)),
        tokens=np.where(np.arange(width) < num_new[:, None], tokens, -1).astype(np.int32),
        decided=np.flatnonzero(decided),
        block_table=table,
        head_table=table + 500,
        wanted=drafts,
        room=drafts,
        following=np.where(decided, 0, 1000 * index + start + num_new),
        page_size=PAGE_SIZE,
        request_rows=index,
    )


def sent(fixed: FixedTarget, target: TargetArrays) -> tuple[HostBatch, HostBatch, dict[str, np.ndarray], np.ndarray]:
    """(target's batch, head's batch, arrays by name, following [ROWS, K+1], -1 in the decided rows)."""
    laid = virtual_rows(target, QUERY_LEN)
    assert len(laid.target.start) == num_virtual_rows(target, QUERY_LEN)
    assert fixed.holds(laid.target)
    batch, (head,), staged = fixed.send(laid.target, len(target.start))
    following = np.full((ROWS, QUERY_LEN), -1)
    first = len(target.decided)
    following[first : first + len(laid.following)] = laid.following
    arrays = {name: view.numpy().copy() for name, view in staged.views.items()}
    return batch, head, arrays, following


@given(st.lists(rounds_st, min_size=1, max_size=4))
def test_every_token_stands_once_with_its_slot_and_what_follows_it(rounds: list[list[Row]]) -> None:
    """Nothing of an earlier round is left in a later one."""
    fixed = FixedTarget(SHAPE, 1, torch.device("cpu"))
    for rows in rounds:
        target = target_of(rows)
        ragged, ahead = target.inputs, ahead_inputs(target)
        batch, head, arrays, following = sent(fixed, target)
        batch.validate()
        head.validate()
        decided = np.zeros(len(ragged.token_ids), bool)
        decided[ragged.logits_indices] = True
        drafted = np.zeros(len(ragged.token_ids), bool)
        drafted[ragged.draft_places] = True
        right = {
            (position, slot, head_slot): (0 if is_draft else token, -1 if is_decided else after)
            for position, slot, head_slot, token, is_draft, after, is_decided in zip(
                ragged.batch.positions.tolist(),
                ragged.batch.slot_mapping.tolist(),
                ahead.batches[0].slot_mapping.tolist(),
                ragged.token_ids.tolist(),
                drafted.tolist(),
                ahead.token_ids.tolist(),
                decided.tolist(),
                strict=True,
            )
        }
        own = batch.slot_mapping > 0
        assert int(own.sum()) == len(right) == len(ragged.token_ids)
        places = set(arrays["target.draft_places"][: ROWS * DRAFTS].tolist())
        for i in np.flatnonzero(own).tolist():
            place = int(batch.positions[i]), int(batch.slot_mapping[i]), int(head.slot_mapping[i])
            token, after = right[place]
            if i in places:
                assert token == 0, "a draft would overwrite a committed token"
            else:
                assert arrays["target.token_ids"][i] == token
            assert following.reshape(-1)[i] == after
        assert arrays["target.num_drafts"].tolist() == [*target.drafts, *[0] * (ROWS - len(target.drafts))]
        ends = batch.seq_lens.reshape(ROWS) - QUERY_LEN
        assert (ends == batch.positions.reshape(ROWS, QUERY_LEN)[:, 0]).all(), "a row masks by its own lengths"


def test_the_next_round_has_its_drafts_again() -> None:
    """Of a fixed shape every token after a row's first takes a draft."""
    fixed = FixedTarget(SHAPE, 1, torch.device("cpu"))
    sent(fixed, target_of([(7, 14, 0, True), (3, 1, 2, True)]))
    for _ in range(2):  # both buffers of the ring
        _, _, staged = fixed.send(target_of([(3, 1, 2, True)]))
        places = staged["target.draft_places"][: ROWS * DRAFTS].reshape(ROWS, DRAFTS)
        right = np.arange(ROWS)[:, None] * QUERY_LEN + np.arange(1, QUERY_LEN)
        assert places.tolist() == right.tolist()


def test_lists_that_are_too_short_are_said_to_be() -> None:
    """Rows that share pages may list more than there are in the pool."""
    target = target_of([(37, 14, 0, True)])
    laid = virtual_rows(target, QUERY_LEN).target
    pages = sum(-(-(int(start) + QUERY_LEN) // PAGE_SIZE) for start in laid.start) + ROWS - len(laid.start)
    for entries, holds in ((pages, True), (pages - 1, False)):
        fixed = FixedTarget(replace(SHAPE, page_entries=entries), 1, torch.device("cpu"))
        assert fixed.holds(laid) is holds
        if holds:
            fixed.send(laid, 1)
