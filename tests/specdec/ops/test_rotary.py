"""Queries and keys are rotated as transformers does it, up to the rounding of what lies between."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from attention.backends.limits import HALF
from specdec.ops.rotary import rotated


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
