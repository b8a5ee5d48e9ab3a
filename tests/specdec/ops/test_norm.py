"""Norms give what transformers' module gives, bit for bit."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attention.backends.limits import HALF
from specdec.ops.norm import add_rms_norm, rms_norm


@pytest.mark.parametrize("dtype", HALF)
def test_as_in_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x, residual = torch.randn(1, 7, 48, dtype=dtype), torch.randn(1, 7, 48, dtype=dtype)
    assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))
    total, normed = add_rms_norm(x, residual, norm.weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_compiler_is_told_the_truth(transposed: bool) -> None:
    x, weight = torch.randn(1, 7, 48, dtype=HALF[0]), torch.randn(48, dtype=HALF[0])
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x
    torch.library.opcheck(rms_norm, (x, weight, 1e-5), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(add_rms_norm, (x, x + 1, weight, 1e-5), test_utils=("test_schema", "test_faketensor"))
