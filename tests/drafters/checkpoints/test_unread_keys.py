"""No key of a head's config.json is ignored in silence: it is read, known to decide nothing, reported, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.base import TargetFacts
from drafters.checkpoints.config_fields import UNKNOWN
from drafters.eagle3.checkpoint import describe_eagle
from drafters.eagle3.overrides import Eagle3Overrides
from drafters.errors import HeadLoadError
from tests.head_layouts import LAYERS, Layout, specforge, speculators_llama, target

GEMMA = {"target_model_type": "gemma3_text", "additional_fc": False, "reuse_target_lm_head": True}
GPT_OSS = {"num_local_experts": 16, "experts_per_token": 4, "model_type": "gpt_oss"}
QWEN_VL = {"target_model_type": "qwen3_vl_moe", "pretraining_tp": 1, "max_window_layers": None}
MINICPM = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
DEEPSEEK = {"q_lora_rank": 1536, "n_routed_experts": 256, "topk_method": "noaux_tc", "routed_scaling_factor": 2.5}
MODELOPT = {
    "aux_loss_alpha": 0.001,
    "chunk_size_feed_forward": 0,
    "diversity_penalty": 0.0,
    "id2label": {"0": "LABEL_0"},
    "eagle_config": specforge().config["eagle_config"]
    | {"next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1},
}
"""Keys beside the usual ones. Source: SpecForge's configs/*.json, MiniCPM4's heads, ModelOpt's templates."""


@pytest.fixture
def facts() -> TargetFacts:
    model = target()
    return TargetFacts(32, 64, LAYERS, model.model.embed_tokens.weight, model.lm_head.weight)


def reported(folder: Path, facts: TargetFacts, layout: Layout, **config: Any) -> dict[str, Any]:
    """Fields of a head whose config.json has these keys more, by name."""
    return {field.name: field.value for field in describe_eagle(layout.write(folder, **config), facts).fields}


@pytest.mark.parametrize("keys", [GEMMA, GPT_OSS, QWEN_VL, MINICPM, DEEPSEEK, MODELOPT])
def test_published_keys_are_all_known(keys: dict[str, Any], tmp_path: Path, facts: TargetFacts) -> None:
    plain, more = reported(tmp_path, facts, specforge()), reported(tmp_path, facts, specforge(), **keys)
    assert UNKNOWN not in plain and UNKNOWN not in more
    assert {name: more[name] for name in plain} == plain  # and none of them changes the head
    told = more.get("keys of a target", "")
    assert all(f"{key} = " in told for key in {**MINICPM, **DEEPSEEK} if key in keys)


def test_keys_of_the_package_speculators_are_all_known(tmp_path: Path, facts: TargetFacts) -> None:
    assert UNKNOWN not in reported(tmp_path, facts, speculators_llama())
    layer = speculators_llama().config["transformer_layer_config"] | {"norm_of_norms": True}
    found = reported(tmp_path, facts, speculators_llama(), transformer_layer_config=layer)
    assert found[UNKNOWN] == "transformer_layer_config.norm_of_norms = True"


def test_an_unknown_key_is_reported_with_its_value(tmp_path: Path, facts: TargetFacts) -> None:
    nested = specforge().config["eagle_config"] | {"norm_after_fc": True, "something_off": False}
    found = reported(tmp_path, facts, specforge(), eagle_config=nested, residual_gate=[1.0] * 30)
    assert found[UNKNOWN] == "eagle_config.norm_after_fc = True, residual_gate = " + repr([1.0] * 30)[:37] + "…"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"eagle_config": {"layer_ids": [1, 3, 6]}},
            r"eagle_config\.layer_ids = \[1, 3, 6\]: whether these are layers",
        ),
        ({"eagle_config": None, "aux_hidden_state_layer_ids": [1, 4, 7]}, "aux_hidden_state_layer_ids.*not known"),
        ({"use_aux_hidden_state": False}, "contradicts itself about use_aux_hidden_state"),
        ({"additional_fc": True}, "additional_fc = True, which is not supported.*additional_fc=false"),
        ({"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"}, "activation silu, config.json says 'gelu_pyt"),
    ],
)
def test_keys_that_would_change_the_head_are_refused(
    config: dict[str, Any], words: str, tmp_path: Path, facts: TargetFacts
) -> None:
    folder = specforge().write(tmp_path, **config)
    with pytest.raises(HeadLoadError, match=words):
        describe_eagle(folder, facts)
    chosen = {"aux_layers": [1, 4, 7], "additional_fc": False, "use_aux_hidden_state": None, "hidden_activation": None}
    report = describe_eagle(folder, facts, Eagle3Overrides.of(chosen))
    assert {field.name: field.value for field in report.fields}["aux_layers"] == (1, 4, 7)


def test_an_lm_head_that_is_missing_and_not_the_targets(tmp_path: Path, facts: TargetFacts) -> None:
    layout = specforge()
    full = {name: t for name, t in layout.tensors.items() if name not in ("lm_head.weight", "d2t", "t2d")}
    shared = Layout(layout.config | {"draft_vocab_size": None}, full)
    assert reported(tmp_path / "a", facts, shared, reuse_target_lm_head=True)["own_lm_head"] is False
    with pytest.raises(HeadLoadError, match=r"reuse_target_lm_head = False, but the checkpoint has no lm_head\.weight"):
        reported(tmp_path / "b", facts, shared, reuse_target_lm_head=False)


def test_weights_are_not_needed_for_it(tmp_path: Path, facts: TargetFacts) -> None:
    assert isinstance(facts.embedding, torch.Tensor)
    assert reported(tmp_path, facts, specforge(), residual_gate=2)[UNKNOWN] == "residual_gate = 2"
