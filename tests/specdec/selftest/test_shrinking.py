"""Miniature configurations keep every kind of layer and option, and lower exactly the thresholds they are told to."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig, PreTrainedConfig

from specdec.selftest.shrinking import Threshold, miniature, thresholds


def test_every_kind_of_layer_is_kept_twice_one_of_each_first() -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=26)
    small = miniature(config, ["sliding_window"])
    assert small.layer_types == ["sliding_attention", "full_attention"] * 2
    assert small.num_hidden_layers == 4 and small.sliding_window == 20
    assert config.num_hidden_layers == 26 and config.sliding_window == 4096, "the model's own is left alone"


def test_thresholds_are_those_that_a_request_can_pass() -> None:
    config = AutoConfig.for_model("gpt_oss")
    names = [threshold.name for threshold in thresholds(config, 4096)]
    assert names == ["sliding_window"]
    assert Threshold("original_max_position_embeddings", 4096) in thresholds(config, 4097)
    assert thresholds(config, 128) == ()


def test_a_threshold_that_is_not_lowered_is_beyond_reach() -> None:
    config = AutoConfig.for_model("gpt_oss")
    assert miniature(config, []).sliding_window > 1000
    assert miniature(AutoConfig.for_model("mistral", sliding_window=7), ["sliding_window"]).sliding_window == 7
    assert miniature(AutoConfig.for_model("mistral", sliding_window=None), ["sliding_window"]).sliding_window is None


def test_groups_of_heads_and_experts_stay_what_they_are() -> None:
    def heads(q: int, kv: int) -> tuple[int, int]:
        small = miniature(AutoConfig.for_model("llama", num_attention_heads=q, num_key_value_heads=kv), [])
        return small.num_attention_heads, small.num_key_value_heads

    assert heads(32, 32) == (4, 4) and heads(32, 8) == (4, 2) and heads(32, 1) == (4, 1)
    deepseek = miniature(AutoConfig.for_model("deepseek_v3"), [])
    assert (deepseek.n_routed_experts, deepseek.n_group, deepseek.topk_group, deepseek.num_experts_per_tok) == (
        8,
        2,
        1,
        2,
    )
    assert (deepseek.first_k_dense_replace, deepseek.num_hidden_layers, deepseek.q_lora_rank) == (1, 2, 24)


@pytest.mark.parametrize(("low", "length"), [(["original_max_position_embeddings"], 20), ([], 4096)])
def test_longrope_changes_at_one_length_wherever_a_configuration_names_it(low: list[str], length: int) -> None:
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "original_max_position_embeddings": 4096}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    config = AutoConfig.for_model(
        "phi3", rope_parameters=rope, max_position_embeddings=131072, original_max_position_embeddings=4096
    )
    small = miniature(config, low)
    assert small.rope_parameters["original_max_position_embeddings"] == length
    assert small.original_max_position_embeddings == length
    assert len(small.rope_parameters["short_factor"]) == len(small.rope_parameters["long_factor"]) == 8


def test_a_rotary_embedding_that_changes_with_the_batch_stays_below_its_change() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 4096}
    config = AutoConfig.for_model("llama", rope_parameters=rope, max_position_embeddings=131072)
    small = miniature(config, ["original_max_position_embeddings"])
    assert small.rope_parameters["original_max_position_embeddings"] > 300


def test_layers_with_widths_of_their_own_keep_them_apart() -> None:
    small = miniature(AutoConfig.for_model("gemma4_text"), ["sliding_window"])
    assert widths(small) == [16, 32] * 2


def widths(config: PreTrainedConfig) -> list[int]:
    if hasattr(config, "per_layer_config"):
        return [layer.head_dim for layer in config.per_layer_config]
    return [config.global_head_dim if kind == "full_attention" else config.head_dim for kind in config.layer_types]


def test_quantised_weights_are_left_out() -> None:
    config = AutoConfig.for_model("llama")
    config.quantization_config = {"quant_method": "fp8"}
    assert "quantization_config" not in json.loads(miniature(config, []).to_json_string())
    assert config.quantization_config == {"quant_method": "fp8"}
