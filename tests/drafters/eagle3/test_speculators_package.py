"""The real speculators package, recorded: its own heads are read and draft as its forward says, ours are read by it.

Oracle: what tests/fixtures/speculators/make.py noted of the package's own forward (speculators 0.9.0).
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fakes import wrap
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from drafters.base import TargetFacts
from drafters.eagle3.checkpoint import load_eagle
from drafters.eagle3.export import Verifier, export_eagle3
from drafters.eagle3.formats import target_named_by
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.overrides import Eagle3Overrides
from drafters.unroll import unroll
from specdec import SamplingParams
from specdec.loading.heads import outline_target
from specdec.loading.names import builtin_path

FILES = Path(__file__).parents[2] / "fixtures" / "speculators"
WRITTEN = sorted(path.name for path in (FILES / "written").iterdir())
EXPORTED = sorted(path.name for path in (FILES / "exported").iterdir())
FOLDERS = [FILES / "written" / name for name in WRITTEN] + [FILES / "exported" / name for name in EXPORTED]
STEPS = 4


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(FILES / "target", dtype=torch.float32).eval()


def load(folder: Path, target: LlamaForCausalLM, **overrides: Any) -> Eagle3Head:
    facts = TargetFacts(32, 96, 8, target.get_input_embeddings().weight, target.lm_head.weight)
    return load_eagle(folder, facts, torch.float32, "cpu", Eagle3Overrides.of(overrides))


def errors(head: Eagle3Head, folder: Path) -> list[float]:
    """Largest difference of each step's logits from the package's, over rows whose token the text has."""
    said = load_file(folder / "expected.safetensors")
    outputs = unroll(head, said["text"][None], said["aux"][None], STEPS)
    rows = range(len(said["text"]) - 1, 0, -1)
    pairs = [(head.logits(x[:n]), right[:n]) for x, right, n in zip(outputs, said["logits"], rows, strict=False)]
    return [float((ours - right).detach().abs().max()) for ours, right in pairs]


def test_the_recorded_heads_are_those_that_are_meant() -> None:
    assert (WRITTEN, EXPORTED) == (["biases", "converted", "plain", "qwen3"], ["deep", "trained"])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_the_logits_are_the_packages(folder: Path, target: LlamaForCausalLM) -> None:
    found = errors(load(folder, target), folder)
    assert len(found) == STEPS and max(found) < 1e-4, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("plain", {"norm_before_residual": False}),
        ("plain", {"aux_layers": [1, 3, 5]}),
        ("converted", {"rope_theta": 10000.0, "rope_parameters": None}),
        ("biases", {"rms_norm_eps": 1e-2}),
    ],
)
@pytest.mark.cases(1)
def test_a_head_that_is_read_otherwise_says_something_else(
    name: str, wrong: dict[str, Any], target: LlamaForCausalLM
) -> None:
    folder = FILES / "written" / name
    if "aux_layers" in wrong:  # the noted states are of the right layers: it is the drafts of a round that change
        assert drafted(target, folder, head_overrides=wrong) != right_drafts(folder)
    else:
        assert max(errors(load(folder, target, **wrong), folder)) > 1e-2


def test_the_wrong_feedback_shows_from_the_second_step_on(target: LlamaForCausalLM) -> None:
    folder = FILES / "written" / "qwen3"
    found = errors(load(folder, target, feedback="pre_norm"), folder)
    assert found[0] < 1e-4 and min(found[1:]) > 1e-2


def right_drafts(folder: Path) -> dict[int, list[int]]:
    """The package's drafts by the number of tokens before them."""
    said = load_file(folder / "expected.safetensors")
    first = len(said["text"]) - len(said["drafts"]) + 1
    return {first + i: drafts for i, drafts in enumerate(said["drafts"].tolist())}


def drafted(target: LlamaForCausalLM, folder: Path, head: str = "", **options: Any) -> dict[int, list[int]]:
    """The engine's drafts by the number of tokens before them, for the text that was noted."""
    said = load_file(folder / "expected.safetensors")
    text, prompt = said["text"].tolist(), len(said["text"]) - len(said["drafts"])
    with wrap(target, head or str(folder), num_speculative_tokens=STEPS, **options) as model:
        params = SamplingParams(max_new_tokens=len(text) - prompt, ignore_eos=True, return_drafts=True)
        (done,) = model.generate([text[:prompt]], params)
    assert done.token_ids == text[prompt:]
    found, length = {}, prompt + 1
    for drafts, record in zip(done.drafts or (), done.stats.rounds, strict=True):
        found[length] = list(drafts)
        length += record.emitted
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.cases(1)
def test_the_engine_drafts_what_the_package_drafts_in_every_round(name: str, target: LlamaForCausalLM) -> None:
    folder = FILES / "written" / name
    found, right = drafted(target, folder), right_drafts(folder)
    assert len(found) >= 4
    assert all(drafts == right[length][: len(drafts)] for length, drafts in found.items())


def fixture_module() -> ModuleType:
    """ours.py, which make.py imports, too."""
    spec = importlib.util.spec_from_file_location("speculators_fixture", FILES / "ours.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ours(target: LlamaForCausalLM) -> dict[str, Eagle3Head]:
    """The heads that were exported for the package, made anew."""
    made: dict[str, Eagle3Head] = fixture_module().heads(load_file(FILES / "target" / "model.safetensors"))
    return made


@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_is_the_file_that_the_package_read(name: str, target: LlamaForCausalLM, tmp_path: Path) -> None:
    """So what the package computed from that file holds for what is exported today."""
    head, folder = ours(target)[name], FILES / "exported" / name
    export_eagle3(
        head, tmp_path, "speculators", verifier=Verifier("target", ("LlamaForCausalLM",)), dtype=torch.bfloat16
    )
    assert (tmp_path / "config.json").read_text() == (folder / "config.json").read_text()
    again, read = (load_file(path / "model.safetensors") for path in (tmp_path, folder))
    assert again.keys() == read.keys()
    assert all(torch.equal(again[key], tensor) and again[key].dtype == tensor.dtype for key, tensor in read.items())


@pytest.mark.parametrize("name", EXPORTED)
def test_what_the_package_computed_is_what_the_head_says_before_its_export(name: str, target: LlamaForCausalLM) -> None:
    head = ours(target)[name]
    assert max(errors(head, FILES / "exported" / name)) < 1e-4
    wrong = replace(head.spec, norm_before_residual=not head.spec.norm_before_residual)
    d2t = head.target_ids - torch.arange(len(head.target_ids))
    other = Eagle3Head(wrong, target.get_input_embeddings().weight, target.lm_head.weight, d2t)
    other.load_state_dict(head.state_dict())
    assert max(errors(other, FILES / "exported" / name)) > 1e-2


def test_the_packages_configuration_names_its_target() -> None:
    config = json.loads((FILES / "written" / "plain" / "config.json").read_text())
    assert target_named_by(config) == "target"


@pytest.fixture(scope="module")
def trained() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(builtin_path("gsm-llama"), dtype=torch.float32).eval()


def test_the_trained_head_that_the_package_read_is_what_is_exported_today(tmp_path: Path) -> None:
    facts = outline_target("gsm-llama").facts
    head = load_eagle(builtin_path("gsm-llama-eagle3"), facts, torch.float32, "cpu")
    export_eagle3(head, tmp_path, "speculators", verifier=Verifier("gsm-llama", ()), dtype=torch.float16)
    digest = fixture_module().digest
    tensors = load_file(tmp_path / "model.safetensors")
    assert digest(tensors) == (FILES / "built-in" / "digest.txt").read_text().strip()
    assert digest(tensors | {"d2t": tensors["d2t"] + 1}) != digest(tensors)


@pytest.mark.slow
def test_the_trained_head_says_and_drafts_what_the_package_read_from_its_export(trained: LlamaForCausalLM) -> None:
    said = load_file(FILES / "built-in" / "expected.safetensors")
    facts = TargetFacts(256, 2048, 8, trained.get_input_embeddings().weight, trained.lm_head.weight)
    head = load_eagle(builtin_path("gsm-llama-eagle3"), facts, torch.float32, "cpu")
    with torch.no_grad():
        states = trained(said["text"][None], output_hidden_states=True).hidden_states
        aux = torch.cat([states[layer] for layer in (2, 4, 5)], dim=-1)
        outputs = unroll(head, said["text"][None], aux, STEPS)
    last = range(len(said["text"]) - 1 - said["logits"].shape[1], len(said["text"]) - 1)
    for x, right in zip(outputs, said["logits"], strict=True):
        assert float((head.logits(x[last.start : last.stop]) - right).abs().max()) < 1e-3
    found = drafted(trained, FILES / "built-in", head=str(builtin_path("gsm-llama-eagle3")))
    right = right_drafts(FILES / "built-in")
    assert all(drafts == right[length][: len(drafts)] for length, drafts in found.items())
    assert 4 < len(found) < 20  # rounds that emitted several tokens each
