"""The arg max of rows of logits on a CPU, by torch alone."""

from __future__ import annotations

import pytest
import torch

from specdec.ops.greedy_rows import greedy_drafts, greedy_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_first_of_equal_ones_as_argmax(dtype: torch.dtype) -> None:
    """Few values, so that most rows have ties; rows of infinities, and with NaN."""
    torch.manual_seed(0)
    for vocab in (1, 2, 7, 33, 1000):
        logits = torch.randint(0, 4, (60, vocab)).to(dtype)
        logits[:20][torch.rand(20, vocab) < 0.5] = -torch.inf
        logits[10:30][torch.rand(20, vocab) < 0.1] = torch.inf
        logits[40:][torch.rand(20, vocab) < 0.1] = torch.nan
        assert torch.equal(greedy_ids(logits), logits.argmax(-1))
    assert greedy_ids(torch.zeros(0, 5, dtype=dtype)).tolist() == []


def test_drafts_are_target_ids() -> None:
    logits, out = torch.tensor([[0.0, 2.0, 2.0], [3.0, 0.0, 1.0]]), torch.zeros(2, 2, dtype=torch.int64)
    assert greedy_drafts(logits, torch.tensor([4, 6, 9]), out[:, 1]).tolist() == [1, 0]
    assert out.tolist() == [[0, 6], [0, 4]]
