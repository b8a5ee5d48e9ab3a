"""The lm-eval model "specdec" as its users name it: registration, model arguments, several processes, every flag."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

import lm_eval
from lm_eval._cli.run import Run
from lm_eval.api.registry import get_model, model_registry

import specdec
from evals.accuracy import lm_eval_model
from evals.accuracy.accuracy import TASKS
from evals.accuracy.lm_eval_model import SpecdecLM, _load_options, register
from evals.runs.conversations import ModelSpec
from specdec.cli.main import cli
from specdec.errors import InvalidInputError
from specdec.loading.names import builtin_names
from tests.rank_server import run_python

__all__ = ["run_python"]

VALUE = "evals.accuracy.lm_eval_model:SpecdecLM"
built_in = pytest.mark.skipif("gsm-llama" not in builtin_names(), reason="no built-in target")


@pytest.mark.slow
@pytest.mark.thorough
def test_one_import_makes_the_model_and_lm_eval_s_own_known(run_python: Any) -> None:
    """In a fresh process: lm-eval reads its own list only while nothing is registered."""
    code = "import evals.accuracy.lm_eval_model; from lm_eval.api.registry import get_model, model_registry as m; "
    code += "print(get_model('specdec').__name__, 'hf' in m, 'vllm' in m)"
    done = run_python(code, env=dict(os.environ))
    assert done.stdout.split() == ["SpecdecLM", "True", "True"], done.stderr


@pytest.mark.parametrize("known", [EntryPoint("specdec", VALUE, "lm_eval.models"), VALUE, SpecdecLM, None])
def test_a_release_that_knows_the_entry_point_is_left_alone(
    known: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered = {"hf": "x:y", **({} if known is None else {"specdec": known})}
    monkeypatch.setattr(model_registry, "_objs", registered)
    register()
    assert registered["specdec"] is (SpecdecLM if known is None else known) and not caplog.records
    assert get_model("specdec") is SpecdecLM


def test_another_model_of_the_name_is_kept_and_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_registry, "_objs", {"specdec": "other.package:Model"})
    register()
    assert "another model of the name 'specdec': other.package:Model" in caplog.text


@pytest.mark.parametrize(
    ("given", "rows"), [((1, 9), 32), (("8", 9), 8), (("auto", None), 32), (("auto:4", 9), 9), (("auto", 9), 9)]
)
def test_batch_size(given: tuple[Any, Any], rows: int) -> None:
    batch_size, most = given
    assert _load_options({}, batch_size, None, most).max_num_seqs == rows


@pytest.mark.parametrize("wrong", ["many", "0", "auto:x"])
def test_a_wrong_batch_size_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidInputError, match=f"batch_size='{wrong}': a number from 1, auto, or auto:N"):
        _load_options({}, wrong, None)


def test_each_process_of_a_launch_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert str(_load_options({"device": "cuda:0"}, 1, None).device) == "cuda:3"
    assert str(_load_options({}, 1, None).device) == "cuda:3"
    assert str(_load_options({"device": "cpu"}, 1, None).device) == "cpu"
    with pytest.raises(InvalidInputError, match="starts its own processes: start lm-eval without accelerate launch"):
        _load_options({"tensor_parallel_size": 2}, 1, None)


def test_thinking_is_checked_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelSpec, "load", lambda spec: pytest.fail("loaded"))
    with pytest.raises(InvalidInputError, match="enable_thinking=True without think_end_token"):
        SpecdecLM("gsm-llama", enable_thinking=True)


@built_in
@pytest.mark.slow
def test_a_loaded_model_can_be_given() -> None:
    with specdec.SpeculativeModel.from_pretrained("gsm-llama", "auto", device="cpu", max_model_len=64) as model:
        lm = SpecdecLM(model, device="cuda:0", batch_size=1, max_gen_toks=4, think_end_token="7")
        assert lm.max_length == 64 and lm.max_gen_toks == 4 and lm.world_size == 1
        with pytest.raises(InvalidInputError, match="so draft, max_num_seqs come too late"):
            SpecdecLM(model, draft="auto", max_num_seqs=3)


@built_in
@pytest.mark.long
def test_two_processes_share_the_documents(tmp_path: Path) -> None:
    """As `accelerate launch` starts them: the first has the results of both. (A process with fewer documents than
    others asks one twice, which lm-eval adds to its answers.)"""
    code = f"""
import json, os, lm_eval, evals.accuracy.lm_eval_model
from lm_eval.tasks import TaskManager
from evals.accuracy.accuracy import TASKS
found = lm_eval.simple_evaluate(model="specdec", model_args="pretrained=gsm-llama,draft=auto,max_gen_toks=16",
    tasks=["specdec_arithmetic"], limit=3, device="cpu", bootstrap_iters=0,
    apply_chat_template=True, task_manager=TaskManager(include_path=str(TASKS), include_defaults=False))
name = {str(tmp_path)!r} + f"/{{os.environ.get('WORLD_SIZE', '1')}}-{{os.environ.get('RANK', '0')}}.json"
rows = [] if found is None else found["samples"]["specdec_arithmetic"]
json.dump(sorted((row["doc_id"], row["resps"][0][0], row["exact_match"]) for row in rows), open(name, "w"))
"""
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000), "WORLD_SIZE": "2"}
    alone = subprocess.Popen([sys.executable, "-c", code])
    both = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **here, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    assert [process.wait(300) for process in (alone, *both)] == [0, 0, 0]
    right, found, other = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1"))
    assert [doc for doc, text, _ in found if text] == [0, 1, 2] and found == right and other == []


VALUES = {"samples": '{"a": [0]}', "cache_requests": "refresh", "fewshot_as_multiturn": "false", "seed": "3"}
OLD = tuple(map(int, version("lm_eval").split(".")[:3])) < (0, 4, 13)
"""Its command takes metadata as JSON, and refuses each value of --cache_requests that it allows."""


def flags() -> list[argparse.Action]:
    """Every flag of `lm_eval run`."""
    subparsers = argparse.ArgumentParser().add_subparsers()
    none = {"help", "cache_requests"} if OLD else {"help"}
    return [each for each in Run(subparsers)._parser._actions if each.option_strings and each.dest not in none]


def written(flag: argparse.Action, word: str) -> list[str]:
    """A flag as it is typed, with a value where it takes one."""
    if flag.nargs == 0:
        return [word]
    of_pairs = {"model_args", "gen_kwargs", "metadata"} | {f"{name}_args" for name in ("wandb", "trackio")}
    pairs = flag.dest in of_pairs or flag.dest.endswith(("config_args", "log_args"))
    if OLD and flag.dest == "metadata":
        return [word, '{"a": 1, "b": "x"}']
    return [word, VALUES.get(flag.dest, "a=1,b=x" if pairs else "3")]


@pytest.mark.parametrize("form", [0, -1], ids=["first name", "last name"])
def test_every_flag_of_lm_eval_run_is_passed_through(form: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[dict[str, Any]] = []
    monkeypatch.setattr(Run, "_execute", staticmethod(lambda given: read.append(vars(given))))
    typed = [each for flag in flags() for each in written(flag, flag.option_strings[form])]
    monkeypatch.setattr(sys, "argv", ["specdec"])
    for start in ([], ["run"]):
        cli(["eval", "lm-eval", *start, *typed], standalone_mode=False)
    stock = argparse.ArgumentParser()
    right = vars(Run(stock.add_subparsers())._parser.parse_args(typed))
    ours = [{name: value for name, value in given.items() if name in right} for given in read]
    assert len(flags()) > 30 and [{**given, "func": None} for given in ours] == [{**right, "func": None}] * 2


@pytest.mark.parametrize(
    ("typed", "added"),
    [
        (["--tasks", "gsm8k"], True),
        (["-tgsm8k"], True),
        (["--config=a.yaml"], True),
        (["-C", "b.yaml"], False),
        (["--tasks=gsm8k", "--include_path=x"], False),
        (["ls", "tasks"], False),
    ],
)
def test_our_tasks_are_known_unless_a_folder_is_named(
    typed: list[str], added: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("model: specdec\n")
    Path("b.yaml").write_text("model: specdec\ninclude_path: mine\n")
    read: list[list[str]] = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: read.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["specdec"])
    cli(["eval", "lm-eval", *typed], standalone_mode=False)
    assert read == [[*typed, *(["--include_path", str(TASKS)] if added else [])]]


def test_the_page_names_the_newest_release_that_reads_no_entry_points() -> None:
    """Where this fails, a release reads them: test `lm_eval --model specdec` with it, and name it there."""
    sources = Path(lm_eval.__file__).parent.glob("*/*.py")
    assert not [path for path in sources if "entry_points" in path.read_text("utf-8")]
    page = (Path(lm_eval_model.__file__).parents[2] / "docs" / "evaluation.md").read_text("utf-8")
    newest = re.search(r"up to ([\d.]+), the newest", page)
    assert newest is not None and version("lm_eval") <= newest[1]


def test_the_entry_point_names_the_class() -> None:
    text = (Path(lm_eval_model.__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    assert f'[project.entry-points."lm_eval.models"]\nspecdec = "{VALUE}"' in text
