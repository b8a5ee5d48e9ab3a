"""Mixtures of experts in a form that CUDA graphs can hold: what transformers' own forms compute."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import experts_form
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, GptOssConfig, Qwen3MoeConfig
from transformers.integrations.moe import use_experts_implementation

from specdec.ops.fp8 import FP8
from specdec.ops.mixtures import PLAIN
from specdec.ops.mixtures import choice as experts
from specdec.ops.mixtures.choice import CAPTURABLE, MOST_GROUPED, MOST_PAIRS, mixtures, using_capturable_experts

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
}
LATENT: dict[str, Any] = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "v_head_dim": 8, "n_group": 1, "topk_group": 1}
CONFIGS = {
    "deepseek_v2": DeepseekV2Config(**COMMON, **LATENT, **ROUTED),
    "deepseek_v3": DeepseekV3Config(**COMMON, **LATENT, **ROUTED, first_k_dense_replace=1),
    "qwen3_moe": Qwen3MoeConfig(**COMMON, num_experts=4),
    "gpt_oss": GptOssConfig(**COMMON, num_local_experts=4, head_dim=8),
    "gelu": Qwen3MoeConfig(**COMMON, num_experts=4, hidden_act="gelu"),
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_paired_experts_compute_what_transformers_does(name: str) -> None:
    model = model_of(name)
    ids = torch.arange(9)[None]
    own = model(ids, use_cache=False).logits
    with using_capturable_experts(model):
        assert experts_form(model) == CAPTURABLE
        paired = model(ids, use_cache=False).logits
    assert experts_form(model) != CAPTURABLE
    assert float(own.std()) > 0.1
    torch.testing.assert_close(paired, own, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_the_comparison_can_fail() -> None:
    model = model_of("deepseek_v2")
    ids = torch.arange(9)[None]
    own = model(ids, use_cache=False).logits
    mixtures(model)[0].down_proj[1].mul_(1.1)
    with using_capturable_experts(model):
        assert float((model(ids, use_cache=False).logits - own).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("name", "pairs", "dtype", "form"),
    [
        ("qwen3_moe", 8, torch.bfloat16, "routed_experts"),
        ("qwen3_moe", MOST_GROUPED + 2, torch.bfloat16, "routed_experts"),
        ("qwen3_moe", MOST_GROUPED + 2, torch.float16, "routed_experts"),
        ("qwen3_moe", 8, torch.float32, "paired_experts"),
        ("gpt_oss", MOST_GROUPED, torch.bfloat16, "routed_experts"),
        ("gpt_oss", MOST_GROUPED + 2, torch.bfloat16, "grouped_mm"),
        ("gpt_oss", MOST_GROUPED + 2, torch.float16, "routed_experts"),
        ("gpt_oss", 8, torch.float32, "paired_experts"),
        ("gelu", MOST_PAIRS, torch.bfloat16, "paired_experts"),
        ("gelu", MOST_PAIRS + 2, torch.bfloat16, "grouped_mm"),
        ("gelu", MOST_PAIRS + 2, torch.float16, "paired_experts"),
    ],
)
@torch.inference_mode()
def test_each_mixture_runs_in_its_fastest_form(
    name: str, pairs: int, dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experts a token."""
    calls: list[str] = []

    def noted(form: str, result: Any) -> Any:
        return lambda *given: (calls.append(form), result(*given))[1]

    monkeypatch.setattr(
        experts, "paired_experts", noted("paired_experts", lambda module, x, i, *_: x.new_zeros(*i.shape, x.shape[1]))
    )
    monkeypatch.setattr(
        experts, "routed_experts", noted("routed_experts", lambda x, i, *_: x.new_zeros(*i.shape, x.shape[1]))
    )
    monkeypatch.setitem(experts.ALL_EXPERTS_FUNCTIONS, "grouped_mm", noted("grouped_mm", lambda _, hidden, *__: hidden))
    mixture = mixtures(model_of(name).to(dtype))[0]
    words = experts.form_in_words(mixture)
    assert ("grouped;" in words or words == "grouped") is (name != "gelu" and dtype != torch.float32)
    hidden = torch.zeros(pairs // 2, 32, dtype=dtype)
    index, weights = torch.zeros(pairs // 2, 2, dtype=torch.long), torch.ones(pairs // 2, 2, dtype=dtype)
    assert experts.capturable_experts(mixture, hidden, index, weights).shape == hidden.shape
    assert calls == [form]


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "qwen3_moe", "gpt_oss"])
@torch.inference_mode()
def test_swiglu_experts_compute_what_transformers_does(name: str) -> None:
    """In half precision, in which each product is rounded once, and the sum of a token's experts is not."""
    model = model_of(name).to(torch.bfloat16)
    for mixture in mixtures(model):
        count = mixture.down_proj.shape[0]
        hidden = torch.randn(40, 32).to(torch.bfloat16)
        index, weights = torch.rand(40, count).topk(2, -1).indices, torch.rand(40, 2).to(torch.bfloat16)
        assert experts.gating_of(mixture) is not None
        found = experts.own_form(mixture, hidden, index, weights)
        exact = experts.own_form(mixture.float(), hidden.float(), index, weights.float())
        mixture.to(torch.bfloat16)
        assert float((found.float() - exact).norm() / exact.norm()) < 8e-3


PARTS = set(inspect.signature(use_experts_implementation).parameters)


@pytest.mark.skipif("has_post_expert_norm" not in PARTS, reason="this transformers has no such mixtures")
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@torch.inference_mode()
def test_a_norm_after_the_experts_is_applied(dtype: torch.dtype, most: float) -> None:
    """As in Muse Spark: by transformers' own form of the same mixture."""
    mixture = mixtures(model_of("qwen3_moe"))[0].to(dtype)
    mixture.has_post_expert_norm, mixture.post_expert_norm = True, torch.nn.RMSNorm(32, dtype=dtype)
    hidden, index = torch.randn(9, 32).to(dtype), torch.rand(9, 4).topk(2, -1).indices
    weights = torch.rand(9, 2).to(dtype)
    found = experts.capturable_experts(mixture, hidden, index, weights).float()
    right = experts.ALL_EXPERTS_FUNCTIONS["batched_mm"](mixture, hidden, index, weights).float()
    assert float((found - right).norm() / right.norm()) < most
    mixture.has_post_expert_norm = False
    assert float((experts.capturable_experts(mixture, hidden, index, weights).float() - right).norm()) > 0.1


def test_mixtures_have_no_part_that_is_not_known_here() -> None:
    """A new one in transformers would be left out in rounds from graphs, and nowhere else."""
    known = {"experts_class", "experts_interface", "is_concatenated", "is_transposed", "has_bias", "has_gate"}
    assert not PARTS - known - {"has_post_expert_norm"}


@pytest.mark.slow
@torch.inference_mode()
def test_compiled_for_both_sides_of_the_limit() -> None:
    model = model_of("deepseek_v2").to(torch.bfloat16)
    mixture = mixtures(model)[0]
    compiled = torch.compile(mixture, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.compiler.reset()
    with using_capturable_experts(model):
        for tokens in (200, 8, 100, 30):
            hidden = torch.randn(tokens, 32).to(torch.bfloat16)
            index, weights = torch.randint(4, (tokens, 2)), torch.rand(tokens, 2)
            got, expected = compiled(hidden, index, weights), mixture(hidden, index, weights)
            torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_the_models_own_form_comes_back_after_an_error() -> None:
    model = model_of("qwen3_moe")
    before = experts_form(model)
    with pytest.raises(RuntimeError, match="inside"), using_capturable_experts(model):
        raise RuntimeError("inside")
    assert experts_form(model) == before


def test_a_model_without_experts_is_left_alone() -> None:
    layer = torch.nn.Linear(2, 2)
    assert mixtures(layer) == []
    with using_capturable_experts(layer):
        pass


@pytest.mark.parametrize(
    "other", [{}, {"swiglu_alpha": 1.7}, {"limit": 7.0}, {"gate_softcap": 5.0}, {"act_fn": torch.nn.GELU()}]
)
def test_mixtures_in_8_bits_that_are_plain_swiglu(other: dict[str, Any]) -> None:
    """Clamps, caps and other activations are left to the operators of the module itself."""
    names = {"act_fn": torch.nn.SiLU(), "swiglu_alpha": None, "limit": None, "gate_softcap": None, "has_gate": True}
    mixture = SimpleNamespace(**names | {"down_proj": torch.zeros(1, 8, 8, dtype=FP8)} | other)
    assert experts.gating_of(mixture) == (None if other else PLAIN)
