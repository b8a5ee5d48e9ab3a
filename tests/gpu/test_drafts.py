"""The kernels that place and accept drafts of greedy rows give what torch gives, from a graph as well."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.loops.base import Draft
from specdec.acceptance.judge import fill_drafts, fill_from_loop, in_order, judge_from_loop, judge_greedy

CUDA = torch.device("cuda")


def fixed_round(rows: int, width: int) -> Any:
    """What these functions read of a round of fixed shape; sources and counts of drafts are random."""
    places = torch.arange(rows * (width + 1), device=CUDA).view(rows, width + 1)
    return SimpleNamespace(
        token_ids=torch.full((rows * (width + 1),), 7, device=CUDA),
        draft_places=places[:, 1:].flatten().clone(),  # of one draft a row it would stay a view
        draft_sources=torch.arange(rows * width, device=CUDA),
        logit_index=places.flip(0).contiguous(),
        num_drafts=torch.randint(width + 1, (rows,), device=CUDA),
        sources=torch.randperm(rows, device=CUDA),
    )


def compare(round_: Any, drafts: torch.Tensor, greedy: torch.Tensor, ours: torch.Tensor, packed: torch.Tensor) -> None:
    placed = ours.clone()
    ordered = in_order(Draft(drafts, None), round_)
    assert torch.equal(placed, fill_drafts(round_, ordered))
    assert torch.equal(packed, judge_greedy(greedy[round_.logit_index], round_, ordered).packed)


@pytest.mark.parametrize("rows", [1, 6, 64, 300])
@pytest.mark.parametrize("width", [1, 5, 7, 16, 40])
def test_as_in_torch(rows: int, width: int) -> None:
    torch.manual_seed(rows * width)
    round_, drafts = fixed_round(rows, width), torch.randint(2, (rows + 3, width + 2), device=CUDA)
    greedy, draft = torch.randint(2, (rows * (width + 1),), device=CUDA), Draft(drafts, None)
    packed = judge_from_loop(greedy, round_, draft).packed
    compare(round_, drafts, greedy, fill_from_loop(round_, draft), packed)


def test_rows_without_drafts() -> None:
    round_, greedy = fixed_round(4, 0), torch.randint(9, (4,), device=CUDA)
    assert torch.equal(
        judge_from_loop(greedy, round_, None).packed, judge_greedy(greedy[round_.logit_index], round_, None).packed
    )


def test_a_captured_round_follows_its_inputs() -> None:
    """Each kernel reads what the one before it wrote."""
    round_, drafts = fixed_round(6, 5), torch.zeros(8, 5, dtype=torch.int64, device=CUDA)
    greedy = torch.zeros(36, dtype=torch.int64, device=CUDA)

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = fill_from_loop(round_, Draft(drafts, None))
        return tokens, judge_from_loop(greedy, round_, Draft(drafts, None)).packed

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, packed = launch()
    for _ in range(20):
        drafts.random_(2)
        greedy.random_(2)
        round_.sources.copy_(torch.randperm(6, device=CUDA))
        round_.num_drafts.random_(6)
        graph.replay()
        compare(round_, drafts, greedy, tokens, packed)
