"""Modules whose blocks are named in the files as their targets are published, not as transformers names layers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from benchmarks.sweep_configs import named_cases
from benchmarks.sweep_models import build
from drafters.checkpoints.layouts import Layout
from drafters.errors import HeadLoadError
from drafters.families import FAMILIES, family_of
from drafters.mtp.checkpoint import describe_mtp, load_mtp
from drafters.mtp.spec import attention_of, mtp_target

DEEPSEEK = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "final_layernorm"}
QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
NAMES = {"hy_v3": DEEPSEEK, "bailing_hybrid": DEEPSEEK, "exaone_moe": QWEN, "axk1": DEEPSEEK}
"""By the target's type: names of what a module has beside its block."""
RENAMED = {
    "hy_v3": "mlp.router.gate.weight",
    "bailing_hybrid": "attention.dense.weight",
    "exaone_moe": "mlp.e_score_correction_bias",
    "axk1": "post_mlp_layernorm.weight",
}
"""A published name that is another in transformers."""


def with_module(kind: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tiny target saved under its published names, with its last layer copied as a module."""
    model: Any = build(named_cases((kind,))[0])
    model.save_pretrained(folder)
    weights, size, count = load_file(folder / "model.safetensors"), model.config.hidden_size, len(model.model.layers)
    layer = count - 1
    copied = {name.split(f"layers.{layer}.", 1)[1]: t for name, t in weights.items() if f".layers.{layer}." in name}
    assert RENAMED[kind] in copied
    start, block = ("mtp.", "mtp.layers.0.") if NAMES[kind] is QWEN else (f"model.layers.{count}.",) * 2
    module = {block + rest: tensor.clone() for rest, tensor in copied.items()}
    generator = torch.Generator().manual_seed(2)
    for ours, theirs in NAMES[kind].items():
        shape = (size, 2 * size) if ours == "eh_proj" else (size,)
        module[f"{start}{theirs}.weight"] = torch.randn(shape, generator=generator)
    save_file(weights | module, folder / "model.safetensors", metadata={"format": "pt"})
    return model, module


KINDS = [
    pytest.param(name, marks=pytest.mark.slow if name in ("axk1", "bailing_hybrid") else ())
    for name in NAMES
    if name in CONFIG_MAPPING_NAMES
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_is_a_layer_of_its_target(kind: str, tmp_path: Path) -> None:
    model, module = with_module(kind, tmp_path)
    (head,) = load_mtp(tmp_path, mtp_target(model), torch.float32, "cpu")
    own, blocks = model.model.layers[-1].state_dict(), head.blocks[0].state_dict()
    assert own.keys() == blocks.keys() and all(torch.equal(own[name], blocks[name]) for name in own)
    for ours, theirs in NAMES[kind].items():
        (stored,) = [
            t for name, t in module.items() if re.fullmatch(rf"(mtp|model\.layers\.\d)\.{theirs}\.weight", name)
        ]
        assert torch.equal(head.state_dict()[f"{ours}.weight"], stored)
    # K-EXAONE's module is built as layer 0, which has a window and rotary positions; the last layer has neither.
    window = 32 if kind == "exaone_moe" else None
    assert [spec.window for spec in head.attention_specs] == [window]
    fields = {field.name: field for field in describe_mtp(tmp_path, mtp_target(model)).fields}
    assert fields["attention"].value == ("full_attention" if window is None else "sliding_attention")


OTHERS = {
    "LongCat-Flash": ("model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.0.transformer_layer.mlp.up_proj.weight"),
    "MiMo-V2": ("model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.2.self_attn.q_proj.weight"),
    "Inkling": ("model.mtp.layers.0.transformer_block.attn.q.weight", "model.mtp.layers.0.embed_norm.weight"),
    "DeepSeek-V4": ("mtp.0.e_proj.weight", "mtp.0.h_proj.weight"),
    "Hunyuan V4": ("model.mtp_layers.0.enorm.weight", "model.mtp_layers.0.eh_proj.weight"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_are_named(kind: str, tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    case = tiny_case("mimo")
    others = {name: torch.zeros(2, 2) for name in OTHERS[kind]}
    folder = case.write(tmp_path, {**dict.fromkeys(case.tensors), **others})
    assert family_of(folder) is not FAMILIES["mtp"]
    with pytest.raises(HeadLoadError, match=f"of another kind.*{kind}.*is not supported.*{min(others)}"):
        load_mtp(folder, mtp_target(case.model), torch.float32, "cpu")
    assert kind in Layout.MTP_OTHER.value


def test_kinds_of_attention(tiny_case: Callable[..., Any]) -> None:
    config = copy.deepcopy(tiny_case("mimo").model.config)
    assert attention_of(config, 0) == ("full_attention", "default")
    config.mtp_layer_types = ["sliding_attention", "hybrid"]
    assert attention_of(config, 0) == ("sliding_attention", "config mtp_layer_types")
    with pytest.raises(HeadLoadError, match=r"module 1 has 'hybrid' \(config mtp_layer_types\)"):
        attention_of(config, 1)
