"""Norms give what transformers' module gives, bit for bit."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from attention.backends.limits import HALF
from drafters.rope import rotate
from specdec.ops.elementwise import add_rms_norm, rms_norm, rotated, rotated_together, silu_product


@pytest.mark.parametrize("dtype", HALF)
def test_norm_as_in_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x, residual = torch.randn(1, 7, 48, dtype=dtype), torch.randn(1, 7, 48, dtype=dtype)
    assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))
    total, normed = add_rms_norm(x, residual, norm.weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_compiler_is_told_the_truth_of_the_norm(transposed: bool) -> None:
    x, weight = torch.randn(1, 7, 48, dtype=HALF[0]), torch.randn(48, dtype=HALF[0])
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x
    torch.library.opcheck(rms_norm, (x, weight, 1e-5), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(add_rms_norm, (x, x + 1, weight, 1e-5), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(1, 7, 48), (7, 48)])
def test_rounded_once(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gate, up = torch.randn(2, *shape, dtype=dtype) * 4
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(silu_product(gate, up).double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_the_compiler_is_told_the_truth_of_the_gate() -> None:
    gate, up = torch.randn(1, 7, 96, dtype=HALF[0]).split(48, -1)
    torch.library.opcheck(silu_product, (gate, up), test_utils=("test_schema", "test_faketensor"))


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k = (torch.randn(1, 7, heads, 24, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    phase = torch.rand(1, 7, 24) * 6
    return q, k, phase.cos().to(dtype), phase.sin().to(dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_rotation_as_in_transformers(dtype: torch.dtype) -> None:
    """Here half-angles differ between the two halves, so that none is read twice."""
    q, k, cos, sin = tensors(dtype)
    expected = apply_rotary_pos_emb(*(x.double() for x in (q, k, cos, sin)))
    for ours, right in zip(rotated(q, k, cos[:, None], sin[:, None]), expected, strict=True):
        assert torch.equal(ours, right.to(dtype)) or (ours - right).abs().max() <= torch.finfo(dtype).eps * 4
        assert ours.transpose(1, 2).is_contiguous()


def test_the_compiler_is_told_the_truth_of_the_rotation() -> None:
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
