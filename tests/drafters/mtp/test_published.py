"""Checkpoints as they are published: a text model and its module inside one of a model that sees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer
from safetensors.torch import load_file, save_file

from specdec import SpeculativeModel
from tests.drafters.test_recurrent_targets import through_engine


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.long)])
@torch.inference_mode()
@pytest.mark.thorough
def test_the_text_part_of_qwen3_5(name: str, tiny_case: Callable[..., Any], tmp_path: Path) -> None:
    """The text model's fields in text_config, its tensors under model.language_model, `mtp.*` beside."""
    tiny_case(name, context=0.02).write(tmp_path)
    inner = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "text_config": inner}))
    stored = load_file(tmp_path / "model.safetensors")
    named = {n.replace("model.", "model.language_model.", n.startswith("model.")): t for n, t in stored.items()}
    assert "mtp.fc.weight" in named and "model.language_model.embed_tokens.weight" in named
    save_file(named | {"model.visual.patch_embed.proj.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    through_engine(
        SpeculativeModel.from_pretrained(
            tmp_path, "mtp", tokenizer=LetterTokenizer(), num_speculative_tokens=2, max_num_seqs=3
        )
    )
