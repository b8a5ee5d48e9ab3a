"""A router's choice becomes one operator, whatever softmax stands around it; what has another form stays."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from specdec.ops.mixtures.routed import SOFTMAX, SUM, best_experts
from tests.specdec.compiler.test_passes import TOKENS, rewritten

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_experts_per_tok": 4}
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu runs the kernels compiled"
)


def filled(router: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in router.parameters():
        nn.init.normal_(parameter)
    return router.to(torch.bfloat16).requires_grad_(False)


ROUTERS: dict[str, Callable[[], nn.Module]] = {
    "softmax, then the sum": lambda: Qwen3MoeTopKRouter(Qwen3MoeConfig(**SIZES, num_experts=16, norm_topk_prob=True)),
    "softmax alone": lambda: Qwen3MoeTopKRouter(Qwen3MoeConfig(**SIZES, num_experts=16, norm_topk_prob=False)),
    "softmax of the chosen": lambda: GptOssTopKRouter(GptOssConfig(**SIZES, num_local_experts=16)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.cases(1)
def test_a_routers_choice_is_one_operator(name: str) -> None:
    router, x = filled(ROUTERS[name]()), torch.randn(TOKENS, 32, dtype=torch.bfloat16)

    def run(x: torch.Tensor) -> torch.Tensor:
        _, weights, places = router(x)
        return torch.cat([weights.double(), places.double()], -1)

    out, after = rewritten(run, x)
    assert (after["best_experts"], after["topk"], after["exp"], after["div"]) == (1, 0, 0, 0)
    torch.testing.assert_close(out, run(x), rtol=0, atol=4e-3)  # half a step of bfloat16


def plain(x: torch.Tensor) -> torch.Tensor:
    values, places = x.topk(3, -1)
    return values + places


def scores_read_twice(x: torch.Tensor) -> torch.Tensor:
    scores = x.float().softmax(-1)
    values, places = scores.topk(3, -1)
    return values / values.sum(-1, keepdim=True) + places + scores.sum()


def weights_read_twice(x: torch.Tensor) -> torch.Tensor:
    values, places = x.float().softmax(-1).topk(3, -1)
    return values / values.sum(-1, keepdim=True) + places + values


def gathered(x: torch.Tensor) -> torch.Tensor:
    """As DeepSeek-V3: chosen by other scores than it is weighted by."""
    scores = x.float().sigmoid()
    return scores.gather(1, (scores + torch.arange(16) * 0.1).topk(3, -1, sorted=False)[1])


@pytest.mark.slow
@pytest.mark.parametrize("run", [plain, scores_read_twice, weights_read_twice])
@pytest.mark.cases(1)
def test_what_else_reads_a_value_keeps_it(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(TOKENS, 16)
    out, after = rewritten(run, x)
    assert (after["best_experts"], after["topk"]) == (1, 0)
    torch.testing.assert_close(out, run(x))


def wide(x: torch.Tensor) -> torch.Tensor:
    """Scores of which float32 would make equal ones."""
    return (x.double() * 1e-12 + 1).topk(3, -1)[1]


@pytest.mark.slow
@pytest.mark.parametrize("run", [gathered, lambda x: x.topk(3, -1, False)[0], lambda x: x.t().topk(3, 0)[0], wide])
def test_other_choices_stay(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(TOKENS, 16)
    out, after = rewritten(run, x)
    assert (after["best_experts"], after["topk"]) == (0, 1)
    torch.testing.assert_close(out, run(x))


@interpreted
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 8, 1), (5, 130, 8), (3, 512, 10), (2, 700, 4)])
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("normalise", ["", SUM, SOFTMAX])
def test_the_kernel(tokens: int, experts: int, chosen: int, softmax: bool, normalise: str) -> None:
    from specdec.ops.mixtures.routed_kernel import launch_best_experts

    torch.manual_seed(experts)
    scores = torch.rand(tokens, experts) if normalise == SUM else torch.randn(tokens, experts)
    scores = (scores * 8).round() / 8  # with equal ones
    found = launch_best_experts(scores, chosen, softmax, normalise, torch.float32)
    right = best_experts(scores, chosen, softmax, normalise, torch.float32)
    assert torch.equal(found[1], right[1])
    torch.testing.assert_close(found[0], right[0], rtol=1e-5, atol=1e-7)


@interpreted
def test_scores_that_are_no_numbers() -> None:
    """NaN before all others, -inf after them, and never a place twice."""
    from specdec.ops.mixtures.routed_kernel import launch_best_experts

    scores = torch.tensor([[0.0, float("-inf"), float("nan"), -2.0, float("inf"), float("-inf")]])
    places = launch_best_experts(scores, 6, False, "", torch.float32)[1]
    assert places.tolist() == [[2, 4, 0, 3, 1, 5]]
