"""Folders of block-parallel heads: what is read, from which key, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import VOCAB, tiny_llama, wrap
from safetensors.torch import load_file, save_file

from drafters.base import FINAL_NORM
from drafters.families import FAMILIES, family_of
from specdec.errors import HeadLoadError, HeadMismatchError
from tests.block_heads import DFLASH, DFLASH2, DSPARK, SECOND, block_head, config_of, write_head

BOTH = {"dflash": DFLASH, "dspark": DSPARK}
KINDS = BOTH | {"dflash2": DFLASH2}


def loaded(folder: Path) -> Any:
    return wrap(tiny_llama(), str(folder)).head


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 3, "windowed_layers": (0, 2), "window": 7, "causal_layers": (0, 2)},
        {"qkv_bias": True, "o_bias": True, "aux_layers": (0, FINAL_NORM)},
        {"confidence": "outputs", "draft_vocab_size": 16, "own_lm_head": True},
        {"markov": "rnn", "markov_rank": 5},
    ],
    ids=["plain", "windows", "biases", "confidence", "rnn"],
)
def test_a_head_comes_back_as_it_was_written(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    head = block_head(tiny_llama(), BOTH[kind], **changes)
    more: dict[str, Any] = {}
    if kind == "dflash" and head.spec.markov:
        more = {"markov_rank": 5, "markov_head_type": "rnn", "sample_from_anchor": False}
    if kind == "dflash" and head.spec.confidence:
        more = {"enable_confidence_head": True}
    again = loaded(write_head(head, tmp_path, **more))
    assert again.spec == head.spec and again.aux_layers == head.aux_layers
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(again.target_ids, head.target_ids)


@pytest.mark.parametrize("changes", [{}, {"conv_kernel_size": 3, "conv_group_size": 1, "selector_top_k": 64}])
def test_convolutions_and_a_selector_come_back(changes: dict[str, Any], tmp_path: Path) -> None:
    """Codebooks may be named as parameters or as embeddings, the keys stand at the top or in the object."""
    head = block_head(tiny_llama(), DFLASH2, windowed_layers=(1,), window=7, causal_layers=(1,), **changes)
    folder = write_head(head, tmp_path / "a")
    nested = config_of(head)["dflash_config"]
    other = write_head(head, tmp_path / "b", **nested, dflash_config=None, use_cache=True)
    assert sum(name.endswith("codebook") for name in load_file(folder / "model.safetensors")) == 2
    damaged(other, lambda t: t.update({f"{name}.weight": t.pop(name) for name in [*t] if name.endswith("codebook")}))
    for path in (folder, other):
        again = loaded(path)
        assert again.spec == head.spec
        assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in head.state_dict().items())
        assert "DFlash2, z-lab layout" in str(again.checkpoint_report)


def test_keys_may_stand_in_an_object_or_at_the_top(tmp_path: Path) -> None:
    head = block_head(tiny_llama(), DFLASH)
    nested = config_of(head)["dflash_config"] | {"block_size": 6, "sample_from_anchor": False}
    top = write_head(head, tmp_path / "top", **nested, dflash_config=None, use_cache=True)
    inside = write_head(head, tmp_path / "inside", block_size=None, dflash_config=nested)
    assert loaded(top).spec == loaded(inside).spec == head.spec
    fields = {field.name: field.source for field in loaded(inside).checkpoint_report.fields}
    assert fields["block_size"] == "config dflash_config.block_size"
    assert fields["slots"] == "config dflash_config.sample_from_anchor"


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("kind", BOTH)
def test_the_flag_decides_what_a_slot_predicts_else_the_class(kind: str, flag: bool, tmp_path: Path) -> None:
    head = block_head(tiny_llama(), BOTH[kind])
    assert loaded(write_head(head, tmp_path)).spec.slots == head.spec.slots
    slots = loaded(write_head(head, tmp_path, sample_from_anchor=flag)).spec.slots
    assert slots == ("anchor-first" if flag else "fill-in")


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({"sliding_attention_causal": None}, (1,)),
        ({"sliding_attention_causal": False}, ()),
        ({"sliding_attention_causal": True}, (1,)),
        ({"is_causal": False}, ()),
        ({"is_causal": True}, (0, 1)),
    ],
)
def test_causality_is_read_for_each_layer(changes: dict[str, Any], causal: tuple[int, ...], tmp_path: Path) -> None:
    head = block_head(tiny_llama(), DFLASH, windowed_layers=(1,), window=4)
    specs = loaded(write_head(head, tmp_path, **changes)).attention_specs
    assert tuple(i for i, spec in enumerate(specs) if spec.causal) == causal
    assert [spec.window for spec in specs] == [None, 4]


OTHER_GROUP = {
    "mask_token_id": 5,
    "target_layer_ids": [0, 1, 2],
    **{key: DFLASH2[key] for key in SECOND},
    "conv_group_size": 8,
}
TEMPERATURES = "confidence_temperatures"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "DFlash2 without its sizes": ("dflash", {"architectures": ["DFlash2DraftModel"]}, "no conv_kernel_size"),
    "DFlash2 without its tensors": (
        "dflash",
        {"architectures": ["DFlash2DraftModel"], **{key: DFLASH2[key] for key in SECOND}},
        "missing: candidate_selector.hidden_projection.weight.*layers.1.mlp_conv.kernel_projection.weight",
    ),
    "sizes of DFlash2": (
        "dflash2",
        {"architectures": ["DFlashDraftModel"]},
        "not understood.*conv_group_size = 16",
    ),
    "tensors of DFlash2": (
        "dflash2",
        {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1, 2]},
        },
        r"unknown: candidate_selector.hidden_projection.weight.*layers.1.mlp_conv.base_kernel \[2, 2, 32\]",
    ),
    "another DFlash2": ("dflash2", {"architectures": ["Qwen3DFlash2DraftModel"]}, "of block-parallel heads DFlash"),
    "a selector and a Markov head": (
        "dflash2",
        {"markov_rank": 4, "sample_from_anchor": False},
        "checkpoint has no",
    ),
    "another group": (
        "dflash2",
        {"dflash_config": None, **OTHER_GROUP},
        "shape of layers.0.attention_conv",
    ),
    "a group of no size": (
        "dflash2",
        {"dflash_config": None, **OTHER_GROUP, "conv_group_size": 5},
        "divides",
    ),
    "another selector": (
        "dflash2",
        {"dflash_config": None, **OTHER_GROUP, "selector_rank": 7},
        "shape of candidate",
    ),
    "Laguna": ("dflash", {"architectures": ["LagunaDFlashModel"]}, "layout is Laguna's DFlash"),
    "JetSpec": ("dflash", {"architectures": ["JetSpecDraftModel"]}, "layout is JetSpec.*not supported: take"),
    "LiLiCorr": ("dflash", {"architectures": ["LiLiCorrDraftModel"]}, "layout is LiLiCorr"),
    "FlashMap": ("dflash", {"architectures": ["FlashMapDraftModel"]}, "layout is FlashMap"),
    "H-Spec": ("dflash", {"architectures": ["HSpecDraftModel"]}, "layout is H-Spec"),
    "EAGLE-4": ("dflash", {"architectures": ["Eagle4DraftModel"]}, "layout is EAGLE-4"),
    "Gemma's": ("dspark", {"architectures": ["Gemma4DSparkModel"]}, r"'Gemma4DSparkModel'\]: of block-parallel heads"),
    "no class": ("dflash", {"architectures": None}, "architectures = None: of block-parallel heads"),
    "other layers": ("dflash", {"model_type": "llama"}, "model_type = 'llama': block-parallel heads of Qwen3 layers"),
    "a Markov head of unknown slots": ("dflash", {"markov_rank": 4}, "set sample_from_anchor in config.json"),
    "a selector": ("dflash", {"selector_rank": 8}, "keys that are not understood.*selector_rank = 8"),
    "a convolution": ("dflash", {"conv_kernel_size": 2}, "not understood.*conv_kernel_size = 2"),
    "another shift": ("dflash", {"shift_label": True}, "not understood.*shift_label = True"),
    "quantised": ("dflash", {"quantization_config": {"bits": 4}}, "quantised block-parallel heads"),
    "another activation": ("dspark", {"hidden_act": "gelu"}, "activation silu, config.json says 'gelu'"),
    "half a rotation": ("dspark", {"partial_rotary_factor": 0.5}, "RoPE over a part of the head dimension"),
    "no states": ("dflash", {"use_aux_hidden_state": False}, "use_aux_hidden_state = False"),
    "two block sizes": ("dflash", {"dflash_config": {"block_size": 9}}, "contradicts itself: block_size = 6"),
    "no block size": ("dspark", {"block_size": None}, "no block_size"),
    "one slot": ("dflash", {"block_size": 1}, r"block_size=1: allowed are 2 … 256 slots \(fill-in\)"),
    "no mask": ("dspark", {"mask_token_id": None}, "no mask_token_id"),
    "a mask outside": ("dspark", {"mask_token_id": VOCAB}, f"mask_token_id={VOCAB}: allowed are the embedding's rows"),
    "layers out of order": ("dspark", {"target_layer_ids": [2, 1]}, "ascending numbers from -1 on"),
    "no layers": ("dspark", {"target_layer_ids": []}, "ascending numbers from -1 on"),
    "fewer layers": ("dspark", {"target_layer_ids": [0]}, r"shape of fc.weight: \[32, 96\] instead of \[32, 32\]"),
    "more decoder layers": ("dflash", {"num_hidden_layers": 3, "layer_types": None}, "missing: layers.2"),
    "fewer decoder layers": ("dflash", {"num_hidden_layers": 1, "layer_types": None}, "unknown: layers.1"),
    "a flag without biases": ("dflash", {"attention_bias": True}, "attention_bias = True, but the checkpoint has no"),
    "no Markov head": ("dspark", {"markov_rank": 0}, "markov_rank = 0, but the checkpoint has markov_head"),
    "another rank": ("dspark", {"markov_rank": 5}, r"shape of markov_head.markov_w1.weight"),
    "another Markov head": ("dspark", {"markov_head_type": "fir"}, "Markov head 'fir'.*vanilla, gated, rnn"),
    "a gate without weights": ("dspark", {"markov_head_type": "gated"}, "missing: markov_head.gate_proj"),
    "no confidence head": ("dspark", {"enable_confidence_head": True}, "has no confidence_head.proj.weight"),
    "temperatures of no head": (
        "dspark",
        {TEMPERATURES: [2.0] * 6},
        "allowed are 6 positive numbers .* confidence head",
    ),
    "no temperatures": ("dspark", {TEMPERATURES: 2.0}, "confidence_temperatures must be list, not 2.0"),
    "windows of no layer": ("dflash", {"layer_types": ["chunked_attention"] * 2}, "layer_types must be a list"),
    "a reduced vocabulary without lm_head": ("dflash", {"draft_vocab_size": 32}, "missing: lm_head.weight"),
    "a map that is missing": ("dspark", {"draft_vocab_size": 32}, "missing: d2t"),
    "text for a number": ("dspark", {"block_size": "6"}, "block_size must be int"),
}
MISMATCHED: dict[str, dict[str, Any]] = {
    "another width": {"target_hidden_size": 64},
    "another vocabulary": {"vocab_size": VOCAB + 1},
    "another number of layers": {"num_target_layers": 36},
    "a layer beyond": {"num_target_layers": None, "target_layer_ids": [0, 1, 4]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, changes, message = REFUSED[name]
    folder = write_head(block_head(tiny_llama(), KINDS[kind]), tmp_path, **changes)
    with pytest.raises(HeadLoadError, match=message):
        loaded(folder)


@pytest.mark.parametrize("given", [[2.0] * 5, [2.0] * 7, [1.0] * 5 + [0.0], [1.0] * 5 + [-1.0], ["1.0"] * 6, [2] * 6])
def test_temperatures_are_a_positive_number_for_each_slot(given: list[Any], tmp_path: Path) -> None:
    head = block_head(tiny_llama(), DSPARK, confidence="outputs")
    with pytest.raises(HeadLoadError, match=r"confidence_temperatures=\(.*allowed are 6 positive numbers .1.0, not 1."):
        loaded(write_head(head, tmp_path, confidence_temperatures=given))
    right = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    again = loaded(write_head(head, tmp_path, confidence_temperatures=right))
    assert again.spec == replace(head.spec, confidence_temperatures=tuple(right))


@pytest.mark.parametrize("name", MISMATCHED)
def test_a_head_of_another_target_is_refused(name: str, tmp_path: Path) -> None:
    folder = write_head(block_head(tiny_llama(), DSPARK), tmp_path, **MISMATCHED[name])
    with pytest.raises(HeadMismatchError, match=r"the head (was made for|reads layer)"):
        loaded(folder)


def damaged(folder: Path, change: Any) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("hidden_norm.weight"), "missing: hidden_norm.weight"),
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), "missing: layers.1.mlp.up_proj.weight"),
        (lambda t: t.update(extra=torch.zeros(2)), r"unknown: extra \[2\]"),
        (lambda t: t.update({"norm.weight": torch.zeros(31)}), "shape of norm.weight"),
        (lambda t: t["fc.weight"].fill_(float("nan")), "NaN or infinity.*fc.weight"),
        (lambda t: t.update({"layers.0.self_attn.g_proj.weight": torch.zeros(4, 4)}), "unknown: .*g_proj"),
    ],
)
def test_damaged_tensors_are_named(change: Any, message: str, tmp_path: Path) -> None:
    folder = write_head(block_head(tiny_llama(), DSPARK), tmp_path)
    with pytest.raises(HeadLoadError, match=message):
        loaded(damaged(folder, change))


@pytest.mark.parametrize("name", ["predecessor", "successor"])
def test_a_codebook_under_two_names_is_refused(name: str, tmp_path: Path) -> None:
    folder = write_head(block_head(tiny_llama(), DFLASH2), tmp_path)
    own = f"candidate_selector.{name}_codebook"
    damaged(folder, lambda t: t.update({f"{own}.weight": t[own] + 1}))
    with pytest.raises(HeadLoadError, match=rf"unknown: {own} \[64, 6\]"):
        loaded(folder)


def test_names_may_have_a_wrapper_in_front(tmp_path: Path) -> None:
    head = block_head(tiny_llama(), DFLASH)
    folder = write_head(head, tmp_path)
    tensors = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(loaded(folder).fc.weight, head.fc.weight)


def test_the_family_describes_a_head_without_its_target(tmp_path: Path) -> None:
    folder = write_head(block_head(tiny_llama(), DSPARK), tmp_path)
    family = family_of(folder)
    assert family is FAMILIES["block"] and family.code().target_of(folder) is None
    report = family.code().describe_head(str(folder), {})
    assert "DSpark, DeepSpec layout" in str(report) and "anchor-first" in str(report)
    assert "block-parallel" in str(family.code().not_exportable(folder))


def test_a_configuration_copied_from_a_target_is_reported(tmp_path: Path) -> None:
    """DeepSpec copies the target's whole configuration; what only targets have decides nothing."""
    folder = write_head(block_head(tiny_llama(), DSPARK), tmp_path, num_experts=8, moe_intermediate_size=3)
    report = str(loaded(folder).checkpoint_report)
    assert "keys of a target" in report and "num_experts = 8" in report


def test_the_mask_may_be_a_row_beyond_the_tokens_in_use(tmp_path: Path) -> None:
    head = block_head(tiny_llama(), DFLASH, mask_token_id=VOCAB - 1)
    assert json.loads((write_head(head, tmp_path) / "config.json").read_text())["dflash_config"]["mask_token_id"] == 63
    assert loaded(tmp_path).mask_token_id == VOCAB - 1
