"""Exported heads: read back the same, in either layout; what a layout cannot say is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import eagle3_spec
from safetensors.torch import load_file

from attention.errors import InvalidInputError
from drafters.base import FINAL_NORM, TargetFacts
from drafters.eagle3.checkpoint import load_eagle
from drafters.eagle3.export import ExportLayout, Verifier, export_eagle3
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.spec import Eagle3Spec
from drafters.rope import RopeSpec
from drafters.unroll import unroll
from drafters.vocab import most_frequent

SPEC = eagle3_spec(aux_layers=(2, 4, 5))
WHOLE = replace(SPEC, draft_vocab_size=SPEC.vocab_size, own_lm_head=False)
LLAMA3 = RopeSpec(
    theta=5e5,
    kind="llama3",
    max_positions=64,
    scaling=(
        ("factor", 4.0),
        ("high_freq_factor", 4.0),
        ("low_freq_factor", 1.0),
        ("original_max_position_embeddings", 16),
    ),
)
VERIFIER = Verifier("someone/some-target", ("LlamaForCausalLM",))


def facts(spec: Eagle3Spec) -> TargetFacts:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(spec.vocab_size, spec.target_hidden_size, generator=generator)
    return TargetFacts(spec.target_hidden_size, spec.vocab_size, num_layers=8, embedding=weight, lm_head=weight)


def make_head(spec: Eagle3Spec) -> Eagle3Head:
    torch.manual_seed(0)
    d2t = most_frequent(torch.randint(0, 9, (spec.vocab_size,)), spec.draft_vocab_size)
    target = facts(spec)
    head = Eagle3Head(spec, target.embedding, None if spec.own_lm_head else target.lm_head, d2t)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 0.3, 0.5)
    return head.eval().requires_grad_(False)


def said(head: Eagle3Head) -> torch.Tensor:
    """Logits of three steps over a text."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, head.spec.vocab_size, (1, 11), generator=generator)
    states = torch.randn(1, 11, head.spec.aux_size, generator=generator)
    return torch.stack([head.logits(x) for x in unroll(head, ids, states, 3)])


def export(head: Eagle3Head, folder: Path, layout: ExportLayout, **options: Any) -> Path:
    return export_eagle3(head, folder, layout, **({"verifier": VERIFIER} | options))


BOTH: dict[str, Eagle3Spec] = {
    "plain": SPEC,
    "target's lm_head": WHOLE,
    "norms": replace(SPEC, fc_norm=True, feedback="post_norm", rope=LLAMA3, num_layers=2, aux_layers=(0, 3, 5, 7)),
}
SPECULATORS_ONLY = {
    "qwen3": replace(SPEC, norm_before_residual=True, qk_norm=True, qkv_bias=True, o_bias=True, input_norm=True),
    "biases": replace(SPEC, qkv_bias=True, o_bias=True, mlp_bias=True, own_embed=True, aux_layers=(4,)),
}
SPECFORGE_ONLY = {
    "both norms": replace(SPEC, input_norm=True, fc_norm=True),
    "narrow": replace(SPEC, target_hidden_size=24, own_embed=True),
    "last state": replace(SPEC, aux_layers=(FINAL_NORM,)),
}
CASES = [(layout, name, spec) for layout in ("speculators", "specforge") for name, spec in BOTH.items()]
CASES += [("speculators", name, spec) for name, spec in SPECULATORS_ONLY.items()]
CASES += [("specforge", name, spec) for name, spec in SPECFORGE_ONLY.items()]


@pytest.mark.parametrize(("layout", "name", "spec"), CASES, ids=[f"{layout}-{name}" for layout, name, _ in CASES])
def test_an_exported_head_is_read_back(layout: ExportLayout, name: str, spec: Eagle3Spec, tmp_path: Path) -> None:
    head = make_head(spec)
    folder = export(head, tmp_path, layout, with_target_tensors=False)
    again = load_eagle(folder, facts(spec), torch.float32, "cpu")
    assert again.spec == replace(spec, rope=again.spec.rope) and str(again.spec.rope) == str(spec.rope)
    assert again.target_ids.tolist() == head.target_ids.tolist()
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in head.state_dict().items())
    assert torch.equal(said(again), said(head))


def test_a_speculators_folder_brings_the_targets_tensors(tmp_path: Path) -> None:
    head = make_head(WHOLE)
    export(head, tmp_path, "speculators", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], facts(WHOLE).embedding.bfloat16())
    assert torch.equal(stored["lm_head.weight"], facts(WHOLE).lm_head.bfloat16())
    assert "d2t" not in stored and "t2d" not in stored
    nothing = replace(facts(WHOLE), embedding=torch.zeros(40, 16), lm_head=torch.zeros(40, 16))
    again = load_eagle(tmp_path, nothing, torch.float32, "cpu")
    assert again.spec.own_embed and again.spec.own_lm_head
    assert float((said(again) - said(head)).abs().max()) < 0.1 * float(said(head).abs().max())


def test_the_configurations_say_what_the_engines_read(tmp_path: Path) -> None:
    head = make_head(replace(SPEC, feedback="post_norm", fc_norm=True))
    export(head, tmp_path / "a", "speculators", num_speculative_tokens=3)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    verifier = {"name_or_path": "someone/some-target", "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["verifier"] == verifier
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and config["norm_output"] and config["fc_norm"]
    export(head, tmp_path / "b", "specforge")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["norm_output"] and config["fc_norm"] and config["draft_vocab_size"] == SPEC.draft_vocab_size
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert {"midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= stored.keys()


@pytest.mark.parametrize(
    ("layout", "changes", "named"),
    [
        ("speculators", {"fc_bias": True}, "fc_bias = True"),
        ("speculators", {"input_norm": True, "fc_norm": True}, "input_norm and fc_norm"),
        ("speculators", {"aux_layers": (FINAL_NORM,)}, "the last state"),
        ("speculators", {"target_hidden_size": 24, "own_embed": True}, "target_hidden_size"),
        ("speculators", {"qkv_bias": True}, "qkv_bias without o_bias"),
        ("speculators", {"qk_norm": True, "mlp_bias": True}, "qk_norm and mlp_bias"),
        (
            "speculators",
            {"windowed_layers": (0,), "window": 8},
            r"windowed_layers = \(0,\) \(this export writes no sliding windows.*window = 8",
        ),
        ("speculators", {"rope": RopeSpec(kind="dynamic", scaling=(("factor", 2.0),))}, "'dynamic'"),
        ("specforge", {"fc_bias": True, "qk_norm": True}, "qk_norm = True.*fc_bias = True"),
        ("specforge", {"norm_before_residual": True}, "norm_before_residual = True"),
        ("specforge", {"qkv_bias": True}, "qkv_bias = True"),
        ("specforge", {"own_embed": True}, "own_embed"),
        ("specforge", {"aux_layers": (4,)}, "one aux layer"),
    ],
)
def test_what_a_layout_cannot_express_is_named(
    layout: ExportLayout, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    with pytest.raises(InvalidInputError, match=f"cannot be written in the {layout} layout: .*{named}"):
        export(make_head(replace(SPEC, **changes)), folder, layout)
    assert not folder.exists()


def test_values_that_are_not_allowed(tmp_path: Path) -> None:
    head = make_head(SPEC)
    with pytest.raises(InvalidInputError, match="layout='vllm': allowed are speculators, specforge"):
        export(head, tmp_path, "vllm")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="give its verifier"):
        export(head, tmp_path, "speculators", verifier=None)
    with pytest.raises(InvalidInputError, match="num_speculative_tokens=0"):
        export(head, tmp_path, "speculators", num_speculative_tokens=0)
    assert not list(tmp_path.iterdir())
