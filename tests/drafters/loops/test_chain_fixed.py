"""The steps of a chain in a fixed shape, written in place: they equal the arrays of a ragged round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import Operators, eagle3_spec
from hypothesis import given
from hypothesis import strategies as st

from attention.batch.host import HostBatch
from drafters.loops.base import DraftingRows, FixedPrefill, FixedShape, LoopSize
from drafters.loops.chain_arrays import StepSection, draft_steps, step_arrays
from drafters.loops.chain_passes import EaglePasses, FixedChain, FixedChainSteps
from tests.drafters.eagle3.test_head import make_head

CPU = torch.device("cpu")
ROWS, DRAFTS, LONGEST = 4, 3, 44
Rows = list[tuple[int, int]]
"""(committed length, drafts) of each row."""
rows_lists = st.lists(st.tuples(st.integers(0, 36), st.integers(0, DRAFTS)), min_size=1, max_size=ROWS)


def shape(page_size: int) -> FixedShape:
    return FixedShape(ROWS, DRAFTS + 1, page_size, ROWS * -(-LONGEST // page_size))


def drafting_rows(rows: Rows, page_size: int) -> DraftingRows:
    lens, drafts = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    width = -(-LONGEST // page_size)
    pages = np.arange(1, 1 + len(rows) * width, dtype=np.int32).reshape(len(rows), width)
    return DraftingRows(lens, drafts, pages, page_size)


@given(st.lists(rows_lists, min_size=1, max_size=4), st.sampled_from([1, 3, 16]))
def test_they_equal_the_index_arithmetic_one_round_after_the_other(rounds: list[Rows], page_size: int) -> None:
    """Nothing of an earlier and larger round is left in a later one; added rows stand on the null page."""
    fixed = FixedChainSteps(shape(page_size), CPU)
    for rows in rounds:
        own = drafting_rows(rows, page_size)
        steps = draft_steps(own.committed_lens, own.num_drafts, own.block_table, page_size, DRAFTS - 1)
        batches, staged = fixed.send(own)
        views = fixed.views(batches, staged)
        assert len(batches) == len(views) == DRAFTS - 1
        for step, (batch, view) in enumerate(zip(batches, views, strict=True)):
            batch.validate()
            added = [0] * (ROWS - len(rows))
            assert batch.positions.tolist() == steps.positions[step].tolist() + added
            assert batch.seq_lens.tolist() == steps.seq_lens[step].tolist() + [1 for _ in added]
            assert batch.slot_mapping.tolist() == steps.slots[step].tolist() + added
            plain = HostBatch(*(getattr(batch, name) for name in HostBatch.__dataclass_fields__))
            for name in ("positions", "seq_lens", "slot_mapping", "page_indices", "page_indptr", "last_page_len"):
                assert getattr(view, name).tolist() == getattr(plain, name).tolist(), name


@given(rows_lists, st.sampled_from([1, 3, 16]))
def test_they_equal_what_a_ragged_round_sends(rows: Rows, page_size: int) -> None:
    own = drafting_rows(rows, page_size)
    ragged = StepSection().arrays.values(step_arrays(own).sent)
    assert bool(ragged) == (own.num_steps > 0)
    _, staged = FixedChainSteps(shape(page_size), CPU).send(own)
    for name in ("step.positions", "step.seq_lens", "step.slot_mapping", "step.last_page_len") if ragged else ():
        assert staged[name][: own.num_steps, : len(rows)].tolist() == ragged[name].tolist(), name


def test_worked_example() -> None:
    """K=3, page size 16: the second row takes no step and stands on the null page."""
    pages = np.array([[7, 9], [3, 4]], np.int32)
    batches, staged = FixedChainSteps(shape(16), CPU).send(
        DraftingRows(np.array([18, 20]), np.array([3, 1]), pages, 16)
    )
    assert staged["step.slot_mapping"].tolist() == [[146, 0, 0, 0], [147, 0, 0, 0]]
    assert [b.seq_lens.tolist() for b in batches] == [[19, 1, 1, 1], [20, 1, 1, 1]]


@pytest.mark.parametrize("mapped", [True, False])
def test_a_pass_ends_with_the_launch_that_finds_its_drafts(mapped: bool) -> None:
    """It writes the target ids into their column by itself: nothing is mapped or copied after it."""
    spec = eagle3_spec()
    head = make_head(spec if mapped else eagle3_spec(draft_vocab_size=spec.vocab_size))
    seen, found = Operators(), []

    def greedy(logits: torch.Tensor, target_ids: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        ids = logits.argmax(-1)
        out.copy_(ids if target_ids is None else target_ids[ids])
        found.append((ids, target_ids))
        seen.counts.clear()
        return ids

    def attend(planned: Any, layer: int, query: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
        return query.clone()

    aux, size = torch.randn(12, len(head.aux_layers) * spec.target_hidden_size), LoopSize(rows=4, drafts=3)
    chain = FixedChain(EaglePasses(head), SimpleNamespace(attend=attend), aux, size, greedy, lambda function: function)  # type: ignore[arg-type]
    inputs = FixedPrefill(torch.arange(12) % 7, torch.tensor([3, 8]))
    planned = SimpleNamespace(metadata=SimpleNamespace(positions=torch.tensor([4, 6])))
    with torch.no_grad(), seen:
        chosen = [chain.prefill(inputs, (torch.arange(12),), lambda layer, q, k, v: q.clone())]
        assert not seen.counts
        for step in range(2):
            chosen.append(chain.step(step, 2, planned, None)[1])  # type: ignore[arg-type]
            assert not seen.counts
    ids = torch.stack([each.ids for each in chosen], 1)
    assert chain.drafts.tolist() == [*head.to_target_ids(ids).tolist(), *[[0, 0, 0]] * 3]
    assert all((target_ids is not None) == mapped for _, target_ids in found)
