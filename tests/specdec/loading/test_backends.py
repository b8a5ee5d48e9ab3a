"""Kernels begin to be built from a configuration alone: the same ones that the model's layers ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from attention.backends.flashinfer.wrapper import kernel_name
from attention.hf.probe import probe
from specdec.loading.backends import expected_keys

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), LlamaConfig(**SIZES, head_dim=128), Qwen3Config(**SIZES), Gemma2Config(**SIZES)],
    ids=lambda config: config.model_type,
)
def test_the_same_as_the_model_asks_for(config: Any) -> None:
    """Layers beside it may ask for more; every one that is expected is needed."""
    asked = {call.attention_spec for call in probe(AutoModelForCausalLM.from_config(config).eval()).calls}
    bf16 = torch.bfloat16
    names = {kernel_name(bf16, key, bf16, "fa2") for key in asked}
    assert {kernel_name(bf16, key, bf16, "fa2") for key in expected_keys(config)} == names


def test_what_a_configuration_does_not_say_plainly_is_left_to_the_model() -> None:
    assert expected_keys(MistralConfig(**SIZES, sliding_window=16)) == []
    assert expected_keys(GptOssConfig()) == []
    gemma4 = AutoConfig.for_model("gemma4_text")  # from transformers 5.2x on its head_dim cannot be read
    assert expected_keys(gemma4) == [] or not getattr(gemma4, "is_heterogeneous", False)
    (latent,) = expected_keys(DeepseekV2Config())
    assert latent.value_in_key
