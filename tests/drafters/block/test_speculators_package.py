"""Block-parallel heads that the speculators package wrote: read here, and drafting what its own forward drafts.

A few are recorded (tests/fixtures/speculators/make_blocks.py, speculators 0.9.0); more are written where the package is
installed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fakes import wrap
from transformers import LlamaForCausalLM

from drafters.base import TargetFacts
from drafters.block.checkpoint import describe_block, load_block
from drafters.families import FAMILIES, family_of
from drafters.oracle import oracle_drafts
from specdec import SamplingParams
from specdec.errors import HeadLoadError, HeadMismatchError
from tests.drafters.test_conformance import oracle_rounds

FILES = Path(__file__).parents[2] / "fixtures" / "speculators"
KINDS = ("dflash", "dflash2", "dspark")


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(FILES / "target", dtype=torch.float32).eval()


def load(folder: Path, target: LlamaForCausalLM) -> Any:
    facts = TargetFacts(32, 96, 8, target.get_input_embeddings().weight, target.lm_head.weight)
    return load_block(folder, facts, torch.float32, "cpu")


def aux_of(target: LlamaForCausalLM, head: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        states = target(ids[None], output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in head.aux_layers], -1)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_heads_draft_as_the_packages_forward(kind: str, target: LlamaForCausalLM) -> None:
    folder = FILES / "blocks" / kind
    said, head = json.loads((folder / "expected.json").read_text()), load(folder, target)
    text = torch.tensor(said["text"])
    aux = aux_of(target, head, text)
    for end, drafts in said["drafts"].items():
        assert oracle_drafts(head, text[: int(end) + 1], aux[: int(end)], len(drafts)) == drafts
    assert len(drafts) == (5 if kind == "dspark" else 4) == head.block_size - head.first_slot


def test_the_recorded_heads_are_small_and_of_every_kind() -> None:
    files = [path for path in (FILES / "blocks").rglob("*") if path.is_file()]
    assert sorted(path.name for path in (FILES / "blocks").iterdir()) == list(KINDS)
    assert sum(path.stat().st_size for path in files) < 100_000


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_names_every_origin(kind: str) -> None:
    folder = FILES / "blocks" / kind
    assert family_of(folder) is FAMILIES["block"]
    report = describe_block(folder)
    fields = {field.name: field for field in report.fields}
    assert ", speculators layout, " in str(report) and not {"unknown keys", "keys of a target"} & fields.keys()
    assert fields["aux_layers"].value == (1, 3, 6) and "aux_hidden_state_layer_ids" in fields["aux_layers"].source
    assert fields["hidden_size"].source == "config transformer_layer_config.hidden_size"
    assert fields["slots"].value == ("anchor-first" if kind == "dspark" else "fill-in")
    assert fields["causal_layers"].source == "config sliding_window_non_causal"


@pytest.mark.parametrize(
    ("kind", "changes", "causal"),
    [
        ("dflash", {"sliding_window_non_causal": False}, (0,)),
        ("dflash", {"sliding_window_non_causal": True}, ()),
        ("dflash", {"sliding_window_non_causal": None}, (0,)),
        ("dspark", {"sliding_window_non_causal": None}, (0,)),
        ("dflash2", {"sliding_window_non_causal": None}, ()),
        ("dflash2", {"sliding_window_non_causal": False}, (0,)),
    ],
)
def test_causality_is_that_of_the_flag_else_of_the_kind(
    kind: str, changes: dict[str, Any], causal: tuple[int, ...], tmp_path: Path
) -> None:
    stored = FILES / "blocks" / kind
    (tmp_path / "model.safetensors").write_bytes((stored / "model.safetensors").read_bytes())
    config = json.loads((stored / "config.json").read_text()) | changes
    config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "sliding_window": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fields = {field.name: field.value for field in describe_block(tmp_path).fields}
    assert (fields["causal_layers"], fields["window"]) == (causal, 4)


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "no aux layers": ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids must be ascending.* not None"),
    "aux layers out of order": ({"aux_hidden_state_layer_ids": [3, 1, 6]}, "must be ascending numbers from 0 on"),
    "below the embeddings": ({"aux_hidden_state_layer_ids": [-1, 3, 6]}, "from 0 on"),
    "a layer beyond": ({"aux_hidden_state_layer_ids": [1, 3, 9]}, "reads layer 9, the target has layers 0 … 8"),
    "another kind": ({"speculators_model_type": "xpress"}, "layout is speculators of type 'xpress'"),
    "no kind": ({"speculators_model_type": None}, "layout is speculators of type 'dflash3'"),
    "unknown keys": ({"shift_label": 2}, "not understood.*shift_label = 2"),
    "no mask": ({"mask_token_id": None}, "no mask_token_id"),
    "other layers": (
        {"transformer_layer_config": {"model_type": "ernie4_5"}},
        "model_type = 'ernie4_5': block-parallel",
    ),
    "layers that are no object": ({"transformer_layer_config": "qwen3"}, "= 'qwen3': allowed is an object"),
    "slots that nothing tells": (
        {"architectures": None, "sample_from_anchor": None, "markov_rank": 4},
        "a head of DFlash, speculators with a Markov head.*set sample_from_anchor",
    ),
    "a flag that is none": ({"sliding_window_non_causal": "no"}, "sliding_window_non_causal must be bool"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_damaged_configurations_are_refused_by_name(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    changes, message = CHANGED[name]
    folder, stored = tmp_path, FILES / "blocks" / "dflash"
    (folder / "model.safetensors").write_bytes((stored / "model.safetensors").read_bytes())
    config = json.loads((stored / "config.json").read_text()) | changes
    if name == "no kind":
        config["speculators_config"]["algorithm"] = "dflash3"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((HeadLoadError, HeadMismatchError), match=message):
        wrap(target, str(folder))


def test_a_key_without_a_value_is_read_from_the_layers(tmp_path: Path) -> None:
    stored = FILES / "blocks" / "dflash"
    config = json.loads((stored / "config.json").read_text())
    eps = config["transformer_layer_config"]["rms_norm_eps"] = 3e-5
    (tmp_path / "model.safetensors").write_bytes((stored / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": None}))
    assert {field.name: field.value for field in describe_block(tmp_path).fields}["rms_norm_eps"] == eps


def test_states_after_the_last_layer_are_read_before_the_final_norm(tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Its ids count as here: 8 is the state after the last of 8 layers, which vLLM gives it without the norm."""
    stored = FILES / "blocks" / "dflash"
    (tmp_path / "model.safetensors").write_bytes((stored / "model.safetensors").read_bytes())
    config = json.loads((stored / "config.json").read_text()) | {"aux_hidden_state_layer_ids": [0, 3, 8]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path, target).aux_layers == (0, 3, 8)


NEAR, FULL = "sliding_attention", "full_attention"
WINDOW = {"layer_types": [NEAR, FULL], "sliding_window": 64, "use_sliding_window": True, "num_hidden_layers": 2}
"""A window that holds all context: the package lets every slot see that of its block's first slot."""
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("dflash", {"draft_vocab_size": 96}),
    "windows": ("dflash", {"layer": WINDOW, "draft_vocab_size": 50}),
    "windows in both directions": ("dflash", {"layer": WINDOW, "sliding_window_non_causal": True}),
    "anchor first": ("dflash", {"sample_from_anchor": True, "draft_vocab_size": 96, "block_size": 7}),
    "biases": ("dflash", {"layer": {"attention_bias": True, "num_hidden_layers": 3}, "draft_vocab_size": 33}),
    "vanilla": ("dspark", {"markov_rank": 6, "draft_vocab_size": 40}),
    "rnn": ("dspark", {"markov_rank": 4, "markov_head_type": "rnn", "draft_vocab_size": 96}),
    "no chain": ("dspark", {"markov_rank": 0, "confidence_head_with_markov": False, "draft_vocab_size": 96}),
    "fill-in with a chain": ("dspark", {"markov_rank": 4, "sample_from_anchor": False, "draft_vocab_size": 40}),
    "selector": ("dflash2", {"layer": WINDOW, "selector_rank": 4, "selector_top_k": 5, "draft_vocab_size": 96}),
    "selector, causal": (
        "dflash2",
        {
            "layer": WINDOW,
            "sliding_window_non_causal": False,
            "conv_kernel_size": 3,
            "conv_group_size": 8,
            "selector_rank": 4,
            "selector_top_k": 96,
            "draft_vocab_size": 96,
        },
    ),
}


@pytest.fixture(scope="module")
def package() -> ModuleType:
    pytest.importorskip("speculators.models.dflash2", reason="speculators is not installed")
    spec = importlib.util.spec_from_file_location("make_blocks", FILES / "make_blocks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_blocks"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", WRITTEN)
def test_heads_that_the_package_writes(
    name: str, package: ModuleType, tmp_path: Path, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine, round by round."""
    monkeypatch.chdir(FILES)
    kind, changes = WRITTEN[name]
    model = package.written(kind, tmp_path, {"draft_vocab_size": 64, **changes})
    wrapped = wrap(target, str(tmp_path))
    head = wrapped.head
    prompts = [torch.randint(96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (6, 19, 27)]
    completions = wrapped.generate(prompts, SamplingParams(max_new_tokens=12, return_drafts=True))
    found = list[tuple[list[int], list[int]]]()
    for prompt, completion in zip(prompts, completions, strict=True):
        ids, bonus = torch.tensor(prompt + completion.token_ids), len(prompt)
        aux = aux_of(target, head, ids)
        ours = oracle_rounds(target, head, prompt, completion)
        assert [a for a, _ in ours] == [b for _, b in ours]
        for stats, drafts in zip(completion.stats.rounds, completion.drafts, strict=True):
            if drafts:
                found.append((list(drafts), package.drafted(model, ids[: bonus + 1], aux[:bonus])[: len(drafts)]))
            bonus += stats.emitted
    assert len(found) > 12 and [ours for ours, _ in found] == [theirs for _, theirs in found]
