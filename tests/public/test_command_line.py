"""The `specdec` command as a person meets it: help with examples, one-line errors, numbers that can be read."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import specdec
from tests.head_layouts import LAYOUTS
from tests.rank_server import start_python

__all__ = ["start_python"]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["specdec"]
MODULE, _, NAME = SCRIPT.partition(":")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the `specdec` script of this tree in an empty folder: arguments -> (exit code, stdout, stderr)."""
    main = getattr(importlib.import_module(MODULE), NAME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["specdec", *arguments])
            with pytest.raises(SystemExit) as ended:
                main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return call


def commands(run: Run, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every command below `path` with its help."""
    code, text, _ = run(*path, "--help")
    assert code == 0, path
    yield path, text
    _, found, listed = text.partition("Commands:\n")
    for line in listed.split("\n\n")[0].splitlines() if found else []:
        name = re.match(r"  (\S+)  ", line)
        if name and (*path, name[1]) != ("eval", "lm-eval"):
            yield from commands(run, *path, name[1])


def test_every_help_has_examples_whose_options_exist(run: Run) -> None:
    helps = dict(commands(run))
    assert len(helps) >= 11 and ("train", "mtp") in helps
    for path, text in helps.items():
        _, found, examples = text.partition("Examples:\n")
        lines = [line.strip() for line in examples.splitlines() if line.strip()]
        assert found and lines, f"specdec {' '.join(path)} --help has no examples"
        for line in lines:
            check_example(line[line.index("specdec ") :], helps)


def check_example(line: str, helps: dict[tuple[str, ...], str]) -> None:
    words = shlex.split(line)[1:]
    path = max((p for p in helps if tuple(words[: len(p)]) == p), key=len)
    assert path, line
    for word in words[len(path) :]:
        if word.startswith("-"):
            assert re.search(rf"(^|[\s,]){re.escape(word)}\b", helps[path]), f"{line}: no option {word}"


@pytest.mark.slow
def test_lm_eval_help_has_an_example(run: Run) -> None:
    pytest.importorskip("lm_eval")
    code, shown, _ = run("eval", "lm-eval", "--help")
    assert code == 0 and "Examples:\n  specdec eval lm-eval --model specdec" in shown and "--tasks" in shown


@pytest.mark.slow
def test_inspect_is_for_people(run: Run) -> None:
    code, text, _ = run("inspect", "--device", "cpu")
    assert code == 0 and "6,820,096 (6.82 M)" in text and "2,048" in text and " MiB" in text
    assert "target and head fit" in text and "it fits in memory" in text
    assert "None" not in text


@pytest.mark.slow
@pytest.mark.thorough
def test_inspect_says_where_a_module_came_from(run: Run) -> None:
    code, text, _ = run("inspect", "--model", "gsm-deepseek", "--draft", "mtp", "--device", "cpu")
    assert code == 0 and "model.safetensors: model.layers.12." in text and "eh_proj.weight" in text
    assert re.search(r"concat +│ embedding_first +│ DeepSeek-style", text)
    assert re.search(r"feedback +│ post_norm +│ default", text)
    arguments = ("--model", "gsm-deepseek", "--draft", "mtp", "--mtp-concat", "embedding_first", "--device", "cpu")
    assert re.search(r"concat +│ embedding_first +│ option mtp_concat", run("inspect", *arguments)[1])


@pytest.mark.slow
def test_prompts_of_a_file_are_one_batch(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, plain = list[int](), specdec.SpeculativeModel.stream

    def stream(self: Any, prompts: Any, params: Any = None, **options: Any) -> Any:
        sizes.append(len(prompts))
        return plain(self, prompts, params)

    monkeypatch.setattr(specdec.SpeculativeModel, "stream", stream)
    lines = [json.dumps({"question": f"Tom has {n} eggs and buys {n}. How many?"}) for n in (2, 3, 4)]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    code, text, _ = run("generate", "--file", "q.jsonl", "--device", "cpu", "--max-new-tokens", "30")
    assert code == 0 and sizes == [3]
    assert [part in text for part in ("[1/3]", "[2/3]", "[3/3]")] == [True] * 3
    assert text.index("[1/3]") < text.index("[2/3]") < text.index("[3/3]")


@pytest.mark.parametrize("name", ["empty.jsonl", "blank.jsonl", "empty.txt"])
def test_an_empty_file_of_prompts_is_an_error(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("" if "empty" in name else "\n \n")
    code, out, err = run("generate", "--file", name, "--model", "no-such-model")
    assert code == 2 and not out and name in err and "no-such-model" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "hi", "--model", "/no/such/model"),
        ("generate", "hi", "--draft", "/no/such/head", "--device", "cpu"),
        ("generate", "hi", "--dtype", "int7"),
        ("inspect", "--device", "no-such-device"),
        ("eval", "acceptance", "--data", "gone.jsonl"),
    ],
)
def test_an_error_is_one_message_and_a_pointer(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments)
    assert code in (1, 2) and not out and "Traceback" not in err
    *message, pointer = err.splitlines()
    assert message[0].startswith("Error: ") and pointer.startswith("See docs/reference/errors.md#")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--top-k", "5"), "--top-k 5 decides nothing at temperature 0"),
        (("--json", "--stats"), "--json has the statistics"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_first(run: Run, options: tuple[str, ...], words: str) -> None:
    code, out, err = run("generate", "hi", "--model", "no-such-model", *options)
    assert code == 2 and not out and words in err and "leave" in err


def test_ctrl_c_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(specdec.SpeculativeModel, "from_pretrained", interrupted)
    code, out, err = run("generate", "hi")
    assert code == 130 and not out and len(err.strip().splitlines()) == 1 and "interrupted" in err


@pytest.mark.slow
@pytest.mark.thorough
def test_a_closed_pipe_is_no_traceback(tmp_path: Path, start_python: Any) -> None:
    """The reader has left before the first line is printed."""
    LAYOUTS["specforge"]().write(tmp_path / "head")
    reader, writer = os.pipe()
    os.close(reader)
    code, around = f"from {MODULE} import {NAME}; {NAME}()", {**os.environ, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "stderr").open("w+") as stderr:
        streams = {"stdout": writer, "stderr": stderr.fileno()}
        done = start_python(code, "inspect", str(tmp_path / "head"), env=around, **streams).wait()
        os.close(writer)
        said = (tmp_path / "stderr").read_text()
    assert done == 1, said
    assert "Traceback" not in said and "BrokenPipe" not in said


@pytest.mark.slow
@pytest.mark.thorough
def test_definitions_are_printed_when_asked_for(run: Run) -> None:
    arguments = ("--data", "arithmetic", "--limit", "2", "--k", "2", "--max-new-tokens", "12", "--warmup", "0")
    plain = run("eval", "acceptance", "--device", "cpu", *arguments)[1]
    explained = run("eval", "acceptance", "--device", "cpu", *arguments, "--explain")[1]
    assert "Tokens kept per verification round" not in plain and "--explain" in plain
    assert explained.count("Tokens kept per verification round") == 1


@pytest.mark.slow
@pytest.mark.thorough
def test_the_page_shows_the_question_and_folds_the_provenance(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "How many legs have 3 <cats>?"}) + "\n")
    arguments = ("--data", "q.jsonl", "--k", "2", "--max-new-tokens", "12", "--warmup", "0", "--worst", "1")
    assert run("eval", "acceptance", "--device", "cpu", *arguments, "--report", "r.html")[0] == 0
    page = (tmp_path / "r.html").read_text()
    assert "How many legs have 3 &lt;cats&gt;?" in page and page.index("<details>") < page.index("settings_sha256")
