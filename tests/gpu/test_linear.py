"""The kernel of linear layers on a handful of tokens."""

from __future__ import annotations

import pytest
import torch

from specdec.ops.linear import MOST_TOKENS, MOST_TOKENS_BIASED, few_tokens_linear

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 6, 16])
@pytest.mark.parametrize(("rows", "width"), [(64, 128), (100, 256), (4096, 4096), (20_001, 512)])
def test_matmuls_are_those_of_float32(dtype: torch.dtype, tokens: int, rows: int, width: int) -> None:
    """Rows that fill no tile, inputs and weights that are slices; the output was never written before."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 2 * width, device=CUDA, dtype=dtype)[:, width:]
    weight = torch.randn(rows + 1, width, device=CUDA, dtype=dtype)[1:]
    from specdec.ops.linear_kernel import fits

    assert fits(x, weight)
    got, right = few_tokens_linear(x, weight).float(), x.float() @ weight.float().T
    assert ((got - right).norm() / right.norm()).item() <= (5e-4 if dtype == torch.float16 else 3e-3)


def test_a_captured_chain_of_matmuls_follows_its_input() -> None:
    """Each is launched while the one before ends; every replay must see its predecessor's output."""
    torch.manual_seed(0)
    weights = [torch.randn(2048, 2048, device=CUDA, dtype=torch.bfloat16) / 45 for _ in range(12)]
    x = torch.zeros(6, 2048, device=CUDA, dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        out = x
        for weight in weights:
            out = few_tokens_linear(out, weight)
        return out

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for seed in range(20):
        x.copy_(torch.randn(6, 2048, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(out, chain())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [MOST_TOKENS + 1, 48, MOST_TOKENS_BIASED])
@pytest.mark.parametrize(("rows", "width"), [(256, 256), (100, 4096), (4096, 14336)])
def test_matmuls_with_a_bias_of_zeros(dtype: torch.dtype, tokens: int, rows: int, width: int) -> None:
    torch.manual_seed(tokens)
    x, weight = (torch.randn(n, width, device=CUDA, dtype=dtype) for n in (tokens, rows))
    got, right = few_tokens_linear(x, weight).float(), x.float() @ weight.float().T
    assert ((got - right).norm() / right.norm()).item() <= (5e-4 if dtype == torch.float16 else 3e-3)


@pytest.mark.parametrize(
    ("tokens", "width", "dtype"),
    [
        (MOST_TOKENS + 1, 32, torch.bfloat16),
        (MOST_TOKENS_BIASED + 1, 256, torch.bfloat16),
        (4, 100, torch.bfloat16),
        (4, 256, torch.float32),
    ],
)
def test_everything_else_is_left_to_the_library(tokens: int, width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(tokens, width, device=CUDA, dtype=dtype), torch.randn(64, width, device=CUDA, dtype=dtype)
    assert torch.equal(few_tokens_linear(x, weight), torch.nn.functional.linear(x, weight))
