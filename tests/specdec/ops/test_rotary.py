"""Queries and keys are rotated as transformers does it, up to the rounding of what lies between."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from attention.backends.limits import HALF
from drafters.rope import rotate
from specdec.ops.rotary import rotated, rotated_together


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k = (torch.randn(1, 7, heads, 24, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    phase = torch.rand(1, 7, 24) * 6
    return q, k, phase.cos().to(dtype), phase.sin().to(dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_as_in_transformers(dtype: torch.dtype) -> None:
    """Here half-angles differ between the two halves, so that none is read twice."""
    q, k, cos, sin = tensors(dtype)
    expected = apply_rotary_pos_emb(*(x.double() for x in (q, k, cos, sin)))
    for ours, right in zip(rotated(q, k, cos[:, None], sin[:, None]), expected, strict=True):
        assert torch.equal(ours, right.to(dtype)) or (ours - right).abs().max() <= torch.finfo(dtype).eps * 4
        assert ours.transpose(1, 2).is_contiguous()


def test_the_compiler_is_told_the_truth() -> None:
    q, k, cos, sin = tensors(HALF[0])
    torch.library.opcheck(rotated, (q, k, cos[:, None], sin[:, None]), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", HALF)
def test_both_together_as_draft_heads_do_it(dtype: torch.dtype) -> None:
    """Bit by bit: in float32, rounded once."""
    torch.manual_seed(0)
    fused = torch.randn(7, 9, 24, dtype=dtype)  # as one matmul of q, k and v
    q, k, _ = fused.split((4, 2, 3), 1)
    phase = torch.rand(7, 1, 12) * 6
    args = q, k, phase.cos(), phase.sin()
    out = rotated_together(*args)
    assert torch.equal(out, rotate(torch.cat((q, k), 1), *args[2:])) and out.is_contiguous()
    torch.library.opcheck(rotated_together, args, test_utils=("test_schema", "test_faketensor"))
