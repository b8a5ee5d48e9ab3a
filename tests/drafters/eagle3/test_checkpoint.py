"""EAGLE-3 checkpoints: what is written is read back, every layout trap is resolved or refused, never guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import eagle3_spec
from safetensors.torch import load_file, save_file

from attention.errors import InvalidInputError
from drafters.base import FINAL_NORM, TargetFacts
from drafters.eagle3.checkpoint import describe_eagle, load_eagle, save_eagle3
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.overrides import Eagle3Overrides
from drafters.eagle3.spec import Eagle3Spec
from drafters.errors import HeadLoadError, HeadMismatchError
from drafters.rope import RopeSpec
from drafters.vocab import most_frequent

SPEC = eagle3_spec(aux_layers=(2, 4, 5))
YARN = RopeSpec(theta=5e5, kind="yarn", max_positions=64, scaling=(("factor", 4.0), ("truncate", False)))
FULL = replace(
    SPEC,
    rope=YARN,
    fc_bias=True,
    input_norm=True,
    fc_norm=True,
    norm_before_residual=True,
    feedback="post_norm",
    qkv_bias=True,
    qk_norm=True,
    own_embed=True,
    target_hidden_size=24,
    num_layers=2,
    aux_layers=(0, 3, 8),
)
Tensors = dict[str, torch.Tensor]
Edit = Callable[[dict[str, Any], Tensors], None]


def facts(hidden_size: int = 16, vocab_size: int = 40) -> TargetFacts:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(vocab_size, hidden_size, generator=generator)
    return TargetFacts(hidden_size, vocab_size, num_layers=8, embedding=weight, lm_head=weight)


def make_head(spec: Eagle3Spec = SPEC) -> Eagle3Head:
    torch.manual_seed(0)
    d2t = most_frequent(torch.randint(0, 9, (spec.vocab_size,)), spec.draft_vocab_size)
    target = facts(spec.target_hidden_size)
    head = Eagle3Head(spec, target.embedding, None if spec.own_lm_head else target.lm_head, d2t)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


def load(folder: Path, target: TargetFacts | None = None, **choices: Any) -> Eagle3Head:
    return load_eagle(folder, target or facts(), torch.float32, "cpu", Eagle3Overrides(**choices))


def edit(folder: Path, change: Edit) -> Path:
    """Change config.json and tensors of a saved head in place."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def safeailab(folder: Path) -> Path:
    """Rewrite a saved head the way the original repository publishes it: a pickle and a short config."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    config = json.loads((folder / "config.json").read_text())
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    short = {key: config[key] for key in (*keys, "vocab_size", "draft_vocab_size", "hidden_act")}
    (folder / "config.json").write_text(json.dumps(short | {"architectures": ["LlamaForCausalLM"]}))
    return folder


@pytest.mark.parametrize("spec", [SPEC, FULL, replace(SPEC, own_lm_head=False, draft_vocab_size=40)])
def test_saved_heads_are_read_back(spec: Eagle3Spec, tmp_path: Path) -> None:
    head = make_head(spec)
    again = load(save_eagle3(head, tmp_path), facts(spec.target_hidden_size))
    assert again.spec == spec
    assert again.target_ids.tolist() == head.target_ids.tolist()
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in head.state_dict().items())


def test_targets_tensors_are_shared_and_never_saved(tmp_path: Path) -> None:
    save_eagle3(make_head(), tmp_path)
    assert not any("embed" in name or "target" in name for name in load_file(tmp_path / "model.safetensors"))
    target = facts()
    head = load(tmp_path, target)
    assert head.target_embedding is not None and head.target_embedding.data_ptr() == target.embedding.data_ptr()
    assert not any(parameter.requires_grad for parameter in head.parameters())


def test_dtype_is_cast_once_and_maps_stay_integers(tmp_path: Path) -> None:
    save_eagle3(make_head(), tmp_path, torch.float16)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.float16
    assert stored["d2t"].dtype == torch.int64 and stored["t2d"].dtype == torch.bool
    head = load_eagle(tmp_path, facts(), torch.bfloat16, "cpu")
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert head.target_ids.dtype == torch.int64 and head.rotary.frequencies.dtype == torch.float32


def test_safeailab_layout_uses_its_defaults_not_the_targets(tmp_path: Path) -> None:
    head = make_head()
    again = load(safeailab(save_eagle3(head, tmp_path)))
    assert again.spec == SPEC  # aux layers 2, N//2, N-3; rope_theta 10000; pre-norm feedback
    assert torch.equal(again.fc.weight, head.fc.weight)
    report = describe_eagle(tmp_path, facts())
    assert report.layout == "EAGLE-3, SafeAILab layout"
    sources = {field.name: field.source for field in report.fields}
    assert sources["aux_layers"] == "default 2, N//2, N-3"
    assert sources["rope"] == "theta: default; type: default"


@pytest.mark.parametrize("prefix", ["model.", "draft_model.", "module.model."])
def test_other_names_of_the_same_tensors(prefix: str, tmp_path: Path) -> None:
    head = make_head()

    def rename(config: dict[str, Any], tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[prefix + name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    again = load(edit(save_eagle3(head, tmp_path), rename))
    assert torch.equal(again.midlayer.mlp.up_proj.weight, head.midlayer.mlp.up_proj.weight)


def test_an_index_of_several_files(tmp_path: Path) -> None:
    head = make_head()
    tensors = load_file(save_eagle3(head, tmp_path) / "model.safetensors")
    names = sorted(tensors)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load(tmp_path).norm.weight, head.norm.weight)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(HeadLoadError, match=r"part-1\.safetensors"):
        load(tmp_path)


def nested(ids: list[int]) -> Edit:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        del config["eagle_aux_hidden_state_layer_ids"]
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids

    return change


def top_level(config: dict[str, Any], tensors: Tensors) -> None:
    del config["eagle_config"]
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 8]


@pytest.mark.parametrize(
    ("change", "aux_layers"), [(nested([1, 3, 6]), (2, 4, 7)), (nested([2, 5, 8]), (2, 5, 8)), (top_level, (1, 3, 8))]
)
def test_layer_ids_become_boundaries(change: Edit, aux_layers: tuple[int, ...], tmp_path: Path) -> None:
    assert load(edit(save_eagle3(make_head(), tmp_path), change)).aux_layers == aux_layers


def test_users_choices_win_and_are_reported(tmp_path: Path) -> None:
    save_eagle3(make_head(), tmp_path)
    head = load(tmp_path, aux_layers=(1, 2, 3), feedback="post_norm")
    assert head.aux_layers == (1, 2, 3) and head.spec.feedback == "post_norm"
    text = str(describe_eagle(tmp_path, facts(), Eagle3Overrides(aux_layers=(1, 2, 3))))
    assert "(1, 2, 3)" in text and "chosen by the user" in text


def test_a_head_on_the_last_state_has_no_fc(tmp_path: Path) -> None:
    head = load(save_eagle3(make_head(replace(SPEC, aux_layers=(FINAL_NORM,))), tmp_path))
    assert head.aux_layers == (FINAL_NORM,) and not hasattr(head, "fc")


def test_report_names_every_field_of_the_spec(tmp_path: Path) -> None:
    report = describe_eagle(save_eagle3(make_head(), tmp_path), facts())
    assert {field.name for field in report.fields} == set(SPEC.__dataclass_fields__)
    assert report.num_parameters == sum(p.numel() for p in make_head().parameters())
    assert "fc.bias absent" in str(report)


def set_config(**values: Any) -> Edit:
    return lambda config, tensors: config.update(values)


def drop(name: str) -> Edit:
    return lambda config, tensors: tensors.__delitem__(name)


def add(name: str, *shape: int) -> Edit:
    return lambda config, tensors: tensors.update({name: torch.zeros(shape)})


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda config, tensors: tensors.update({name: change(tensors[name])})


def poison(weight: torch.Tensor) -> torch.Tensor:
    return weight.index_fill(0, torch.tensor([1]), float("nan"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("norm.weight"), r"missing: norm\.weight \[16\]"),
        (drop("lm_head.weight"), "missing: lm_head"),
        (drop("d2t"), "missing: d2t"),
        (add("midlayer.self_attn.k_proj.bias", 16), r"unknown: midlayer\.self_attn\.k_proj\.bias"),
        (put("fc.weight", lambda w: w[:, :32].clone()), r"shape of fc\.weight: \[16, 32\] instead of \[16, 48\]"),
        (add("model.norm.weight", 16), "two prefixes"),
        (put("norm.weight", poison), r"NaN or infinity.*norm\.weight"),
        (put("d2t", lambda d: d + torch.arange(len(d))), "absolute target ids"),
        (put("t2d", lambda t: ~t), "same tokens"),
        (set_config(bias=True), r"bias = True.*no fc\.bias"),
        (add("fc.bias", 16), r"bias = False.*has fc\.bias"),
        (set_config(norm_before_fc=True), "norm_before_fc"),
        (set_config(fc_norm=True), "fc_norm"),
        (set_config(attention_bias=True), "attention_bias"),
        (set_config(head_dim=8), "shape of midlayer"),
        (set_config(num_aux_hidden_states=2), "num_aux_hidden_states"),
        (set_config(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), "different aux layers"),
        (set_config(eagle_aux_hidden_state_layer_ids="2,4,5"), "list of layer numbers"),
        (nested([4, 2, 1]), "ascending"),
        (set_config(eagle_config={"use_aux_hidden_state": False}), r"unknown: fc\.weight|num_aux"),
        (set_config(rope_theta=5e5), "rope_theta"),
        (set_config(rope_scaling={"type": "linear", "factor": 2.0}), "contradicts itself about RoPE"),
        (set_config(rope_scaling={"type": "longrope", "factor": 2.0}), "longrope"),
        (set_config(partial_rotary_factor=0.5), "part of the head"),
        (set_config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), "part of the head"),
        (set_config(hidden_act="gelu"), "gelu"),
        (set_config(quantization_config={"quant_method": "fp8"}), "quantised"),
        (set_config(layer_types=["sliding_attention"]), "no sliding_window"),
        (set_config(hidden_size="16"), "hidden_size must be int"),
        (set_config(hidden_size=None), "no hidden_size"),
    ],
)
def test_contradictions_are_refused(change: Edit, message: str, tmp_path: Path) -> None:
    folder = edit(save_eagle3(make_head(), tmp_path), change)
    with pytest.raises(HeadLoadError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (facts(hidden_size=32), "hidden size 16, this target has 32"),
        (facts(vocab_size=50), "vocabulary of 40 tokens, this target has 50"),
        (replace(facts(), num_layers=3), "3 layers"),
    ],
)
def test_heads_of_other_targets(target: TargetFacts, message: str, tmp_path: Path) -> None:
    save_eagle3(make_head(), tmp_path)
    with pytest.raises(HeadMismatchError, match=message):
        load(tmp_path, target)


def test_a_padded_target_vocabulary_fits(tmp_path: Path) -> None:
    save_eagle3(make_head(), tmp_path)
    padded = torch.randn(48, 16)
    target = TargetFacts(16, 40, 8, padded, padded)
    embedding = load(tmp_path, target).target_embedding
    assert embedding is not None and embedding.shape == (40, 16) and embedding.data_ptr() == padded.data_ptr()


OTHER_LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "speculators of type 'eagle'": (
        {"speculators_model_type": "eagle"},
        {"layers.0.self_attn.q_proj.weight": (4, 8)},
    ),
    "P-EAGLE": ({}, {"mask_hidden": (1, 4)}),
    "DFlash": ({"dflash_config": {}}, {}),
    "multi-head latent": ({}, {"midlayer.self_attn.kv_a_proj_with_mqa.weight": (4, 8)}),
    "Qwen-style MTP": ({}, {"mtp.fc.weight": (4, 8)}),
    "DeepSeek-style MTP": ({}, {"model.layers.61.eh_proj.weight": (4, 8)}),
    "MiMo-style MTP": ({}, {"model.mtp_layers.0.input_proj.weight": (4, 8)}),
    "Ernie-style MTP": ({}, {"model.mtp_linear_proj.0.weight": (4, 8)}),
    "first tensors are wte.weight": ({}, {"wte.weight": (4, 8)}),
}


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_other_layouts_are_named(name: str, tmp_path: Path) -> None:
    config, shapes = OTHER_LAYOUTS[name]
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4} | config))
    save_file({tensor: torch.zeros(shape) for tensor, shape in shapes.items()}, tmp_path / "model.safetensors")
    with pytest.raises(HeadLoadError, match=name):
        load(tmp_path)


def test_missing_and_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HeadLoadError, match="no folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(HeadLoadError, match="hub gave no model"):
        load_eagle("someone/no-such-head", facts(), torch.float32, "cpu")
    with pytest.raises(HeadLoadError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HeadLoadError, match="no weights"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(HeadLoadError, match="no readable safetensors"):
        load(tmp_path)
    with pytest.raises(HeadLoadError, match="is a file"):
        load(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(HeadLoadError, match="JSON object"):
        load(tmp_path)


def test_pickles_of_anything_but_tensors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"fc.weight": Path("/")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadLoadError, match="plain dictionary of tensors"):
        load(tmp_path)


def test_a_name_of_the_hub_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_eagle3(make_head(), tmp_path)
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path))
    assert load_eagle("someone/some-head", facts(), torch.float32, "cpu").spec == SPEC
    assert asked == ["someone/some-head"]


def test_describing_needs_no_weights_of_the_target(tmp_path: Path) -> None:
    save_eagle3(make_head(), tmp_path)
    nothing = torch.empty(40, 16, device="meta")
    assert "default, theta 10000" in str(describe_eagle(tmp_path, TargetFacts(16, 40, 8, nothing, nothing)))


@pytest.mark.parametrize("size", [10**12, 2**63, 2**200, -1, 0])
@pytest.mark.parametrize("name", ["head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size"])
def test_sizes_that_no_tensor_has_are_refused_before_any_is_made(name: str, size: int, tmp_path: Path) -> None:
    folder = save_eagle3(make_head(), tmp_path)
    path = edit(folder, set_config(**{name: size}))
    with pytest.raises((HeadLoadError, InvalidInputError), match=r"must be 1 … 16,777,216, not|integer|multiple"):
        load(path)
