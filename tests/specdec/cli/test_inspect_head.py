"""`specdec inspect HEAD` and `specdec export`, as a user runs them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from drafters.base import TargetFacts
from drafters.eagle3.checkpoint import load_eagle
from specdec.cli.export import export
from specdec.cli.inspect import inspect
from specdec.errors import HeadLoadError, InvalidInputError
from specdec.loading.heads import outline_target
from specdec.loading.names import builtin_path, is_available, target_of_head
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests import head_layouts

FILES = Path(__file__).parents[2] / "fixtures" / "speculators"
PLAIN = FILES / "written" / "plain"
SMALL = ["--device", "cpu", "--max-num-seqs", "4", "--max-model-len", "512", "-k", "4"]


def run(command: Any, *arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), env={"COLUMNS": "200"}, catch_exceptions=False)


@pytest.fixture
def few(tmp_path: Path) -> list[str]:
    """Options: three questions in place of the eight that the check has, where their number is not the point."""
    asked = ["Tom has 3 boxes of 12 eggs and sells 7 eggs.", "Anna buys 4 pens for 2 dollars.", "A farmer has 15 cows."]
    lines = [json.dumps({"question": f"{text} How many are there?"}) for text in asked]
    (tmp_path / "few.jsonl").write_text("\n".join(lines))
    return ["--file", str(tmp_path / "few.jsonl")]


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A copy of the built-in head that nobody knows the target of, its layers one too early."""
    folder = tmp_path / "head"
    shutil.copytree(builtin_path("gsm-llama-eagle3"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]  # the ids of SpecForge where aux layers belong
    del config["eagle_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.thorough
def test_a_head_and_its_target(head: Path) -> None:
    text = run(inspect, str(head), "--target", "gsm-llama", *SMALL).output
    assert "the head is READ WRONGLY" in text
    assert "likely cause: the aux layers were given as layers whose output is meant" in text
    assert "config eagle_aux_hidden_state_layer_ids (read as aux layers)" in text
    assert "give --head-override aux_layers=[2,4,5]" in text


@pytest.mark.slow
@pytest.mark.thorough
def test_what_it_says_to_give_makes_it_fine(head: Path) -> None:
    given = ("--target", "gsm-llama", "--head-override", "aux_layers=[2,4,5]", "--json", *SMALL)
    found = json.loads(run(inspect, str(head), *given).stdout)
    assert found["agreement"]["verdict"] == "fine" and found["aux_layers"] == [2, 4, 5]
    assert found["agreement"]["rounds"]["tau"] > 3 and len(found["agreement"]["tried"]) >= 8


def test_a_built_in_head_has_its_target() -> None:
    assert target_of_head(str(builtin_path("gsm-llama-eagle3"))) == "gsm-llama"
    assert target_of_head(str(builtin_path("gsm-deepseek"))) == "gsm-deepseek"
    assert is_available("gsm-llama") and not is_available("nobody/nothing-of-this-name")


def test_a_head_alone_is_shown_with_where_its_values_are_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no folder "target"
    text = run(inspect, str(PLAIN)).output
    assert "config transformer_layer_config.hidden_size" in text and "(1, 3, 6)" not in text and "1, 3, 6" in text
    assert "its files name the target target, which is not on this machine; give --target" in text
    fields = json.loads(run(inspect, str(PLAIN), "--json").stdout)["fields"]
    assert fields["norm_before_residual"] == {"value": True, "from": "config norm_before_residual"}
    assert fields["aux_layers"]["value"] == [1, 3, 6]
    changed = run(inspect, str(PLAIN), "--json", "--head-override", "norm_before_residual=false").output
    assert "chosen by the user" in json.loads(changed)["fields"]["norm_before_residual"]["from"]


def test_a_head_alone_with_ids_of_layers_says_what_they_depend_on(tmp_path: Path) -> None:
    """gpt-oss heads have [24, 30, 36] of 36 layers: aux layers, which only the target shows."""
    layout = head_layouts.specforge()
    alone = run(inspect, str(layout.write(tmp_path / "a")))
    assert "the ids are aux layers themselves" in " ".join(alone.output.split())
    numbered = {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 4, 7]}
    assert "themselves" not in run(inspect, str(layout.write(tmp_path / "b", **numbered))).output


def test_a_head_whose_layers_depend_on_its_target_needs_one(head: Path) -> None:
    config = json.loads((head / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"], config["num_aux_hidden_states"]
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadLoadError, match="their default depends on the target: give the target"):
        run(inspect, str(head))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "gsm-llama"], "go with a HEAD"),
        (["some-head", "--draft", "none"], "say the same"),
        (["some-head", "--target", "a", "--model", "b"], "say the same"),
        (["auto"], "belongs to a target"),
        (["none", "--target", "gsm-llama"], "HEAD 'none' is no head; leave it out"),
        (["some-head", "--target", "gsm-llama", "-k", "0"], "-k 0: .* give 1 or more"),
    ],
)
def test_arguments_that_contradict_each_other(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        run(inspect, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-k", "3"], "--num-speculative-tokens: it decides nothing of a block-parallel head"),
        (["--without-target-tensors", "--head-override", "x=1"], "target-tensors, --head-override: it decides nothing"),
    ],
)
def test_what_decides_nothing_of_a_block(arguments: list[str], message: str, tmp_path: Path) -> None:
    of_block = ["block", "--target", "gsm-llama", "--layout", "speculators", "--out", str(tmp_path / "out")]
    with pytest.raises(InvalidInputError, match=message):
        run(export, *of_block, *arguments)
    assert not (tmp_path / "out").exists()


def test_the_layout_of_blocks_is_refused_for_other_heads(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="auto: --layout z-lab is for block-parallel heads; give speculators"):
        run(export, "auto", "--target", "gsm-llama", "--layout", "z-lab", "--out", str(tmp_path / "out"))


@pytest.mark.slow
def test_the_built_in_block_head_drafts_the_same_once_exported(tmp_path: Path) -> None:
    run(export, "block", "--target", "gsm-llama", "--layout", "speculators", "--out", str(tmp_path / "out"))
    params, found = SamplingParams(max_new_tokens=24, return_drafts=True), []
    for head in ("block", str(tmp_path / "out")):
        with SpeculativeModel.from_pretrained("gsm-llama", head, device="cpu", kv_cache_tokens=512) as model:
            (completion,) = model.generate([list(range(40, 70))], params)
            found.append((completion.token_ids, completion.drafts))
    assert found[0] == found[1] and any(found[0][1])


@pytest.mark.slow
@pytest.mark.thorough
def test_a_module_agrees_with_the_target_whose_checkpoint_holds_it(few: list[str]) -> None:
    found = json.loads(run(inspect, "gsm-deepseek", "--json", *few, *SMALL).stdout)
    assert found["head"] == "MtpHead" and found["agreement"]["verdict"] == "fine"
    assert found["agreement"]["chains"] is None and found["agreement"]["rounds"]["tau"] > 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm-deepseek"], "gsm-deepseek: a multi-token-prediction module has no layout of its own"),
        (["mtp", "--target", "gsm-deepseek"], "mtp: a multi-token-prediction module has no layout of its own"),
        (["auto"], "HEAD 'auto' belongs to a target: give --target"),
        (
            ["gsm-llama-eagle3", "--verifier", "a/b", "-k", "3"],
            "--verifier, --num-speculative-tokens: only --layout spec",
        ),
        (["gsm-llama-eagle3", "--without-target-tensors"], "--without-target-tensors: only --layout speculators"),
    ],
)
def test_what_is_not_exported(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        run(export, *arguments, "--layout", "specforge", "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_head_with_its_targets_embedding_comes_back_without(tmp_path: Path) -> None:
    """specforge -> speculators, which holds the target's embedding -> specforge: the same tensors and settings."""
    made = {name: tmp_path / name for name in ("first", "between", "last")}
    of_target = ("--target", "gsm-llama", "--dtype", "bfloat16")
    run(export, "gsm-llama-eagle3", "--layout", "specforge", *of_target, "--out", str(made["first"]))
    run(export, str(made["first"]), "--layout", "speculators", *of_target, "--out", str(made["between"]))
    assert "embed_tokens.weight" in load_file(made["between"] / "model.safetensors")
    run(export, str(made["between"]), "--layout", "specforge", "--out", str(made["last"]))
    first, last = (load_file(made[name] / "model.safetensors") for name in ("first", "last"))
    assert first.keys() == last.keys() and all(torch.equal(tensor, last[name]) for name, tensor in first.items())
    assert (made["first"] / "config.json").read_text() == (made["last"] / "config.json").read_text()


def test_an_embedding_of_its_own_is_not_left_out(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "head"
    run(export, "gsm-llama-eagle3", "--layout", "speculators", "--target", "gsm-llama", "--out", str(folder))
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"][5, 7] += 0.25
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInputError, match=r"own_embed \(SGLang replaces it by the target's embedding"):
        run(export, str(folder), "--layout", "specforge", "--out", str(out))
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "someone/target"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InvalidInputError, match=r"own_embed .*is left out, but its target someone/target is not .*--target"
    ):
        run(export, str(folder), "--layout", "specforge", "--out", str(out))
    assert not out.exists()


def test_heads_of_eagle_1_are_not_exported(tmp_path: Path) -> None:
    folder = head_layouts.eagle1().write(tmp_path / "eagle1")
    with pytest.raises(InvalidInputError, match="an EAGLE-1 or EAGLE-2 head, which neither layout holds"):
        run(export, str(folder), "--layout", "speculators", "--out", str(tmp_path / "out"))


def test_a_speculators_configuration_needs_a_target_or_its_name(tmp_path: Path, head: Path) -> None:
    given = ("--layout", "speculators", "--out", str(tmp_path / "out"))
    with pytest.raises(InvalidInputError, match=r"(?m)give --target, or --without-target-tensors and --verifier$"):
        run(export, str(head), *given)
    with pytest.raises(InvalidInputError, match="give --target, or its name by --verifier"):
        run(export, str(head), *given, "--without-target-tensors")
    assert run(export, str(head), *given, "--without-target-tensors", "--verifier", "a/b").exit_code == 0


def test_auto_is_the_built_in_targets_own_head(tmp_path: Path) -> None:
    run(export, "auto", "--target", "gsm-llama", "--layout", "specforge", "--out", str(tmp_path))
    assert torch.equal(
        load_file(tmp_path / "model.safetensors")["fc.weight"],
        load_file(builtin_path("gsm-llama-eagle3") / "model.safetensors")["fc.weight"],
    )


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for layout in ("specforge", "speculators"):
        with pytest.raises(InvalidInputError, match=r"cannot write to the folder .*file/out: .*give another one"):
            run(export, "gsm-llama-eagle3", "--layout", layout, "--out", str(tmp_path / "file" / "out"))


def test_a_whole_model_given_as_a_head_is_said_to_be_one(tmp_path: Path) -> None:
    folder = shutil.copytree(builtin_path("gsm-llama"), tmp_path / "target")  # by no name that is known
    with pytest.raises(InvalidInputError, match="a whole language model: give it as the target or as a draft model"):
        run(export, str(folder), "--layout", "specforge", "--out", str(tmp_path / "out"))
    said = run(inspect, str(folder))
    assert said.exit_code == 0 and "a causal language model" in said.output and "give --target" in said.output


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
def test_the_built_in_head_is_exported_and_read_back(layout: str, tmp_path: Path) -> None:
    said = run(export, "gsm-llama-eagle3", "--layout", layout, "--out", str(tmp_path / "out"))
    assert said.exit_code == 0 and f"in the {layout} layout" in said.output
    facts = outline_target("gsm-llama").facts
    ours, theirs = (
        load_eagle(path, facts, torch.float32, "cpu") for path in (builtin_path("gsm-llama-eagle3"), tmp_path / "out")
    )
    for name, tensor in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor)
    assert theirs.aux_layers == (2, 4, 5) and theirs.target_ids.tolist() == ours.target_ids.tolist()
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.float16
    if layout == "speculators":
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        verifier = {"name_or_path": str(builtin_path("gsm-llama").resolve()), "architectures": ["LlamaForCausalLM"]}
        assert config["speculators_config"]["verifier"] == verifier
        assert torch.equal(stored["embed_tokens.weight"].float(), facts.embedding.to(torch.float16).float())
        assert target_of_head(tmp_path / "out") == verifier["name_or_path"]


def test_a_head_of_speculators_becomes_one_of_specforge_where_that_can_say_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InvalidInputError, match=r"norm_before_residual = True.*own_embed.*give --target"):
        run(export, str(PLAIN), "--layout", "specforge", "--out", str(out))
    assert not out.exists()
    run(export, str(FILES / "written" / "converted"), "--layout", "specforge", "--out", str(out), "--target", _target())
    weights = load_file(FILES / "target" / "model.safetensors")
    facts = TargetFacts(32, 96, 8, weights["model.embed_tokens.weight"], weights["lm_head.weight"])
    ours, theirs = (load_eagle(p, facts, torch.float32, "cpu") for p in (FILES / "written" / "converted", out))
    assert all(torch.equal(theirs.state_dict()[name], tensor) for name, tensor in ours.state_dict().items())
    assert theirs.spec.aux_layers == (2, 4, 5) and theirs.spec.rope.theta == 20000


def _target() -> str:
    return str(FILES / "target")


def test_exports_that_lack_something_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = FILES / "written" / "converted"  # without an embedding of its own
    out = str(tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InvalidInputError, match="exists and is not empty"):
        run(export, str(source), "--layout", "specforge", "--out", str(tmp_path / "full"))
    with pytest.raises(HeadLoadError, match="their default depends on the target: give the target"):
        run(export, str(source), "--layout", "speculators", "--out", out)
    layers = ["--head-override", "aux_layers=[2,4,5]"]
    with pytest.raises(InvalidInputError, match="is not on this machine: give --target, or --without-target-tensors"):
        run(export, str(source), "--layout", "speculators", "--out", out, *layers)
    assert not Path(out).exists()
    named = ["--without-target-tensors", "--verifier", "someone/target"]
    run(export, str(source), "--layout", "speculators", "--out", out, *named, *layers)
    config = json.loads((Path(out) / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/target"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_head_of_speculators_is_inspected_with_the_target_that_it_names(tmp_path: Path, few: list[str]) -> None:
    run(export, "gsm-llama-eagle3", "--layout", "speculators", "--out", str(tmp_path / "out"))
    found = json.loads(run(inspect, str(tmp_path / "out"), "--json", *few, *SMALL).stdout)
    assert found["target"] == str(builtin_path("gsm-llama").resolve())
    assert found["agreement"]["verdict"] == "fine" and found["agreement"]["rounds"]["tau"] > 3
