"""Mixtures of experts on a GPU: the kernel against float64, and a captured launch with other routes."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts

from specdec.ops.experts import expert_matmul, mixtures, swiglu_experts, using_capturable_experts

CUDA = torch.device("cuda")
LIMIT = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


def routes(tokens: int, experts: int, chosen: int) -> torch.Tensor:
    return torch.rand(tokens, experts, device=CUDA).topk(chosen, -1).indices


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "rows", "width", "transposed"),
    [
        (1, 2, 4, 96, 192, False),
        (5, 6, 16, 70, 200, False),
        (40, 6, 16, 64, 128, False),
        (300, 6, 64, 48, 136, False),
        (7, 3, 8, 33, 130, True),
        (1, 6, 64, 2816, 2048, False),
    ],
)
@pytest.mark.parametrize("shared_input", [True, False])
def test_matmuls_equal_float64(
    tokens: int,
    chosen: int,
    experts: int,
    rows: int,
    width: int,
    transposed: bool,
    shared_input: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 1 if shared_input else chosen, width, device=CUDA).to(dtype)
    shape = (experts, width, rows) if transposed else (experts, rows, width)
    stack = torch.randn(shape, device=CUDA).to(dtype)
    stack = stack.transpose(1, 2) if transposed else stack
    index = routes(tokens, experts, chosen)
    expected = torch.stack([(stack[i].double() * v.double()[:, None]).sum(-1) for i, v in zip(index, x, strict=True)])
    assert relative_error(expert_matmul(x, stack, index), expected) <= LIMIT[dtype]


def test_every_token_on_one_expert() -> None:
    x, stack = torch.randn(50, 1, 128, device=CUDA), torch.randn(4, 64, 128, device=CUDA)
    index = torch.full((50, 1), 2, device=CUDA)
    half = [t.to(torch.bfloat16) for t in (x, stack)]
    expected = half[0].double() @ half[1][2].double().T
    assert relative_error(expert_matmul(*half, index), expected) <= LIMIT[torch.bfloat16]


def test_the_comparison_can_fail() -> None:
    x, stack = torch.randn(5, 1, 128, device=CUDA).half(), torch.randn(4, 64, 128, device=CUDA).half()
    index = routes(5, 4, 2)
    right = expert_matmul(x, stack, index)
    stack[index[0, 0]] = 0
    assert relative_error(expert_matmul(x, stack, index), right) > 0.1


def mixture() -> DeepseekV2Experts:
    torch.manual_seed(0)
    config = DeepseekV2Config(
        hidden_size=256,
        moe_intermediate_size=96,
        n_routed_experts=16,
        num_experts_per_tok=4,
        num_attention_heads=4,
        experts_implementation="grouped_mm",
    )
    with CUDA:
        experts = DeepseekV2Experts(config).to(torch.bfloat16).requires_grad_(False)
    for parameter in experts.parameters():
        parameter.normal_(std=0.05)
    return experts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "hidden", "inner"),
    [
        (1, 8, 128, 2048, 768),
        (2, 10, 512, 2048, 512),
        (9, 1, 8, 264, 200),
        (33, 6, 64, 2048, 1408),
        (128, 8, 128, 2048, 768),
        (300, 2, 5, 130, 72),
        (819, 10, 512, 512, 256),
        (1024, 8, 16, 512, 256),
        (3000, 8, 64, 256, 128),
    ],
)
def test_swiglu_experts_equal_float64(
    tokens: int, chosen: int, experts: int, hidden: int, inner: int, dtype: torch.dtype
) -> None:
    """Pair by pair, up to 24,000 of them; NaN in an expert that nobody chose; two launches are the same bits."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden, device=CUDA).to(dtype)
    gate_up = (torch.randn(experts, 2 * inner, hidden, device=CUDA) / hidden**0.5).to(dtype)
    down = (torch.randn(experts, hidden, inner, device=CUDA) / inner**0.5).to(dtype)
    index = routes(tokens, experts - 1, chosen) if experts > chosen else routes(tokens, experts, chosen)
    if experts > chosen:
        gate_up[-1] = down[-1] = float("nan")
    found = swiglu_experts(x, gate_up, down, index)
    assert torch.equal(found, swiglu_experts(x, gate_up, down, index))
    right = torch.empty(tokens, chosen, hidden, device=CUDA, dtype=torch.float64)
    for expert in index.unique().tolist():
        token, place = (index == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ gate_up[expert].double().T).chunk(2, -1)
        right[token, place] = (torch.nn.functional.silu(gate) * up) @ down[expert].double().T
    assert relative_error(found, right) <= 2 * LIMIT[dtype]


@torch.inference_mode()
def test_a_captured_launch_follows_the_routes() -> None:
    """Compiled and captured once, replayed with other tokens and other experts: what the grouped matmul gives."""
    experts = mixture()
    hidden, index = torch.randn(24, 256, device=CUDA).to(torch.bfloat16), routes(24, 16, 4)
    weights = torch.rand(24, 4, device=CUDA)
    assert mixtures(experts) == [experts]
    compiled = torch.compile(experts.forward, fullgraph=True, dynamic=True)
    with using_capturable_experts(experts):
        for _ in range(2):
            compiled(hidden, index, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(hidden, index, weights)
    for _ in range(4):
        hidden.copy_(torch.randn(24, 256, device=CUDA))
        index.copy_(routes(24, 16, 4))
        weights.copy_(torch.rand(24, 4, device=CUDA))
        graph.replay()
        assert relative_error(out, experts(hidden, index, weights)) <= 1e-2
