"""The arrays of a model that reads tokens: of the running example in drafters/loops/prefill.py."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import tiny_llama

from drafters.assistant.head import AssistantHead
from drafters.base import Head
from drafters.loops.base import DraftInput, DraftLoop, GraphLoop, LoopSize, PrefillPasses, ReadsBonus, SharesPages
from drafters.loops.chain import ChainLoop
from drafters.loops.tokens import TokenLoop, TokenSection, token_prefill

TABLE = np.array([[7, 9, 0, 0], [3, 4, 8, 0], [1, 2, 5, 6]], np.int32)
TOKENS = np.arange(180).reshape(3, 60).astype(np.int32)


def example() -> DraftInput:
    """K=3, page size 16, q=[4,4,4], seq=[20,33,48], accepted=[1,3,0]."""
    return DraftInput(
        query_start_loc=np.array([0, 4, 8, 12]),
        num_drafts=np.array([3, 3, 3]),
        num_accepted=np.array([1, 3, 0]),
        order=np.arange(3),
        request_rows=np.arange(3),
        committed_lens=np.array([18, 33, 45]),
        tokens=TOKENS,
        num_drafts_next=np.array([3, 3, 3]),
        block_table=TABLE,
        page_size=16,
    )


def test_the_prefill_ends_with_the_bonus_token() -> None:
    found = token_prefill(example())
    assert found.batch.positions.tolist() == [16, 17, 18, 29, 30, 31, 32, 33, 44, 45]
    assert found.token_ids.tolist() == [16, 17, 18, 89, 90, 91, 92, 93, 164, 165]
    assert found.last_row.tolist() == [2, 7, 9]
    assert found.batch.seq_lens.tolist() == [19, 34, 46]
    assert found.batch.slot_mapping.tolist()[:3] == [9 * 16, 9 * 16 + 1, 9 * 16 + 2]


def test_step_s_reads_draft_s_after_the_bonus_token() -> None:
    loop = TokenLoop(AssistantHead(tiny_llama()))
    arrays = loop.arrays(example())
    assert [step.positions.tolist() for step in arrays.steps.batches] == [[19, 34, 46], [20, 35, 47]]
    assert [step.seq_lens.tolist() for step in arrays.steps.batches] == [[20, 35, 47], [21, 36, 48]]
    assert arrays.size == LoopSize(3, 7, 4, 3), "tokens of the verification: the section adds the bonus tokens"


def test_the_places_hold_a_token_more_for_each_row() -> None:
    sizes = TokenSection(1).sizes(LoopSize(4, 8, 2, 3))
    assert sizes["prefill.0.tokens"] == 12


def test_its_protocols() -> None:
    head = AssistantHead(tiny_llama())
    loop = head.draft_loop(LoopSize())
    assert isinstance(head, Head) and isinstance(loop, DraftLoop) and isinstance(loop, SharesPages)
    assert isinstance(loop, GraphLoop) and isinstance(loop, ReadsBonus)
    assert PrefillPasses.of(loop) == PrefillPasses(1, 1) and PrefillPasses.of(None) == PrefillPasses()
    assert PrefillPasses.of(ChainLoop(head)) == PrefillPasses(1, 0)


@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_draft_less_make_no_later_steps(count: int) -> None:
    loop, draft = TokenLoop(AssistantHead(tiny_llama())), example()
    draft.num_drafts_next[:] = (count, 1, 1)
    assert len(loop.arrays(draft).steps.batches) == count - 1
