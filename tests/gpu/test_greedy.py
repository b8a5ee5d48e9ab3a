"""The arg max over a vocabulary."""

from __future__ import annotations

import pytest
import torch

from specdec.ops.greedy_rows import greedy_drafts, greedy_ids

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 1536, 4096, 4097, 32_000, 128_256])
@pytest.mark.parametrize("rows", [1, 6, 300])
def test_it_is_torchs(dtype: torch.dtype, vocab: int, rows: int) -> None:
    """Half precision has many equal values: the first of them counts."""
    logits = torch.randn(rows, vocab, device=CUDA).to(dtype)
    assert torch.equal(greedy_ids(logits), logits.float().argmax(-1))


def test_equal_values_in_several_parts_and_infinities() -> None:
    logits = torch.zeros(4, 20_000, device=CUDA, dtype=torch.bfloat16)
    logits[0, [4095, 4096, 19_999]] = 1
    logits[1] = float("-inf")
    logits[2, [7000, 15_000]] = float("inf")
    logits[3, [5000, 9000]] = float("nan")
    assert greedy_ids(logits).tolist() == [4095, 0, 7000, 5000]


def test_rows_of_a_wider_matrix() -> None:
    wide = torch.randn(5, 10_000, device=CUDA)
    logits = wide[:, 300:9000]
    assert torch.equal(greedy_ids(logits), logits.argmax(-1))
    assert torch.equal(greedy_ids(wide.t()), wide.t().argmax(-1))


def test_a_captured_call_follows_its_input() -> None:
    logits = torch.randn(6, 128_256, device=CUDA, dtype=torch.bfloat16)
    greedy_ids(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = greedy_ids(logits)
    for _ in range(20):
        logits.copy_(torch.randn_like(logits))
        graph.replay()
        assert torch.equal(ids, logits.float().argmax(-1))


@pytest.mark.parametrize("mapped", [True, False])
def test_drafts_go_into_their_column(mapped: bool) -> None:
    logits, drafts = torch.randn(6, 32_000, device=CUDA).bfloat16(), torch.full((8, 5), -7, device=CUDA)
    target_ids = torch.randperm(128_256, device=CUDA)[:32_000].sort().values if mapped else None
    for column in range(5):
        ids = greedy_drafts(logits, target_ids, drafts[:6, column])
        right = logits.float().argmax(-1)
        assert torch.equal(ids, right)
        assert torch.equal(drafts[:6, column], right if target_ids is None else target_ids[right])
    assert bool((drafts[6:] == -7).all())
