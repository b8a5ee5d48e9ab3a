"""Mixtures of experts on a GPU: the kernel against float64, and a captured launch with other routes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts

from specdec.ops.fp8 import FP8, dequantised
from specdec.ops.mixtures import Gating
from specdec.ops.mixtures.choice import mixtures, using_capturable_experts
from specdec.ops.mixtures.paired import expert_matmul
from specdec.ops.mixtures.routed import SOFTMAX, SUM, activated, best_experts, dequantised_mxfp4, routed_experts

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
    assert relative_error(expert_matmul(x, stack, None, index), expected) <= LIMIT[dtype]


def test_every_token_on_one_expert() -> None:
    x, stack = torch.randn(50, 1, 128, device=CUDA), torch.randn(4, 64, 128, device=CUDA)
    index = torch.full((50, 1), 2, device=CUDA)
    half = [t.to(torch.bfloat16) for t in (x, stack)]
    expected = half[0].double() @ half[1][2].double().T
    assert relative_error(expert_matmul(*half, None, index), expected) <= LIMIT[torch.bfloat16]


def test_the_comparison_can_fail() -> None:
    x, stack = torch.randn(5, 1, 128, device=CUDA).half(), torch.randn(4, 64, 128, device=CUDA).half()
    index = routes(5, 4, 2)
    right = expert_matmul(x, stack, None, index)
    stack[index[0, 0]] = 0
    assert relative_error(expert_matmul(x, stack, None, index), right) > 0.1


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
def test_routed_experts_equal_float64(
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
    given = x, index, gate_up, down, None, None, None, None, False, 1.0, None
    found = routed_experts(*given)
    assert torch.equal(found, routed_experts(*given))
    right = torch.empty(tokens, chosen, hidden, device=CUDA, dtype=torch.float64)
    for expert in index.unique().tolist():
        token, place = (index == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ gate_up[expert].double().T).chunk(2, -1)
        right[token, place] = (torch.nn.functional.silu(gate) * up) @ down[expert].double().T
    assert relative_error(found, right) <= 2 * LIMIT[dtype]


@pytest.mark.parametrize("stored", ["half", "fp8", "mxfp4"])
@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "hidden", "inner"),
    [
        (1, 4, 32, 2880, 2880),
        (9, 4, 32, 2880, 2880),
        (33, 4, 32, 2880, 2880),
        (64, 4, 32, 2880, 2880),
        (2, 3, 4, 96, 32),
        (40, 2, 16, 160, 224),
        (200, 3, 8, 160, 96),
        (8192, 2, 8, 256, 128),
    ],
)
def test_gpt_oss_and_packed_experts(
    stored: str, tokens: int, chosen: int, experts: int, hidden: int, inner: int
) -> None:
    """Gate and up in turns, clamped, with biases; blocks in 8 bits (plain) and in 4."""
    torch.manual_seed(tokens)
    if stored == "fp8":
        hidden, inner = -(-hidden // 128) * 128, -(-inner // 128) * 128
    x = torch.randn(tokens, hidden, device=CUDA).bfloat16()
    index, plain = routes(tokens, experts - 1, chosen), stored == "fp8"
    stacks, scales, dense = [], [], []
    for rows, width in ((2 * inner, hidden), (hidden, inner)):
        if stored == "mxfp4":
            stacks.append(torch.randint(256, (experts, rows, width // 2), device=CUDA).byte())
            scales.append(torch.randint(118, 121, (experts, rows, width // 32), device=CUDA).byte())
            dense.append(dequantised_mxfp4(stacks[-1], scales[-1]))
        elif plain:
            stacks.append(torch.randn(experts, rows, width, device=CUDA).to(FP8))
            scales.append((torch.rand(experts, rows // 128, width // 128, device=CUDA) + 0.5) / width**0.5)
            dense.append(dequantised(stacks[-1], scales[-1], torch.float32))
        else:
            stacks.append((torch.randn(experts, width, rows, device=CUDA) / width**0.5).bfloat16().transpose(1, 2))
            scales.append(None)
            dense.append(stacks[-1].float())
    biases = [None if plain else torch.randn(experts, s.shape[1], device=CUDA).bfloat16() * 0.1 for s in stacks]
    form = (False, 1.0, None) if plain else (True, 1.702, 1.0)
    found = routed_experts(x, index, *stacks, *scales, *biases, *form)
    assert torch.equal(found, routed_experts(x, index, *stacks, *scales, *biases, *form))
    right = torch.empty(found.shape, device=CUDA)
    for expert in index.unique().tolist():
        token, place = (index == expert).nonzero(as_tuple=True)
        inner_found = x[token].float() @ dense[0][expert].T + (0 if plain else biases[0][expert].float())
        gate, up = inner_found.chunk(2, -1) if plain else (inner_found[:, ::2], inner_found[:, 1::2])
        inner_found = activated(gate, up, *form[1:])
        right[token, place] = inner_found @ dense[1][expert].T + (0 if plain else biases[1][expert].float())
    assert relative_error(found, right) <= (0.06 if plain else 1e-2)  # both inputs in 8 bits: 0.026 each


@pytest.mark.parametrize("form", [(False, 1.0, None), (True, 1.702, 1.0)])
@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(1, 4, 8), (7, 2, 32), (40, 4, 24), (64, 2, 16)])
def test_few_tokens_in_four_bits_equal_tiles(tokens: int, chosen: int, experts: int, form: tuple[Any, ...]) -> None:
    """Without biases, all exponents that bfloat16 has, NaN in an unused expert, all pairs of one expert; another sign
    of a chosen expert's weights changes the result."""
    from specdec.ops.mixtures.mxfp4_kernel import few_mxfp4
    from specdec.ops.mixtures.routed_kernel import launch_routed, tilings_of

    torch.manual_seed(tokens)
    x = torch.randn(tokens, 352, device=CUDA).bfloat16()
    stacks = [torch.randint(256, (experts, *s), device=CUDA).byte() for s in ((2 * 96, 176), (352, 48))]
    scales = [torch.randint(100, 136, (experts, *s), device=CUDA).byte() for s in ((2 * 96, 11), (352, 3))]
    scales[0][-1] = scales[1][-1] = 255
    tiles = tilings_of(4096, 8, "mxfp4")
    for index in (routes(tokens, experts - 1, chosen), torch.full((tokens, 1), 2, device=CUDA)):
        given = x, *stacks, index, tuple(scales), (None, None), Gating(*form)
        assert few_mxfp4(index.numel(), experts, x)
        found = launch_routed(*given)
        assert torch.equal(found, launch_routed(*given))
        assert relative_error(found, launch_routed(*given, tilings=tiles)) <= 1e-2
        stacks[1][index[0, 0]] ^= 0x88  # its signs
        assert not torch.equal(found, launch_routed(*given))


@pytest.mark.parametrize("width", [32, 96, 352])
def test_a_token_that_is_no_number_changes_no_other(width: int) -> None:
    """In four bits: rows end inside a step of four blocks, and what lies behind them is the next token's."""
    torch.manual_seed(width)
    x, index = torch.randn(3, width, device=CUDA).bfloat16(), torch.tensor([[0], [1], [2]], device=CUDA)
    stacks = [torch.randint(256, (4, *s), device=CUDA).byte() for s in ((64, width // 2), (width, 16))]
    scales = [torch.randint(118, 121, (4, *s), device=CUDA).byte() for s in ((64, width // 32), (width, 1))]
    right = routed_experts(x, index, *stacks, *scales, None, None, False, 1.0, None)
    x[1] = torch.nan
    found = routed_experts(x, index, *stacks, *scales, None, None, False, 1.0, None)
    assert torch.equal(found[[0, 2]], right[[0, 2]]) and right.isfinite().all() and found[1].isnan().all()


@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 128, 8), (40, 512, 10), (3000, 32, 4), (2, 1000, 32)])
@pytest.mark.parametrize("normalise", ["", SUM, SOFTMAX])
def test_the_routers_choice(tokens: int, experts: int, chosen: int, normalise: str) -> None:
    torch.manual_seed(experts)
    scores = torch.randn(tokens, experts, device=CUDA).bfloat16()  # with equal ones
    found = best_experts(scores, chosen, normalise == SUM, normalise, torch.float32)
    right = best_experts(scores.cpu(), chosen, normalise == SUM, normalise, torch.float32)
    assert torch.equal(found[1].cpu(), right[1])
    torch.testing.assert_close(found[0].cpu(), right[0], rtol=1e-5, atol=1e-7)


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
