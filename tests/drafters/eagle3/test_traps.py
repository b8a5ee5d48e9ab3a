"""The silent traps of published heads, each set once: it is handled, refused by name, or said in the report.

The numbers are those of the checklist in the reference on checkpoint formats. Of the traps that only a run shows, 7 and
8 (concatenation, norms) are planted in `test_layouts.test_planted_defects_are_seen`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import LetterTokenizer, wrap
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from drafters.base import FINAL_NORM, TargetFacts
from drafters.checkpoints.config_fields import HeadReport
from drafters.checkpoints.layouts import Layout as Family
from drafters.checkpoints.layouts import detect
from drafters.eagle3.checkpoint import describe_eagle, load_eagle
from drafters.eagle3.layout import resolve_spec
from drafters.eagle3.overrides import Eagle3Overrides
from drafters.errors import HeadLoadError, HeadMismatchError
from drafters.mtp.checkpoint import load_mtp
from drafters.mtp.spec import mtp_target
from specdec.errors import InvalidInputError
from specdec.loading.heads import target_facts
from specdec.requests.sampling import SamplingParams
from specdec.wrapped.probing import probe_target
from tests.drafters.eagle3.test_layouts import engine_rounds
from tests.head_layouts import LAYERS, LAYOUTS, SPECULATORS, Layout, Maker, specforge, target

AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def facts() -> TargetFacts:
    return target_facts(probe_target(target()))


SIZES = TargetFacts(4096, 128256, 32, torch.empty(0), torch.empty(0))


def load(folder: Path, facts: TargetFacts, **overrides: Any) -> Any:
    return load_eagle(folder, facts, torch.float32, "cpu", Eagle3Overrides.of(overrides))


def source(report: HeadReport, name: str) -> str:
    return next(f.source for f in report.fields if f.name == name)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("safeailab", {}, (2, 4, 5)),
        ("specforge", {}, (1, 4, 7)),
        ("specforge", {"eagle_config": {AUX: [2, 4, 8]}}, (2, 4, 8)),
        ("speculators_llama", {AUX: [1, 4, 7]}, (1, 4, 7)),
        ("speculators_llama", {AUX: None}, (2, 4, 5)),
        ("deepspec", {}, (1, 3, 4, 6, 7)),
        ("modelopt", {}, (FINAL_NORM,)),
        ("eagle1", {}, (FINAL_NORM,)),
    ],
)
def test_1_ids_of_aux_layers(
    name: str, config: dict[str, Any], expected: tuple[int, ...], tmp_path: Path, facts: TargetFacts
) -> None:
    assert load(LAYOUTS[name]().write(tmp_path, **config), facts).aux_layers == expected


def test_1_nested_ids_of_a_deepseek_target(tmp_path: Path, facts: TargetFacts) -> None:
    """SpecForge's configs/kimi-k2-eagle3.json has [2, 30, 58] of 61 layers: for such targets SGLang adds nothing."""

    def layers(ids: list[int], model_type: str, **more: Any) -> Any:
        nested = {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}}
        folder = specforge().write(tmp_path, **nested, **more)
        report = describe_eagle(folder, replace(facts, model_type=model_type))
        return next(field for field in report.fields if field.name == "aux_layers")

    for model_type in ("", "llama", "qwen3_moe"):
        assert layers([2, 4, 5], model_type).value == (3, 5, 6)
    for model_type in ("deepseek_v3", "kimi_k2"):
        found = layers([2, 4, 5], model_type)
        assert found.value == (2, 4, 5) and f"as SGLang does for {model_type}" in found.source
        assert layers([1, 3, 4], model_type).value == (2, 4, 5)
    boundaries = {"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}  # as we write a head: both
    assert layers([2, 4, 5], "deepseek_v3", **boundaries).value == (3, 5, 6)


def test_2_nested_and_top_level_keys_must_agree(tmp_path: Path, facts: TargetFacts) -> None:
    layout = LAYOUTS["specforge"]()
    assert load(layout.write(tmp_path / "a", **{AUX: [1, 4, 7]}), facts).aux_layers == (1, 4, 7)
    with pytest.raises(HeadLoadError, match="different aux layers"):
        load(layout.write(tmp_path / "b", **{AUX: [0, 3, 6]}), facts)
    with pytest.raises(HeadLoadError, match="contradicts itself about norm_output"):
        load(layout.write(tmp_path / "c", eagle_config={AUX: [0, 3, 6], "norm_output": False}), facts)
    speculators = LAYOUTS["speculators_llama"]().write(tmp_path / "d", hidden_size=64)
    with pytest.raises(HeadLoadError, match=r"hidden_size = 64 and transformer_layer_config\.hidden_size = 32"):
        load(speculators, facts)


def test_3_which_state_is_fed_back(tmp_path: Path, facts: TargetFacts) -> None:
    folder = LAYOUTS["specforge"]().write(tmp_path / "a")
    assert load(folder, facts).spec.feedback == "post_norm"
    assert "before September 2026" in source(describe_eagle(folder, facts), "feedback")
    assert load(folder, facts, feedback="pre_norm").spec.feedback == "pre_norm"
    package = LAYOUTS["speculators_llama"]().write(tmp_path / "b")
    assert source(describe_eagle(package, facts), "feedback") == "config norm_output"
    assert load(LAYOUTS["safeailab"]().write(tmp_path / "c"), facts).spec.feedback == "pre_norm"


def test_4_norm_before_residual_where_nobody_says_it(tmp_path: Path, facts: TargetFacts) -> None:
    layout = LAYOUTS["speculators_llama"]()
    folder = layout.write(tmp_path, norm_before_residual=None)
    assert not load(folder, facts).spec.norm_before_residual
    said = source(describe_eagle(folder, facts), "norm_before_residual")
    assert "absent: default of speculators; vLLM takes true" in said
    assert load(folder, facts, norm_before_residual=True).spec.norm_before_residual
    assert (
        source(describe_eagle(layout.write(tmp_path), facts), "norm_before_residual") == "config norm_before_residual"
    )


@pytest.mark.slow
def test_5_the_rotary_embedding_is_the_heads_own(tmp_path: Path) -> None:
    model = target()
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
    with wrap(model, str(LAYOUTS["safeailab"]().write(tmp_path))) as wrapped:
        assert wrapped.head.spec.rope.theta == 10000.0
        assert source(wrapped.head.checkpoint_report, "rope") == "theta: default; type: default"


def changed(layout: Layout, **tensors: Any) -> Layout:
    """With tensors computed anew from the old ones; None drops one."""
    new = {name: change(layout.tensors[name]) for name, change in tensors.items() if change is not None}
    kept = {name: t for name, t in layout.tensors.items() if name not in tensors or tensors[name] is not None}
    return replace(layout, tensors=kept | new)


def test_6_absolute_ids_in_the_place_of_offsets(tmp_path: Path, facts: TargetFacts) -> None:
    layout = changed(LAYOUTS["specforge"](), d2t=lambda d: d + torch.arange(len(d)))
    with pytest.raises(HeadLoadError, match="looks like absolute target ids"):
        load(layout.write(tmp_path), facts)


@pytest.mark.parametrize(("name", "wins"), [("specforge", "hidden_norm"), ("speculators_qwen3", "input_layernorm")])
def test_8_of_two_norms_in_a_further_layer_the_exporters(
    name: str, wins: str, tmp_path: Path, facts: TargetFacts
) -> None:
    layout = LAYOUTS[name]()
    if name == "specforge":
        make = Maker(11)
        make.further(1)
        layout = replace(layout, tensors=layout.tensors | make.tensors, config=layout.config | {"num_hidden_layers": 2})
    other = {"layers.1.hidden_norm.weight": torch.full((32,), 2.0)}
    head = load(replace(layout, tensors=layout.tensors | other).write(tmp_path), facts)
    expected = (layout.tensors | other)[f"layers.1.{wins}.weight"]
    assert torch.equal(head.layers["1"].input_layernorm.weight, expected)


@pytest.mark.slow
@torch.inference_mode()
def test_9_fc_once_where_its_input_is_as_wide_as_its_output(tmp_path: Path) -> None:
    make = Maker(12)
    make.eagle3(aux=1)
    config = LAYOUTS["safeailab"]().config | {AUX: [5], "num_aux_hidden_states": 1}
    rounds, _ = engine_rounds(layout := Layout(config, make.tensors, {"taps": (5,)}), layout.write(tmp_path))
    assert rounds and all(ours == by_hand and apart < 2e-3 for ours, by_hand, apart in rounds)


def test_10_a_bias_is_where_its_tensor_is(tmp_path: Path, facts: TargetFacts) -> None:
    bias = {"fc.bias": torch.ones(32)}
    plain = LAYOUTS["safeailab"]()
    assert load(replace(plain, tensors=plain.tensors | bias).write(tmp_path / "a"), facts).fc.bias is not None
    with pytest.raises(HeadLoadError, match=r"bias = False, but the checkpoint has fc\.bias"):
        load(replace(plain, tensors=plain.tensors | bias).write(tmp_path / "b", bias=False), facts)
    first = LAYOUTS["eagle1"]()
    without = replace(first, tensors={n: t for n, t in first.tensors.items() if n != "fc.bias"})
    assert load(without.write(tmp_path / "c"), facts).fc.bias is None, "absent in config.json too: the tensor decides"
    with pytest.raises(HeadLoadError, match=r"bias = True, but the checkpoint has no fc\.bias"):
        load(without.write(tmp_path / "d", bias=True), facts)
    package = LAYOUTS["speculators_qwen3"]()
    nested = package.config["transformer_layer_config"] | {"attention_bias": False}
    with pytest.raises(
        HeadLoadError, match=r"attention_bias = False, but the checkpoint has midlayer\.self_attn\.q_proj"
    ):
        load(package.write(tmp_path / "e", transformer_layer_config=nested), facts)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("modelopt", (FINAL_NORM,)), ("specforge", (2, 4, LAYERS))])
@torch.inference_mode()
def test_11_12_the_last_state_before_and_after_the_final_norm(
    name: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    """transformers' own hidden_states end with the one after the norm; boundary N is the one before it."""
    layout = LAYOUTS[name]()
    config = {"eagle_config": {AUX: [2, 4, LAYERS]}} if name == "specforge" else {}
    model = target()
    seen: list[torch.Tensor] = []
    with wrap(model, str(layout.write(tmp_path, **config)), max_num_seqs=1) as wrapped:
        assert wrapped.head.aux_layers == layers
        own = wrapped.head.fuse
        wrapped.head.fuse = lambda aux: (seen.append(aux.clone()), own(aux))[1]
        prompt = [3, 1, 4, 1, 5]
        wrapped.generate([prompt], SamplingParams(max_new_tokens=6))
    raw: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: raw.append(inputs[0].clone()))
    states = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states
    assert not torch.allclose(raw[0], states[-1], atol=1e-3)
    last = states[-1][0] if layers == (FINAL_NORM,) else raw[0][0]
    torch.testing.assert_close(seen[0][: len(prompt), -32:], last, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3"])
def test_13_14_15_modules_take_norms_and_rotation_from_the_target(
    name: str, tiny_case: Callable[..., Any], tmp_path: Path
) -> None:
    """Gemma's 1 + w and MLA's interleaved pairs are the target's layer class; transformers drops the tensors."""
    case = tiny_case(name)
    folder = case.write(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert not [n for n in model.state_dict() if "mtp." in n or "eh_proj" in n], "transformers drops them"
    (head,) = load_mtp(folder, mtp_target(model), torch.float32, "cpu")
    layers = model.model.layers
    assert type(head.blocks[0]) is type(layers[-1]) and type(head.norm) is type(layers[-1].input_layernorm)
    if name == "deepseek_v3":
        assert head.blocks[0].self_attn.config.rope_interleave
        return
    x = torch.randn(3, 32)
    weight = case.tensors["mtp.norm.weight"]
    scaled = x / (x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt() * (1 + weight)
    torch.testing.assert_close(head.norm(x), scaled, rtol=1e-4, atol=1e-5)


def test_16_a_target_that_scales_its_embedding(tmp_path: Path) -> None:
    """Heads are trained on the rows themselves (SpecForge loads embed_tokens.weight into a plain embedding)."""
    config = LAYOUTS["safeailab"]().config
    sizes = {k: config[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(**sizes, num_hidden_layers=LAYERS, num_key_value_heads=2, head_dim=16, sliding_window=8)
    ).eval()
    facts = target_facts(probe_target(model))
    folder = LAYOUTS["safeailab"]().write(tmp_path)
    head = load(folder, facts)
    ids = torch.arange(5)
    rows = model.get_input_embeddings().weight[ids]
    assert torch.equal(head.target_embedding[ids], rows)
    assert not torch.allclose(model.get_input_embeddings()(ids), rows), "the target multiplies them"
    assert "without the factor that some targets (Gemma)" in source(describe_eagle(folder, facts), "own_embed")


def test_17_a_chat_without_a_chat_template(tmp_path: Path) -> None:
    wrapped = wrap(target(), str(LAYOUTS["safeailab"]().write(tmp_path)), tokenizer=LetterTokenizer())
    with wrapped, pytest.raises(InvalidInputError, match="no chat template"):
        wrapped.generate([[{"role": "user", "content": "a"}]])


def test_18_padded_rows_of_the_targets_vocabulary(tmp_path: Path, facts: TargetFacts) -> None:
    rows = torch.cat([facts.embedding, torch.zeros(8, 32)])
    padded = replace(facts, embedding=rows, lm_head=rows)
    head = load(LAYOUTS["safeailab"]().write(tmp_path / "a"), padded)
    assert head.target_embedding.shape == (64, 32) and head.target_embedding.data_ptr() == rows.data_ptr()
    first = load(LAYOUTS["eagle1"]().write(tmp_path / "b"), padded)
    assert first.target_lm_head.shape == (64, 32)
    layout = changed(LAYOUTS["safeailab"](), t2d=lambda t: torch.cat([t, torch.zeros(8, dtype=torch.bool)]))
    counted = load(layout.write(tmp_path / "c", vocab_size=72), padded)
    assert counted.spec.vocab_size == 72 and len(counted.target_embedding) == 72
    with pytest.raises(HeadMismatchError, match="vocabulary of 70 tokens, this target has 64"):
        load(layout.write(tmp_path / "d", vocab_size=70), padded)


def test_19_values_that_the_class_leaves_out(tmp_path: Path, facts: TargetFacts) -> None:
    """A head of Llama 3.1 8B: its widths are LlamaConfig's defaults, so its file does not name them."""
    layer = {"model_type": "llama", "vocab_size": 128256, "num_hidden_layers": 1, "num_key_value_heads": 8}
    layer |= {"intermediate_size": 14336, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    config = SPECULATORS | {"transformer_layer_config": layer, "norm_before_residual": True}
    shapes = {"layers.0.self_attn.q_proj.weight": (4096, 8192), "layers.0.self_attn.o_proj.weight": (4096, 4096)}
    assert detect(config, shapes) is Family.EAGLE3
    named = {"fc.weight": (4096, 3 * 4096), "lm_head.weight": (12, 4096), "norm.weight": (4096,)}
    named |= {name.replace("layers.0.", "midlayer."): shape for name, shape in shapes.items()}
    named |= {"midlayer.input_layernorm.weight": (4096,)}
    spec, fields = resolve_spec(config, named, SIZES, Eagle3Overrides())
    assert (spec.hidden_size, spec.num_heads, spec.head_dim, spec.rms_norm_eps) == (4096, 32, 128, 1e-6)
    assert spec.aux_layers == (2, 16, 29)
    sources = {field.name: field.source for field in fields}
    assert sources["hidden_size"] == "config transformer_layer_config.hidden_size (absent: default of LlamaConfig)"
    assert sources["intermediate_size"] == "config transformer_layer_config.intermediate_size"
    assert "transformer_layer_config.rope_parameters" in sources["rope"]
    qwen = {key: value for key, value in layer.items() if key != "model_type"}
    with pytest.raises(
        HeadLoadError, match=r"use_qk_norm = True, but the checkpoint has no midlayer\.self_attn\.q_norm"
    ):
        resolve_spec(
            config | {"transformer_layer_config": qwen},
            named,
            SIZES,
            Eagle3Overrides(),
        )


def test_20_half_precision_is_cast_once_and_maps_stay_integers(tmp_path: Path, facts: TargetFacts) -> None:
    layout = LAYOUTS["safeailab"]()
    assert layout.tensors["fc.weight"].dtype == torch.float16
    half = replace(facts, embedding=facts.embedding.bfloat16(), lm_head=facts.lm_head.bfloat16())
    head: Any = load_eagle(layout.write(tmp_path), half, torch.bfloat16, "cpu")
    assert torch.equal(head.fc.weight, layout.tensors["fc.weight"].to(torch.bfloat16))
    assert head.target_ids.dtype == torch.int64 and head.rotary.frequencies.dtype == torch.float32
    ids = np.array([1, 5, 10, 11, 12, 13, 25, 41, 42, 45, 48, 57])
    assert head.to_target_ids(torch.arange(12)).tolist() == ids.tolist()
