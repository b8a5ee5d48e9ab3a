"""Configurations as they are published: the spec that they are read as, and the number of tensors it asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafters.base import TargetFacts
from drafters.block.formats import resolve_block
from drafters.block.head import BlockParallelHead
from drafters.errors import HeadLoadError

FULL = "full_attention"
QWEN3_8B: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": [FULL] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
IDS = [1, 9, 17, 25, 33]
ZLAB = {
    **QWEN3_8B,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": IDS},
}
DEEPSPEC = {
    **QWEN3_8B,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "mask_token_id": 151669,
    "target_layer_ids": IDS,
    "num_anchors": 512,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
SELECTING = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
ZLAB2 = {
    **QWEN3_8B,
    "architectures": ["DFlash2DraftModel"],
    "block_size": 8,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": IDS, **SELECTING},
}
MARKOV = ["markov_head.markov_w1.weight", "confidence_head.proj.weight"]
OWN = ["embed_tokens.weight", "lm_head.weight"]


def resolved(config: dict[str, Any], *more: str) -> Any:
    """The spec by a configuration and the names that decide."""
    zeros = torch.zeros(1, 1, device="meta").expand(151936, 4096)
    names = ["layers.0.self_attn.q_norm.weight", *more]
    return resolve_block(config, dict.fromkeys(names, (1,)), TargetFacts(4096, 151936, 36, zeros, zeros))[0]


def tensors(spec: Any) -> int:
    zeros = torch.zeros(1, 1, device="meta").expand(151936, 4096)
    return len(BlockParallelHead(spec, zeros, zeros, device=torch.device("meta")).state_dict())


def test_z_labs_head_of_qwen3_8b() -> None:
    """58 tensors are in the published file (ggml-org/llama.cpp issue 25792)."""
    spec = resolved(ZLAB)
    assert (spec.block_size, spec.first_slot, spec.aux_layers) == (16, 1, (2, 10, 18, 26, 34))
    assert spec.causal_layers == () and spec.rope.theta == 1e6 and not spec.own_embed
    assert tensors(spec) == 58


def test_z_labs_dflash2() -> None:
    """81 tensors are in the published file, of these sizes (ggml-org/llama.cpp issue 27342)."""
    spec = resolved(ZLAB2)
    assert (spec.block_size, spec.first_slot, spec.window, spec.causal_layers) == (8, 1, 2048, ())
    assert (spec.conv_kernel_size, spec.conv_group_size, spec.selector_rank, spec.selector_top_k) == (2, 16, 256, 16)
    assert tensors(spec) == 58 + 5 * 4 + 3
    assert resolved({**ZLAB2, "is_causal": None}).causal_layers == (0, 1, 2, 3, 4), "as the class has it"


def test_deepspecs_heads_of_qwen3_8b() -> None:
    spec = resolved(DEEPSPEC, *MARKOV, *OWN)
    assert (spec.block_size, spec.first_slot, spec.markov, spec.markov_rank) == (7, 0, "vanilla", 256)
    assert spec.confidence == "outputs and tokens" and spec.own_embed and spec.own_lm_head
    assert tensors(spec) == 58 + 2 + 2 + 2
    plain = DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": False}
    assert tensors(resolved(plain, *OWN)) == 60


@pytest.mark.parametrize("name", ["DSparkDraftModel", "DFlashDraftModel"])
@pytest.mark.parametrize("flag", [True, False])
def test_specforges_dspark_has_the_keys_of_deepspec_in_an_object(name: str, flag: bool) -> None:
    """What a slot predicts is no part of them."""
    keys = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    own = {key: DEEPSPEC[key] for key in keys} | {"projector_type": "dspark", "sample_from_anchor": flag}
    config = ZLAB | {"architectures": [name], "block_size": 7, "dflash_config": ZLAB["dflash_config"] | own}
    right = resolved(DEEPSPEC | {"sample_from_anchor": flag}, *MARKOV)
    assert resolved(config, *MARKOV) == right and right.markov_rank == 256


def test_layers_that_are_not_named_are_spread_evenly() -> None:
    config = ZLAB | {"dflash_config": {"mask_token_id": 151669}}
    assert resolved(config).aux_layers == (2, 10, 18, 26, 34)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "SpecForge's DSpark without the flag": (
        {"architectures": ["DSparkDraftModel"], "dflash_config": {**ZLAB["dflash_config"], "projector_type": "dspark"}},
        "DSpark, SpecForge .*slot 0 predicts a token is not known of it; set sample_from_anchor in config.json, true",
    ),
    "Domino": (
        {"emb_dim": 256, "dflash_config": {**ZLAB["dflash_config"], "projector_type": "domino", "shift_label": True}},
        r"not understood.*emb_dim = 256, projector_type = 'domino', shift_label = True",
    ),
    "a template": ({"dflash_config": {"mask_token_id": None, "target_layer_ids": IDS}}, "no mask_token_id"),
    "a window of no layer": ({"layer_types": None, "use_sliding_window": True, "sliding_window": 4096}, "which layers"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_heads_are_refused_by_what_is_odd_about_them(name: str) -> None:
    changes, message = OTHERS[name]
    with pytest.raises(HeadLoadError, match=message):
        resolved(ZLAB | changes)
