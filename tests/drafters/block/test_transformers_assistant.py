"""DFlash assistants of transformers (`generate(speculation_type="dflash")`): read here, and drafting what theirs do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import VOCAB, tiny_llama, wrap
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from drafters.families import FAMILIES, family_of
from specdec.selftest.twin import enlarge
from tests.drafters.block.test_packages import compared, loaded

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "block_size": 5,
    "mask_token_id": 7,
    "target_layer_ids": [0, 2],
}
NEAR, FULL = "sliding_attention", "full_attention"
KINDS: dict[str, dict[str, Any]] = {
    "full": {"layer_types": [FULL, FULL]},
    "windows": {"layer_types": [NEAR, FULL], "sliding_window": 4},
    "short windows": {"layer_types": [NEAR, NEAR], "sliding_window": 2, "block_size": 8, "target_layer_ids": [1]},
    "last state": {"layer_types": [FULL, NEAR], "sliding_window": 6, "target_layer_ids": [1, 3]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_planted", [False, True])
def test_drafts_are_those_of_transformers_own_model(
    kind: str, is_planted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the window of another exporter's class, causal, or ids counted as speculators counts them."""
    torch.manual_seed(0)
    own = {**SIZES, **KINDS[kind]}
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**own)).eval()
    with torch.no_grad():
        enlarge(model, 3)
    model.save_pretrained(tmp_path)
    if is_planted:
        text = (tmp_path / "config.json").read_text()
        ids = [i + 1 for i in own["target_layer_ids"] if i < 3]
        wrong = MuseGlimmerAssistantConfig(**{**own, "target_layer_ids": ids}, is_causal=True)
        assert "MuseGlimmerAssistantModel" in text
        wrong.architectures = ["MuseGlimmerAssistantModel"]
        if len(ids) == len(own["target_layer_ids"]):
            wrong.save_pretrained(tmp_path)
        else:
            (tmp_path / "config.json").write_text(text.replace("{", '{"is_causal": true,', 1))
    assert family_of(tmp_path) is FAMILIES["block"]
    target, wrapped = tiny_llama(), loaded(str(tmp_path), own["block_size"])
    assert wrapped.num_speculative_tokens == own["block_size"] - 1 and wrapped.head.spec.vocab_size == VOCAB

    def theirs(ids: torch.Tensor, states: list[torch.Tensor]) -> list[int]:
        noise = torch.full((1, own["block_size"]), 7)
        noise[0, 0] = ids[0, -1]
        context = torch.cat([states[i + 1] for i in own["target_layer_ids"]], -1)
        cache = DFlashCache(config=model.config)
        cache.set_previous_accepted_tokens(ids.shape[1] - 1)
        noise_embeds = target.get_input_embeddings()(noise)
        hidden = model(noise_embeds, context_hidden_states=context, cache=cache).last_hidden_state
        return target.lm_head(hidden[:, 1:])[0].argmax(-1).tolist()

    pairs = compared(wrapped, theirs)
    assert ([a for a, _ in pairs] == [b for _, b in pairs]) == (not is_planted)


def test_a_head_without_a_vocabulary_takes_the_targets(tmp_path: Path) -> None:
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**SIZES, "layer_types": [FULL, FULL]}))
    model.save_pretrained(tmp_path)
    report = str(wrap(tiny_llama(), str(tmp_path)).head.checkpoint_report)
    assert "DFlash, transformers layout" in report and "unknown keys" not in report
