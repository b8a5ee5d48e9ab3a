"""A head given alone: the target that its own config.json names is loaded with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes import LetterTokenizer

from drafters.eagle3.family import target_of
from specdec import SpeculativeModel
from specdec.cli.main import cli
from specdec.cli.options import load_model
from specdec.errors import HeadMismatchError, InvalidInputError, ModelLoadError
from specdec.loading.names import Pair, load_pair, pair_of, resolve
from specdec.loading.progress import startup_progress
from specdec.options import LoadOptions
from specdec.requests.sampling import SamplingParams
from tests.head_layouts import LAYOUTS, SPECULATORS, target

_DATA = ("--data", "arithmetic", "--limit", "1")
SIZES: dict[str, Any] = {"max_num_seqs": 2, "page_size": 4, "kv_cache_tokens": 200, "num_speculative_tokens": 3}


def named(name: str) -> dict[str, Any]:
    config = SPECULATORS["speculators_config"]
    return {"speculators_config": config | {"verifier": config["verifier"] | {"name_or_path": name}}}


def head_for(tmp_path: Path) -> tuple[Path, Path]:
    """(target, head) as folders; the head names the target."""
    target().save_pretrained(tmp_path / "target")
    name = str(tmp_path / "target")
    return tmp_path / "target", LAYOUTS["speculators_llama"]().write(tmp_path / "head", **named(name))


@pytest.mark.slow
def test_a_head_alone_brings_its_target(tmp_path: Path) -> None:
    folder, head = head_for(tmp_path)
    assert target_of(head) == str(folder)
    prompt, params = [3, 1, 4, 1, 5], SamplingParams(max_new_tokens=12)
    with SpeculativeModel.from_pretrained(head, tokenizer=LetterTokenizer(), **SIZES) as alone:
        assert alone.head is not None and alone.head.aux_layers == (2, 4, 6)
        assert alone.checkpoint is not None and alone.checkpoint.name == str(folder)
        (ours,) = alone.generate([prompt], params)
    with SpeculativeModel.from_pretrained(folder, head, tokenizer=LetterTokenizer(), **SIZES) as both:
        (theirs,) = both.generate([prompt], params)
    assert ours.token_ids == theirs.token_ids and ours.stats.rounds == theirs.stats.rounds
    assert sum(r.accepted for r in ours.stats.rounds) > 0


def test_deepspec_names_it_elsewhere(tmp_path: Path) -> None:
    head = LAYOUTS["deepspec"]().write(tmp_path / "head")
    assert target_of(head) == "Qwen/Qwen3-4B"
    assert target_of(LAYOUTS["safeailab"]().write(tmp_path / "other")) is None


def test_a_head_that_names_none_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"it is a draft head \(EAGLE-3\); give it as draft="):
        SpeculativeModel.from_pretrained(LAYOUTS["specforge"]().write(tmp_path), tokenizer=LetterTokenizer())


def test_a_target_that_is_not_there_is_explained(tmp_path: Path) -> None:
    head = LAYOUTS["speculators_llama"]().write(tmp_path, **named("/nowhere/at/all"))
    words = r"/nowhere/at/all(.|\n)*a name from config.json of the head .*give its folder as the target"
    with pytest.raises(ModelLoadError, match=words):
        SpeculativeModel.from_pretrained(head, tokenizer=LetterTokenizer())
    result = CliRunner().invoke(cli, ["generate", "a", "--model", str(head)])
    assert result.exit_code == 2 and "a name from config.json of the head" in result.output


@pytest.mark.slow
def test_a_target_that_the_head_does_not_fit_is_explained(tmp_path: Path) -> None:
    head = LAYOUTS["speculators_llama"]().write(tmp_path, **named("gsm-deepseek"))
    words = r"hidden size(.|\n)*The target is 'gsm-deepseek', a name from config.json of the head .*another target"
    with pytest.raises(HeadMismatchError, match=words):
        SpeculativeModel.from_pretrained(head)
    with pytest.raises(HeadMismatchError, match=r"(?m)this target has \d+$"):
        SpeculativeModel.from_pretrained("gsm-deepseek", head)


def test_what_a_head_names_is_no_step_of_a_start(tmp_path: Path) -> None:
    _, head = head_for(tmp_path)
    with startup_progress() as seconds:
        pair_of(head, None)
    assert seconds == {}


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.cases(1)
def test_a_head_alone_without_a_head_is_refused(known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """known: its configuration is here before anything is loaded."""
    folder, head = head_for(tmp_path)
    if not known:
        first = iter([Pair(str(head), None)])
        found = pair_of
        monkeypatch.setattr("specdec.loading.names.pair_of", lambda *given: next(first, None) or found(*given))
    tokenizer = {"tokenizer": str(resolve("gsm-llama"))}
    with pytest.raises(InvalidInputError, match=f"--draft none: --model {head} is a draft head.*--model {folder}"):
        load_model(str(head), "none", LoadOptions(**SIZES, **tokenizer))


def test_what_names_both_or_a_revision(tmp_path: Path) -> None:
    folder, head = head_for(tmp_path)
    assert pair_of(head, head).named_by is None, "a user's own draft is never replaced"
    assert pair_of(folder, None).target is folder
    assert pair_of("gsm-llama", None).target == "gsm-llama"
    assert pair_of(folder, "auto").draft == pair_of("gsm-llama", "auto").draft == "auto", "of a target it is built in"
    alone = pair_of(head, "auto")
    assert (alone.target, alone.draft) == (str(folder), head)
    assert pair_of(tmp_path / "nothing", None).named_by is None
    with pytest.raises(InvalidInputError, match=r"is a head, whose config\.json names the target"):
        pair_of(head, None, revision="main")
    (head / "config.json").write_text("[1")
    assert pair_of(head, None).named_by is None
    (head / "config.json").write_text(json.dumps([1]))
    assert pair_of(head, None).named_by is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "How many is 3 times 4?", "-k", "3", "--max-new-tokens", "8", "--stats"],
        ["eval", "acceptance", *_DATA, "--k", "3", "--max-new-tokens", "8", "--output", "found.json"],
        pytest.param(["eval", "lossless", *_DATA, "--k", "3", "--mode", "greedy"], marks=pytest.mark.slow),
        ["eval", "compare", "k=1", "k=3", *_DATA, "--max-new-tokens", "8"],
    ],
    ids=["generate", "acceptance", "lossless", "compare"],
)
@pytest.mark.cases(1)
def test_every_command_takes_a_head_alone(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exported head of gsm-llama, which names it."""
    monkeypatch.chdir(tmp_path)
    said = ["export", "gsm-llama-eagle3", "--layout", "speculators", "--target", "gsm-llama", "--out", "head"]
    assert CliRunner().invoke(cli, said).exit_code == 0
    result = CliRunner().invoke(cli, [*command, "--model", "head"])
    assert result.exit_code == 0, result.output
    if command[1] == "acceptance":
        document = json.loads((tmp_path / "found.json").read_text())
        loaded = document["provenance"]["settings"]["models"]["main"]
        assert (loaded["target"], loaded["head"]) == ("gsm-llama", "Eagle3Head")


def in_cache(hub: Path, name: str, folder: Path) -> None:
    """Put a folder into the hub's cache, in its layout."""
    repo = hub / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, repo / "snapshots" / ("a" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)


@pytest.mark.slow
def test_a_head_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, head = head_for(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    name = "RedHatAI/tiny-speculator.eagle3"
    tried: list[Any] = []

    def load(target: Any) -> str:
        """As transformers: it fetches a configuration before it refuses it."""
        tried.append(target)
        if target == name:
            in_cache(tmp_path / "hub", name, head)
            raise ModelLoadError("it has no model_type")
        return "loaded"

    loaded, pair = load_pair(name, None, None, load)
    assert (loaded, pair.draft) == ("loaded", name)
    assert tried == [name, str(folder)]
    with SpeculativeModel.from_pretrained(name, tokenizer=LetterTokenizer(), **SIZES) as alone:  # from the cache
        assert alone.head is not None and alone.checkpoint is not None and alone.checkpoint.name == str(folder)
    tried.clear()
    with pytest.raises(ModelLoadError, match="no such"):
        load_pair("some/other", None, None, lambda target: refuse(tried, target))
    assert tried == ["some/other"], "what is no head is tried once"


def refuse(tried: list[Any], target: Any) -> str:
    tried.append(target)
    raise ModelLoadError("no such model")
