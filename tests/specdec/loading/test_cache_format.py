"""Calibrated KV scales of a checkpoint: read for an 8-bit cache, shown, refused where they contradict each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import random_prompts, table_head, wrap

from specdec import SamplingParams
from specdec.errors import InvalidInputError, ModelLoadError
from tests.quantised import add_tensors, compressed_tensors, need, own_model, plain_llama, settings

PROMPTS = random_prompts((7, 3, 11))
PAIRS = [(0.02, 0.01), (0.04, 0.02), (0.06, 0.03)]
FP8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
NAMES = {
    "ModelOpt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "older llm-compressor": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}


def scales(kind: str = "ModelOpt", pairs: list[tuple[float, float]] = PAIRS) -> dict[str, torch.Tensor]:
    """Tensors of the shapes that are published: 0-d or [1]."""
    shape = () if kind == "ModelOpt" else (1,)
    return {
        f"model.layers.{layer}.{name}": torch.full(shape, scale)
        for layer, pair in enumerate(pairs)
        for name, scale in zip(NAMES[kind], pair, strict=True)
    }


def modelopt(folder: Path, tensors: Mapping[str, torch.Tensor], algorithm: Any = "FP8") -> Path:
    """A folder of which ModelOpt quantised the KV cache alone."""
    plain_llama().save_pretrained(folder)
    add_tensors(folder, tensors)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": algorithm}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    return folder


def tokens(wrapped: Any) -> list[list[int]]:
    return [c.token_ids for c in wrapped.generate(PROMPTS, SamplingParams(max_new_tokens=16))]


def scales_of(wrapped: Any) -> list[tuple[float, float]]:
    return [(round(kv.key_scale, 6), round(kv.value_scale, 6)) for kv in wrapped.target.runner.layers]


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.thorough
def test_scales_of_the_checkpoint_are_used_and_shown(kind: str, tmp_path: Path) -> None:
    folder, model = modelopt(tmp_path, scales(kind)), plain_llama()
    with wrap(folder, kv_cache_dtype="fp8") as wrapped, wrap(folder) as unused:
        assert scales_of(wrapped) == PAIRS
        facts, idle = wrapped.describe(), unused.describe()
        said = tokens(wrapped)
    assert facts["kv_cache_scales"] == "calibrated, from the checkpoint (hf_quant_config.json, kv_cache_quant_algo)"
    assert idle["kv_cache_scales"].startswith("not used; the checkpoint has calibrated ones for 3 layers, 0.01 to 0.06")
    head = table_head(model, 0.1, aux_layers=(1, 2, 3))
    with wrap(folder, head, num_speculative_tokens=3, kv_cache_dtype="fp8", kv_cache_scales=PAIRS) as drafted:
        assert tokens(drafted) == said
    with wrap(model, kv_cache_dtype="fp8", kv_cache_scales=PAIRS) as given:
        assert tokens(given) == said and given.describe()["kv_cache_scales"] == "given"
    with wrap(model) as plain:
        assert plain.describe()["kv_cache_scales"] is None


@pytest.mark.long
def test_a_wrong_scale_in_the_file_shows(tmp_path: Path) -> None:
    """One that cuts values off, as if the tensor of another model stood there."""
    wrong = [PAIRS[0], (1e-7, 1e-7), PAIRS[2]]
    folder = modelopt(tmp_path, scales(pairs=wrong))
    with wrap(folder, kv_cache_dtype="fp8") as wrapped:
        cut = wrapped.self_test_error
    with wrap(plain_llama(), kv_cache_dtype="fp8", kv_cache_scales=PAIRS) as right:
        assert cut > 10 * right.self_test_error  # 0.225 and 0.014


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_cache_of_compressed_tensors_is_what_the_model_itself_computes_with(tmp_path: Path) -> None:
    need("compressed-tensors")
    try:
        compressed_tensors("W4A16", tmp_path, kv_cache=FP8_SCHEME)
    except AttributeError as error:  # with compressed-tensors 0.20 in transformers 5.24
        pytest.skip(f"compressed-tensors cannot save such a cache's scales with this transformers: {error}")
    model, said = own_model(tmp_path), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        said.append(out[0, len(prompt) :].tolist())
    head = table_head(model, 0.1, aux_layers=(1, 2, 3))
    for k in (0, 3):
        with wrap(tmp_path, head if k else None, num_speculative_tokens=k, kv_cache_dtype="fp8") as wrapped:
            assert scales_of(wrapped) == PAIRS
            assert "quantization_config, kv_cache_scheme" in wrapped.describe()["kv_cache_scales"]
            assert tokens(wrapped) == said
            error = wrapped.self_test_error
    assert error < 1e-4, "its own forward rounds keys and values as the cache does"


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in scales().items() if not key.endswith(name)}


CONTRADICTIONS: dict[str, tuple[dict[str, torch.Tensor], Any, str]] = {
    "none at all": ({}, "FP8", "says that its KV cache is fp8, but the checkpoint has no k_scale and v_scale"),
    "some layers": (without("layers.1.self_attn.k_proj.k_scale"), "FP8", r"some layers only: layers \[1\] of 3"),
    "keys alone": (without("v_scale"), "FP8", r"some layers only: layers \[0, 1, 2\] of 3 lack k_scale or v_scale"),
    "another format": (scales(), "NVFP4", "scales of its KV cache are for nvfp4, not for fp8"),
    "a zero": (scales() | {"model.layers.2.self_attn.v_proj.v_scale": torch.zeros(())}, "FP8", "v_scale is 0; a scale"),
    "one a head": (
        scales() | {"model.layers.2.self_attn.v_proj.v_scale": torch.ones(2)},
        "FP8",
        r"shape \[2\]; a scale of the KV cache must be one positive number a layer",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused(case: str, tmp_path: Path) -> None:
    tensors, algorithm, words = CONTRADICTIONS[case]
    folder = modelopt(tmp_path, tensors, algorithm)
    with pytest.raises(ModelLoadError, match=words):
        wrap(folder, kv_cache_dtype="fp8")


@pytest.mark.slow
def test_a_dynamic_scheme_has_no_scales(tmp_path: Path) -> None:
    plain_llama().save_pretrained(tmp_path)
    said = {"quant_method": "modelopt", "kv_cache_scheme": {**FP8_SCHEME, "dynamic": True, "strategy": "token"}}
    settings(tmp_path, quantization_config=said)
    with pytest.raises(ModelLoadError, match="KV cache is float8 by token, dynamic, for which there are no static"):
        wrap(tmp_path, kv_cache_dtype="fp8")
    with wrap(tmp_path, kv_cache_dtype="fp8", kv_cache_scales=PAIRS) as wrapped:
        assert scales_of(wrapped) == PAIRS


def test_other_scales_than_the_checkpoint_has_are_refused(tmp_path: Path) -> None:
    folder = modelopt(tmp_path, scales())
    other = [PAIRS[0], (0.05, 0.02), PAIRS[2]]
    with pytest.raises(InvalidInputError, match=r"says 0\.05:0\.02 for layer 1, and the checkpoint has 0\.04:0\.02"):
        wrap(folder, kv_cache_dtype="fp8", kv_cache_scales=other)
    with pytest.raises(InvalidInputError, match="of 2 layers were given; the model has 3"):
        wrap(folder, kv_cache_dtype="fp8", kv_cache_scales=PAIRS[:2])


@pytest.mark.slow
def test_scales_of_a_vision_tower_and_of_modules_are_not_the_targets(tmp_path: Path) -> None:
    stray = {
        "model.visual.layers.0.attn.k_scale": torch.tensor(9.0),
        "mtp.layers.0.self_attn.k_proj.k_scale": torch.tensor(9.0),
        "model.layers.3.self_attn.k_proj.k_scale": torch.tensor(9.0),  # a module after the last layer
    }
    with wrap(modelopt(tmp_path, scales() | stray), kv_cache_dtype="fp8") as wrapped:
        assert scales_of(wrapped) == PAIRS
