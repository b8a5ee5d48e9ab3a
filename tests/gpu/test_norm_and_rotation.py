"""The kernels of norms and rotations give what their formulas give."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from attention.backends.limits import HALF
from drafters.rope import rotate
from specdec.ops.elementwise import add_rms_norm, rms_norm, rotated, rotated_together

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("width", [64, 512, 4096, 5120])
@pytest.mark.parametrize("tokens", [1, 6, 768])
def test_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    norm = LlamaRMSNorm(width, eps=1e-5).to("cuda", dtype)
    norm.weight.data.normal_()
    wide = torch.randn(1, tokens, width + 64, device="cuda", dtype=dtype)
    x, residual = wide[..., :width], torch.randn(1, tokens, width, device="cuda", dtype=dtype)  # x: rows with gaps
    step = torch.finfo(dtype).eps  # the sum's order may move what is rounded by one step
    torch.testing.assert_close(rms_norm(x, norm.weight, 1e-5), norm(x), rtol=2 * step, atol=0)
    total, normed = add_rms_norm(x, residual, norm.weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, norm(x + residual), rtol=2 * step, atol=0)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("query_heads", "key_heads", "dim"), [(32, 8, 128), (5, 1, 64), (16, 16, 96), (1, 1, 8)])
@pytest.mark.parametrize("tokens", [1, 6, 768])
def test_rotation(tokens: int, query_heads: int, key_heads: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    heads = query_heads + key_heads
    fused = torch.randn(1, tokens, heads, dim, device="cuda", dtype=dtype)  # as one matmul of q and k together
    q, k = (x.transpose(1, 2) for x in fused.split((query_heads, key_heads), 2))
    phase = torch.rand(1, tokens, dim, device="cuda") * 6
    cos, sin = phase.cos().to(dtype), phase.sin().to(dtype)
    expected = apply_rotary_pos_emb(*(x.double() for x in (q, k, cos, sin)))
    for ours, right in zip(rotated(q, k, cos[:, None], sin[:, None]), expected, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert ours.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("query_heads", "key_heads", "dim"), [(32, 8, 128), (5, 1, 64), (1, 1, 8)])
@pytest.mark.parametrize("tokens", [1, 6, 768])
def test_rotation_of_a_draft_head(tokens: int, query_heads: int, key_heads: int, dim: int, dtype: torch.dtype) -> None:
    """As eager code in float32, but for a product that is not rounded before the sum (fused multiply-add)."""
    torch.manual_seed(tokens)
    q, k, _ = torch.randn(tokens, query_heads + 2 * key_heads, dim, device="cuda", dtype=dtype).split(
        (query_heads, key_heads, key_heads), 1
    )
    phase = torch.rand(tokens, 1, dim // 2, device="cuda") * 6
    out = rotated_together(q, k, phase.cos(), phase.sin())
    eager = rotate(torch.cat((q, k), 1), phase.cos(), phase.sin())
    assert out.is_contiguous()
    torch.testing.assert_close(out, eager, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_both_wait_for_the_kernel_before_them() -> None:
    """Launched while a kernel before them runs, each reads what it wrote; the second norm follows one of ours."""
    weight = torch.ones(4096, device="cuda", dtype=HALF[1])
    a = torch.randn(4096, 4096, device="cuda", dtype=HALF[1])
    cos = torch.ones(1, 1, 4096, 128, device="cuda", dtype=HALF[1])
    for _ in range(5):
        product = a @ a
        normed = rms_norm(product[None], weight, 1e-5)
        heads = normed.view(1, 4096, 32, 128).transpose(1, 2)
        q, _ = rotated(heads, heads[:, :8], cos, torch.zeros_like(cos))
        again = rms_norm(q[0].transpose(0, 1).reshape(1, 4096, 4096), weight, 1e-5)
        torch.cuda.synchronize()
        expected = product.float() * torch.rsqrt(product.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        got = q[0].transpose(0, 1).reshape(4096, 4096)
        torch.testing.assert_close(got.float(), expected, rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(again[0].float(), expected, rtol=2**-6, atol=1e-6)
        a = a.roll(1, 0)
