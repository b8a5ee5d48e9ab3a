"""What the layouts of heads can say wrongly, and each is refused by name; and where a head may lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from drafters.base import TargetFacts
from drafters.checkpoints.tensor_files import locate
from drafters.eagle3.checkpoint import describe_eagle, load_eagle
from drafters.eagle3.family import target_of
from drafters.eagle3.overrides import Eagle3Overrides
from drafters.errors import HeadLoadError, HeadMismatchError
from specdec.loading.heads import target_facts
from specdec.wrapped.probing import probe_target
from tests.head_layouts import LAYOUTS, Layout, Maker, target

Change = Callable[[Layout], Layout]


@pytest.fixture(scope="module")
def facts() -> TargetFacts:
    return target_facts(probe_target(target()))


def load(folder: Path, facts: TargetFacts, **overrides: Any) -> Any:
    return load_eagle(folder, facts, torch.float32, "cpu", Eagle3Overrides.of(overrides))


def config(**changes: Any) -> Change:
    return lambda layout: replace(layout, config=layout.config | changes)


def nested(**changes: Any) -> Change:
    key = "transformer_layer_config"
    return lambda layout: replace(layout, config=layout.config | {key: layout.config[key] | changes})


def tensors(**changes: tuple[int, ...] | None) -> Change:
    """Tensors of zeros by name (`__` is a dot), None drops one."""

    def change(layout: Layout) -> Layout:
        named = {name.replace("__", "."): shape for name, shape in changes.items()}
        kept = {name: t for name, t in layout.tensors.items() if name not in named}
        return replace(layout, tensors=kept | {n: torch.zeros(shape) for n, shape in named.items() if shape})

    return change


def fused_deep_layer(layout: Layout) -> Layout:
    make = Maker(13)
    make.layer("layers.1.", 64, echo=False, qk_norm=True)
    make.put("layers.1.input_layernorm.weight", 32)
    make.put("layers.1.hidden_norm.weight", 32)
    more = {"num_hidden_layers": 2, "draft_num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    return replace(layout, tensors=layout.tensors | make.tensors, config=layout.config | more)


REFUSED: list[tuple[str, Change, str]] = [
    ("speculators_llama", config(transformer_layer_config=None), "must have an object transformer_layer_config"),
    ("speculators_llama", nested(model_type="qwen3_next"), "model_type is 'qwen3_next'; speculators makes"),
    ("speculators_llama", nested(hidden_size="wide"), "transformer_layer_config is no configuration of a llama layer"),
    ("speculators_llama", nested(model_type="qwen3"), r"use_qk_norm = True, but the checkpoint has no midlayer\."),
    ("speculators_llama", config(norm_before_fc=False), r"norm_before_fc = False, but the checkpoint has input_norm"),
    ("speculators_llama", config(fc_norm=True), r"fc_norm = True, but the checkpoint has no fc_norm\.0\.weight"),
    ("speculators_llama", config(draft_vocab_size=None), "draft vocabulary 32000 exceeds the target's 64"),
    ("speculators_llama", nested(vocab_size=70), "vocabulary of 70 tokens, this target has 64"),
    ("speculators_llama", config(speculators_model_type="peagle"), "speculators of type 'peagle'.*not supported"),
    ("speculators_qwen3", nested(layer_types=["chunked_attention", "full_attention"]), "must be a list of full_att"),
    ("speculators_qwen3", nested(use_sliding_window=False), "no sliding_window"),
    ("speculators_qwen3", nested(num_hidden_layers=3, layer_types=None), "num_hidden_layers = 3, but the checkpoint"),
    ("specforge", config(use_sliding_window=True, sliding_window=9), "not which layers have it: give layer_types"),
    ("specforge", config(layer_types=["sliding_attention"] * 8, sliding_window=9), r"the head has 1 layer\(s\)"),
    ("specforge", config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "contradicts itself about RoPE"),
    (
        "specforge_wide",
        config(eagle_config={"norm_before_fc": False}),
        "norm_before_fc = False, but the checkpoint has",
    ),
    ("modelopt", config(eagle_config={"use_aux_hidden_state": False, "use_last_layernorm": False}), "use_last_layern"),
    ("modelopt", tensors(midlayer__input_layernorm__weight=None), r"use_input_layernorm_in_first_layer = True, but"),
    ("modelopt", config(rope_scaling={"rope_type": "dynamic"}), "are incomplete|factor"),
    ("deepspec", config(target_layer_ids=[0, 2, 3, 5, 7]), "has the target's last layer.*after the final norm"),
    ("deepspec", config(target_layer_ids=[0, 2, 3]), r"shape of fc\.weight: \[32, 160\] instead of \[32, 96\]"),
    ("deepspec", config(architectures=["Gemma4Eagle3Model"]), "EAGLE-3 of Gemma 4 layers.*not supported"),
    ("deepspec", fused_deep_layer, r"further layers read \[embedding, hidden\] like its first"),
    ("deepspec", tensors(lm_head__weight=(12, 32)), r"shape of lm_head\.weight: \[12, 32\] instead of \[64, 32\]"),
    ("angelslim", config(num_hidden_layers=3), r"num_hidden_layers = 3, but the checkpoint has tensors of 1 layer"),
    ("safeailab", tensors(midlayer__mlp__experts__0__gate_proj__weight=(4, 32)), "mixture of experts.*not supported"),
    ("safeailab", tensors(midlayer__self_attn__kv_a_proj_with_mqa__weight=(4, 64)), "multi-head latent.*not supported"),
    ("safeailab", tensors(midlayer__mlp__gate_proj__bias=(40,)), r"missing: midlayer\.mlp\.down_proj\.bias"),
    ("eagle1", config(qkv_bias=True), r"qkv_bias = True, but the checkpoint has no midlayer\.self_attn\.q_proj\.bias"),
    ("eagle1", tensors(lm_head__weight=(64, 32)), r"unknown: lm_head\.weight \[64, 32\]"),
    ("eagle1", tensors(layers__0__mlp__up_proj__weight=None), r"missing: layers\.0\.mlp\.up_proj\.weight \[40, 32\]"),
    ("eagle1", config(hidden_size=64), "hidden size 64, this target has 32"),
    ("eagle2", config(num_hidden_layers=1), r"num_hidden_layers = 1, but the checkpoint has tensors of 2 layer"),
]


@pytest.mark.parametrize(("name", "change", "words"), REFUSED)
def test_contradictions_are_refused_by_name(
    name: str, change: Change, words: str, tmp_path: Path, facts: TargetFacts
) -> None:
    layout = LAYOUTS[name]()
    load(layout.write(tmp_path / "good"), facts)
    with pytest.raises((HeadLoadError, HeadMismatchError), match=words):
        load(change(layout).write(tmp_path / "bad"), facts)


def test_overrides_reach_every_layout(tmp_path: Path, facts: TargetFacts) -> None:
    """By the key alone, wherever in the file it lies; the report says whose value it is."""
    folder = LAYOUTS["speculators_qwen3"]().write(tmp_path / "a")
    given = {"sliding_window": 7, "rope_parameters.factor": 2.0, "rms_norm_eps": 1e-3}
    head = load(folder, facts, **given)
    assert head.spec.window == 7 and dict(head.spec.rope.scaling)["factor"] == 2.0 and head.spec.rms_norm_eps == 1e-3
    sources = {field.name: field.source for field in head.checkpoint_report.fields}
    assert sources["window"] == "config sliding_window (chosen by the user)"
    assert sources["windowed_layers"] == "config transformer_layer_config.layer_types"
    windowed = LAYOUTS["specforge"]().write(tmp_path / "b", use_sliding_window=True, sliding_window=9)
    chosen = load(windowed, facts, layer_types=["sliding_attention"]).attention_specs
    assert [spec.window for spec in chosen] == [9]
    first = LAYOUTS["eagle1"]().write(tmp_path / "c")
    assert load(first, facts, rope_theta=5e5).spec.rope.theta == 5e5
    with pytest.raises(HeadLoadError, match="cannot be chosen for an EAGLE-1 head"):
        load(first, facts, feedback="post_norm")


def test_mrope_of_text_is_plain(tmp_path: Path, facts: TargetFacts) -> None:
    """SpecForge's configs/qwen2-5-vl-eagle3.json and qwen3-vl-8b-eagle3.json."""
    section = {"mrope_section": [2, 3, 3]}
    old = LAYOUTS["safeailab"]().write(tmp_path / "a", rope_scaling=section | {"type": "mrope"}, rope_theta=1e6)
    interleaved = section | {"rope_type": "default", "mrope_interleaved": True}
    new = LAYOUTS["safeailab"]().write(tmp_path / "b", rope_scaling=interleaved, rope_theta=1e6)
    plain = LAYOUTS["safeailab"]().write(tmp_path / "c", rope_theta=1e6)
    assert load(old, facts).spec == load(new, facts).spec == load(plain, facts).spec


def test_reports_say_who_wrote_it(tmp_path: Path, facts: TargetFacts) -> None:
    names = {
        "safeailab": "EAGLE-3, SafeAILab layout",
        "safeailab_narrow": "EAGLE-3, SafeAILab layout",
        "specforge": "EAGLE-3, SpecForge/SGLang layout",
        "specforge_wide": "EAGLE-3, SpecForge/SGLang layout",
        "speculators_llama": "EAGLE-3, speculators layout",
        "speculators_qwen3": "EAGLE-3, speculators layout",
        "modelopt": "EAGLE-3, NVIDIA ModelOpt layout",
        "angelslim": "EAGLE-3, AngelSlim layout",
        "deepspec": "EAGLE-3, DeepSpec layout",
        "eagle1": "EAGLE-1/2, SafeAILab layout",
        "eagle2": "EAGLE-1/2, SafeAILab layout",
    }
    folders = {name: made().write(tmp_path / name) for name, made in LAYOUTS.items()}
    reports = {name: describe_eagle(folder, facts) for name, folder in folders.items()}
    assert {name: report.layout for name, report in reports.items()} == names
    assert "mrope: of text all three positions are one" in str(reports["angelslim"])
    assert "midlayer.self_attn.rotary_emb.inv_freq" in str(reports["angelslim"])
    assert "the target's embedding is read in its place" in str(reports["eagle1"])
    assert reports["eagle1"].num_parameters == sum(
        t.numel() for name, t in LAYOUTS["eagle1"]().tensors.items() if name != "embed_tokens.weight"
    )


def test_one_head_in_three_layouts_is_the_same_module(tmp_path: Path, facts: TargetFacts) -> None:
    make = Maker(14)
    make.eagle3()
    base = LAYOUTS["safeailab"]().config
    package = LAYOUTS["speculators_llama"]().config | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    package |= dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output"), False)
    layer = package["transformer_layer_config"] | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    exported = base | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {}}
    exported["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]

    def renamed(prefix: str, first: str) -> dict[str, torch.Tensor]:
        return {prefix + name.replace("midlayer.", first): t for name, t in make.tensors.items()}

    layouts = [
        Layout(base, make.tensors, file="bin"),
        Layout(exported, renamed("model.", "midlayer."), file="shards"),
        Layout(package | {"transformer_layer_config": layer}, renamed("draft_model.", "layers.0.")),
    ]
    heads = [load(layout.write(tmp_path / str(i)), facts) for i, layout in enumerate(layouts)]
    first, states = heads[0].spec, [head.state_dict() for head in heads]
    plain = [replace(head.spec, rope=replace(head.spec.rope, first_position=0)) for head in heads]
    assert plain == [first] * 3 and [h.spec.rope.first_position for h in heads] == [0, 0, 1]
    assert all(s.keys() == states[0].keys() and all(torch.equal(s[n], states[0][n]) for n in s) for s in states)


def test_a_head_in_the_hubs_cache(tmp_path: Path, facts: TargetFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """As huggingface_hub lays it out, without any network: blobs, snapshots of links to them, refs."""
    commit, repo = "a" * 40, tmp_path / "hub" / "models--RedHatAI--tiny-speculator.eagle3"
    written = LAYOUTS["speculators_llama"]().write(tmp_path / "written")
    snapshot = repo / "snapshots" / commit
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    for number, file in enumerate(sorted(written.iterdir())):
        blob = repo / "blobs" / f"{number:040x}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    name = "RedHatAI/tiny-speculator.eagle3"
    assert locate(name) == snapshot
    assert load(name, facts).spec == load(written, facts).spec  # type: ignore[arg-type]
    assert target_of(name) == "meta-llama/Llama-3.1-8B-Instruct"
    with pytest.raises(HeadLoadError, match="local cache has no such model"):
        load("RedHatAI/another", facts)  # type: ignore[arg-type]


def test_pickles_that_hold_more_than_tensors_are_never_run(tmp_path: Path, facts: TargetFacts) -> None:
    folder = LAYOUTS["eagle1"]().write(tmp_path)
    torch.save({"fc.weight": Path("/")}, folder / "pytorch_model.bin")
    with pytest.raises(HeadLoadError, match="could run code and is never read"):
        load(folder, facts)


def test_a_config_without_a_name_of_a_target(tmp_path: Path) -> None:
    folder = LAYOUTS["speculators_llama"]().write(tmp_path, speculators_config={"algorithm": "eagle3", "verifier": {}})
    assert target_of(folder) is None
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3}))
    with pytest.raises(HeadLoadError, match="Medusa"):
        target_of(folder)


def test_a_head_that_does_not_name_its_epsilon_has_that_of_transformers(tmp_path: Path, facts: TargetFacts) -> None:
    """LlamaConfig's default: a configuration written by `to_diff_dict` leaves it out."""
    layout = LAYOUTS["safeailab"]()
    config = {key: value for key, value in layout.config.items() if key != "rms_norm_eps"}
    head = load(replace(layout, config=config).write(tmp_path), facts)
    assert head.spec.rms_norm_eps == transformers.LlamaConfig().rms_norm_eps == 1e-6
