"""The commands end to end on a scripted model: files written, exit codes, and bad input that leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from evals import errors
from evals.runs.conversations import Worker
from specdec.cli.main import cli

pytest.importorskip("matplotlib")

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(plant: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run `specdec eval ...` in an empty folder, with a scripted model in place of every model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECDEC_DATA", raising=False)
    options: dict[str, Any] = {}
    monkeypatch.setattr(Worker.__init__, "__defaults__", (lambda spec: plant.Model(**options),))

    def run(*arguments: str, **model: Any) -> Result:
        options.update(model)
        return CliRunner().invoke(cli, ["eval", *arguments])

    return run


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"question {i} turn"]} for i in range(6)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "q.jsonl"


@pytest.mark.slow
@pytest.mark.thorough
def test_acceptance_writes_everything_it_was_asked_for(invoke: Invoke, data: str, tmp_path: Path) -> None:
    outputs = ["--output", "out/a.json", "--report", "out/a.html", "--spec-bench-dir", "out/answers"]
    result = invoke("acceptance", "--data", data, "--k", "1,3", *outputs)
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "out" / "a.json").read_text())
    assert [arm["k"] for arm in document["arms"]] == [0, 1, 3]
    assert len(document["worst"]) == 5
    assert (tmp_path / "out" / "a.html").read_text().startswith("<!DOCTYPE html>")
    assert len((tmp_path / "out" / "answers" / "k-3.jsonl").read_text().splitlines()) == 6
    (run,) = (tmp_path / "runs").iterdir()
    before = (run / "answers.jsonl").read_text()
    assert invoke("acceptance", "--data", data, "--num-speculative-tokens", "1,3").exit_code == 0
    assert (run / "answers.jsonl").read_text() == before and list((tmp_path / "runs").iterdir()) == [run]


@pytest.mark.parametrize(
    ("arguments", "asked", "ks"),
    [
        (["acceptance"], [None], [0, 4]),
        (["acceptance", "-k", "2"], [2], [0, 2]),
        (["compare", "k=1", "lookup"], [1, None], [1, 4]),
        (["compare", "k=1", "k=3"], [3], [1, 3]),
        (["compare", "k=1", "dtype=auto"], [1, None], [1, 4]),
        (["compare", "lookup", "lookup"], [None], [4, 4]),
    ],
    ids=["acceptance", "given", "one side", "both sides", "no side", "lookup twice"],
)
def test_without_k_the_draft_decides(
    invoke: Invoke,
    data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: SimpleNamespace,
    arguments: list[str],
    asked: list[int | None],
    ks: list[int],
) -> None:
    specs: list[Any] = []
    monkeypatch.setattr(Worker.__init__, "__defaults__", (lambda spec: specs.append(spec) or plant.Model(max_k=4),))
    result = invoke(*arguments, "--model", "m", "--data", data, "--output", "o.json")
    assert result.exit_code == 0, result.output
    assert [spec.options.num_speculative_tokens for spec in specs] == asked
    assert [arm["k"] for arm in json.loads((tmp_path / "o.json").read_text())["arms"]] == ks


def test_a_failed_question_shows_in_the_exit_code(invoke: Invoke, data: str) -> None:
    result = invoke("acceptance", "--data", data, poison="question 3 ")
    assert result.exit_code == 1 and "failed: question 3" in result.output


@pytest.mark.slow
def test_compare_two_heads_and_two_k(invoke: Invoke, data: str, tmp_path: Path) -> None:
    result = invoke("compare", "head-a", "head-b", "--model", "m", "--data", data, "--output", "c.json")
    assert result.exit_code == 0 and "head-b less head-a, paired" in result.output
    assert [arm["model"] for arm in json.loads((tmp_path / "c.json").read_text())["arms"]] == ["a", "b"]
    result = invoke("compare", "k=1", "k=3", "--data", data, "--output", "k.json")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "k.json").read_text())
    assert [(arm["model"], arm["k"]) for arm in document["arms"]] == [("a", 1), ("a", 3)]
    assert document["differences"]["metrics"]["tau"]["estimate"] > 0


def test_lossless_says_pass_and_fail_by_its_exit_code(
    invoke: Invoke, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from evals.lossless.greedy import Replay

    monkeypatch.setattr(Replay, "__init__", lambda self, model: None)
    monkeypatch.setattr(Replay, "logits", lambda self, ids: torch.arange(128.0))
    monkeypatch.setattr(torch.nn.Linear, "dtype", torch.float32, raising=False)
    result = invoke("lossless", "--data", data, "--mode", "greedy")
    assert result.exit_code == 0 and "PASS: output unchanged by speculation" in result.output
    result = invoke("lossless", "--data", data, "--mode", "greedy", "--run-dir", "other", defect=True)
    assert result.exit_code == 1 and "FAIL: speculation changes the output" in result.output
    assert "0 of 6 identical, 0 near ties, 6 defects" in result.output


def test_a_model_without_template_is_warned_about(
    invoke: Invoke, data: str, plant: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plant.Tokenizer, "chat_template", None)
    with pytest.warns(UserWarning, match="no chat template: .* accepts fewer drafts"):
        assert invoke("acceptance", "--data", data).exit_code == 0


BAD = [
    (["acceptance", "--data", "gone.jsonl"], "the file gone.jsonl does not exist"),
    (["acceptance", "--data", "bad.jsonl"], "bad.jsonl:2: not a line of JSON"),
    (["acceptance", "--data", "empty.jsonl"], "data set 'empty' has no questions"),
    (["acceptance", "--data", "mt_brench"], "unknown data set 'mt_brench'; known are"),
    (["acceptance", "--data", "gsm8k", "--data-dir", "."], "needs the file gsm8k/test.jsonl"),
    (
        ["acceptance", "--data", "q.jsonl", "--draft", "some/head"],
        "the head 'some/head' needs its target: give --model",
    ),
    (["acceptance", "--data", "q.jsonl", "--k", "0"], "0 is not in the range x>=1"),
    (["acceptance", "--data", "q.jsonl", "--top-k", "5"], "--top-k 5 decides nothing at temperature 0"),
    (["compare", "k=1", "k=3", "--data", "q.jsonl", "--top-p", "0.9"], "--top-p 0.9 decides nothing at temperature 0"),
    (["acceptance", "--data", "q.jsonl", "--workers", "3"], "--workers 3 is of Ray's workers: give --ray"),
    (["acceptance", "--data", "q.jsonl", "--data-dir", "."], "--data q.jsonl is not read from there"),
    (
        ["acceptance", "--data", "q.jsonl", "--k", "three"],
        "'three' is not a valid integer range",
    ),
    (
        ["acceptance", "--data", "q.jsonl", "--output", "folder"],
        "File 'folder' is a directory",
    ),
    (["lossless", "--data", "gone.jsonl"], "the file gone.jsonl does not exist"),
    (["compare", "k=0", "k=0", "--data", "q.jsonl"], "both sides have k=0"),
    (["compare", "depth=3", "k=1", "--data", "q.jsonl"], "key=value pairs of draft, k, backend, dtype"),
    (["gsm8k", "--data", "nowhere"], "the data folder nowhere does not exist"),
    (["gsm8k", "--data", "q.jsonl"], "give an existing test.jsonl"),
    (["gsm8k", "--tasks", "gsm9k"], "unknown task 'gsm9k'; known are lm-eval's and specdec_arithmetic"),
    (["gsm8k", "--data", "folder"], "the file folder/gsm8k/train.jsonl does not exist"),
    (["humaneval"], "pass --confirm-run-unsafe-code"),
]


IMPORTS_LM_EVAL = "--tasks"
CASES = [pytest.param(a, m, marks=[pytest.mark.long] if IMPORTS_LM_EVAL in a else [], id=" ".join(a)) for a, m in BAD]


@pytest.mark.parametrize(("arguments", "message"), CASES)
def test_bad_input_is_one_message_and_leaves_nothing(
    invoke: Invoke, data: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "fine"}\n{"prompt": \n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "folder").mkdir()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    result = invoke(
        *arguments, *(["--output", "o.json"] if arguments[0] != "humaneval" and arguments[-2] != "--output" else [])
    )
    assert result.exit_code == 2, result.output
    assert message in result.output and "Traceback" not in result.output
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (["acceptance", "--report", "r.html"], "matplotlib", "eval"),
        (["lossless"], "scipy", "eval"),
        (["acceptance"], "scipy", "eval"),
        (["acceptance", "--ray"], "ray", "ray"),
    ],
    ids=["report", "lossless", "few questions", "ray"],
)
def test_a_missing_extra_is_named_before_anything_runs(
    invoke: Invoke,
    data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    package: str,
    extra: str,
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == package else object())
    result = invoke(*arguments, "--data", data)
    assert result.exit_code == 2 and not (tmp_path / "runs").exists()
    assert f"needs the package '{package}'" in result.output and f"'specdec-hf[{extra}]'" in result.output


@pytest.mark.parametrize("command", ["acceptance", "lossless"])
def test_an_option_that_is_needed_is_asked_for(command: str, invoke: Invoke) -> None:
    result = invoke(command, "--model", "any")
    assert result.exit_code == 2 and "Missing option '--data'" in result.output
