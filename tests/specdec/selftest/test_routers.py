"""Near ties of routers do not fail the self-test in half precision, and what is wrong beside them is still seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fakes import TINY, tiny_llama, wrap
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attention.backends.reference import TorchBackend
from specdec.errors import UnsupportedModelError
from specdec.selftest import selftest
from specdec.selftest.routers import Routed, RoutedReader, has_mixtures
from specdec.selftest.selftest import self_test
from tests.hybrids import tiny_hybrid

Wrong = Callable[[torch.Tensor, Any], torch.Tensor]
MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 16,
        "num_hidden_layers": 12,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 16},
}


def mixture(kind: str, **sizes: int) -> PreTrainedModel:
    """With random weights so large that attention decides what experts read."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**TINY, "hidden_size": 64, **MIXTURES[kind], **sizes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.0 if "embed" in name else 1.5 / weight.shape[-1] ** 0.5)
    return model


@pytest.fixture(scope="module", params=MIXTURES)
def target(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Many layers in bfloat16: most tokens have a near tie somewhere."""
    with wrap(mixture(request.param).to(torch.bfloat16), max_model_len=64) as wrapped:
        yield wrapped.target


@pytest.mark.slow
@pytest.mark.thorough
def test_near_ties_of_routers_do_not_fail_it(target: Any) -> None:
    assert self_test(target) < 0.1
    with (
        patch.object(selftest, "has_mixtures", lambda model: False),
        pytest.raises(UnsupportedModelError, match=r"relative logit error \S+ against its own eager forward \(allowed"),
    ):
        self_test(target)


def verification(output: torch.Tensor, metadata: Any) -> torch.Tensor:
    return output if metadata.host.num_computed_tokens.sum() == 0 else output.flip(0)


def second_row(output: torch.Tensor, metadata: Any) -> torch.Tensor:
    ends = metadata.host.query_start_loc.tolist()
    output[ends[1] : ends[min(2, len(ends) - 1)]] = 0
    return output


def row_alone(output: torch.Tensor, metadata: Any) -> torch.Tensor:
    return output.flip(0) if metadata.host.num_reqs == 1 else output


def weaker(output: torch.Tensor, metadata: Any) -> torch.Tensor:
    return output * 0.9


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [verification, second_row, row_alone, weaker])
@pytest.mark.thorough
def test_what_is_wrong_is_seen_beside_near_ties(target: Any, wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TorchBackend.run

    def run(self: Any, plan: Any, key: Any, query: Any, k: Any, v: Any, kv: Any, metadata: Any, *more: Any) -> Any:
        return wrong(real(self, plan, key, query, k, v, kv, metadata, *more), metadata)

    monkeypatch.setattr(TorchBackend, "run", run)
    with pytest.raises(UnsupportedModelError, match=r"same choices of experts|others than in its own eager forward"):
        self_test(target)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_router_that_depends_on_the_batch_is_seen(target: Any) -> None:
    """In batches of several rows it chooses other experts than alone: all else is equal, given its choices."""
    experts = next(m for name, m in target.hf_model.named_modules() if name.endswith(".mlp.experts"))

    def other(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        states, index, weights = inputs
        most = len(next(iter(module.parameters())))
        return (states, (index + 1) % most, weights) if len(states) in (35, 12) else inputs

    hook = experts.register_forward_pre_hook(other, prepend=True)  # the reader's own hooks come after it
    try:
        with pytest.raises(UnsupportedModelError, match=r"mixture 1 of \d+ is given, \d+% are others than"):
            self_test(target)
    finally:
        hook.remove()


@torch.no_grad()
def test_only_tokens_with_another_choice_are_given_it() -> None:
    model, ids, reader = mixture("mixtral", num_hidden_layers=2), torch.arange(6), RoutedReader()
    with reader.reading(model, np.array([0]), np.array([6])):
        plain = model(input_ids=ids[None], use_cache=False).logits[0]
    first, second = reader.rows[0]
    index, weights = first.experts.clone(), first.weights.clone()
    index[3, -1] = next(expert for expert in range(8) if expert not in index[3])
    index[2], weights[2] = index[2].flip(0), weights[2].flip(0)  # the same experts in another order: the same choice
    weights[4, 0] += 0.5  # a factor that jumps, as Phi-MoE's do
    reader.rows[0] = [Routed(first.states, index, weights), second]
    logits, (own, _) = reader.read_eager(model, 0, ids)
    assert torch.allclose(logits[:3], plain[:3], atol=1e-5) and not torch.allclose(logits[3], plain[3], atol=1e-2)
    assert torch.equal(own.experts, first.experts)  # what the router itself chose
    assert reader.rows[0][0].moved(own).nonzero().tolist() == [[3, 1], [4, 0]]


@pytest.mark.slow
def test_a_recurrent_mixture_is_compared_so_too() -> None:
    """Its rejected drafts are read and then other tokens in their places: the last reading counts."""
    refused = pytest.raises(UnsupportedModelError, match=r"error [0-9.]+e-0[67] .* same choices of experts")
    nothing_passes = patch.object(selftest, "_limit", lambda target, error: -1.0)
    with wrap(tiny_hybrid("qwen3_next"), max_model_len=64) as wrapped, nothing_passes, refused:
        assert has_mixtures(wrapped.target.hf_model)
        self_test(wrapped.target)


@pytest.mark.slow
@pytest.mark.cases(1)
def test_ranks_read_on_together(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right here by the first reading is read again where another rank's is not: it would wait for this one."""
    monkeypatch.setattr(selftest, "_limit", lambda target, error: 1.0)
    asked: list[list[int]] = []

    def least(values: list[int]) -> list[int]:
        asked.append(values)
        return [0] if len(asked) == 1 else values

    monkeypatch.setattr(target, "group", SimpleNamespace(least=least))
    assert self_test(target) < 0.1  # the error given the same choices, not the one of the first reading
    assert asked == [[1], [1]]


def test_a_model_without_experts_has_no_mixtures() -> None:
    assert not has_mixtures(tiny_llama()) and has_mixtures(mixture("mixtral", num_hidden_layers=1))
