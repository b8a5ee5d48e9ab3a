"""The command `specdec batch`, as a user runs it."""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specdec.cli.main import cli
from specdec.model import SpeculativeModel
from tests.public import soak_batches
from tests.specdec.extensions.batches.made import read, write

ROWS: list[Any] = [
    {"id": 7, "prompt": "w1 w2", "metadata": {"from": "me"}},
    {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "w3", "temperature": 1.0}},
    {"token_ids": [4, 5], "max_tokens": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    soak_batches.save_model(folder)
    return folder


def run(folder: Path | str, source: Path, *options: str) -> Result:
    sizes = ("--draft", "lookup", "--device", "cpu", "--kv-cache-tokens", "1024", "--max-new-tokens", "4")
    command = ["batch", str(source), str(source.with_name("out.jsonl")), "--model", str(folder), *sizes, *options]
    return CliRunner().invoke(cli, command)


@pytest.mark.slow
def test_a_batch_and_the_same_command_again(folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *ROWS)
    done = run(folder, source)
    assert done.exit_code == 0, done.output
    assert done.stdout == "" and "3 of 3 rows have ended, 0 with an error; 10 new tokens in" in done.stderr
    found = {each.get("line") or each["id"]: each for each in read(tmp_path / "out.jsonl")}
    assert found[1]["id"] == 7 and found[1]["metadata"] == {"from": "me"} and found[3]["new_tokens"] == 2
    body = found["batch_req_2"]["response"]["body"]
    assert body["model"] == str(folder) and body["choices"][0]["text"]
    with SpeculativeModel.from_pretrained(folder, device="cpu", kv_cache_tokens=1024) as model:
        assert found[1]["token_ids"] == model.generate("w1 w2", max_new_tokens=4)[0].token_ids
    again = run(folder, source, "--max-num-seqs", "2")  # a size: no answer depends on it
    assert again.exit_code == 0 and "3 of 3 rows have ended (3 in earlier runs)" in again.stderr


@pytest.mark.slow
@pytest.mark.thorough
def test_the_page_about_batches_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "batches.md").read_text("utf-8")
    rows, told = re.findall(r"```json\n(.*?)```", page, flags=re.S)
    command = next(line for line in page.splitlines() if line.startswith("specdec batch "))
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text(rows, "utf-8")
    done = CliRunner().invoke(cli, [*shlex.split(command)[1:], "--device", "cpu"])
    assert done.exit_code == 1 and "5 of 5 rows have ended, 1 with an error" in done.stderr
    answers = Path("answers.jsonl").read_text("utf-8").splitlines()
    assert len(answers) == 5 and set(told.splitlines()) <= set(answers)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.cases(1)
def test_examples_of_the_page_run(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """But that of Ray Data, which tests/specdec/extensions/batches/test_ray.py runs in another form."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "batches.md").read_text("utf-8")
    code = re.findall(r"```python\n(.*?)```", page, flags=re.S)[number]
    names: dict[str, Any] = {}
    exec(compile(code, f"example {number}", "exec"), names)
    assert capsys.readouterr().out.strip()
    names["model"].close()


@pytest.mark.slow
def test_rows_with_an_error_are_told_by_the_exit_status(folder: Path, tmp_path: Path) -> None:
    done = run(folder, write(tmp_path / "in.jsonl", *ROWS, b"bad\n", {"prompt": "w1", "temperature": "hot"}))
    assert done.exit_code == 1 and "5 of 5 rows have ended, 2 with an error" in done.stderr
    assert sum(each["error"] is not None for each in read(tmp_path / "out.jsonl")) == 2


@pytest.mark.slow
def test_a_run_does_not_go_on_with_other_settings(folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *ROWS)
    assert run(folder, source).exit_code == 0
    for options, words in (
        (("--temperature", "0.5"), "temperature: 0.0 -> 0.5"),
        (("--seed", "3"), "seed: 0 -> 3"),
        (("-k", "2"), "load.num_speculative_tokens: null -> 2"),
    ):
        done = run(folder, source, *options)
        assert done.exit_code == 2 and words in done.output and "give another file, or remove it" in done.output
    write(source, *ROWS, {"prompt": "w5"})
    assert "input.rows: 3 -> 4" in run(folder, source).output


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([], (), "has no rows"),
        ([{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}], (), "lines 1 and 2 have the same id, 1"),
        ([{"prompt": "a"}], ("--top-k", "5"), "decides nothing at temperature 0"),
        ([{"prompt": "a"}], ("--ray", "0"), "Invalid value for '--ray'"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_loaded(
    tmp_path: Path, rows: list[Any], options: tuple[str, ...], words: str
) -> None:
    done = run("no-such-model", write(tmp_path / "in.jsonl", *rows), *options)
    assert done.exit_code == 2 and words in done.output


def test_files_that_are_not_there(tmp_path: Path) -> None:
    done = run("no-such-model", tmp_path / "in.jsonl")
    assert done.exit_code == 2 and "does not exist" in done.output
    source = write(tmp_path / "in.jsonl", *ROWS)
    done = CliRunner().invoke(cli, ["batch", str(source), str(tmp_path / "none" / "out.jsonl")])
    assert done.exit_code == 2 and "there is no folder" in done.output


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_leaves_a_run_that_can_be_started(folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *ROWS)
    assert run(folder, source, "--dtype", "float7").exit_code == 2
    assert run(folder, source).exit_code == 0


@pytest.mark.long
@pytest.mark.slow
def test_a_process_that_is_killed_goes_on(folder: Path, tmp_path: Path) -> None:
    place = soak_batches.Place(tmp_path / "in.jsonl", 400, str(folder), "lookup")
    soak_batches.write_rows(place.source, place.rows, random.Random(1))
    soak_batches.killed(place, tmp_path / "killed.jsonl", 1, random.Random(2))
    run_whole = soak_batches.Run(place, tmp_path / "whole.jsonl")
    run_whole.wait()
    assert "400 of 400 rows have ended" in run_whole.end()
    found = soak_batches.answers(tmp_path / "killed.jsonl")
    assert len(found) == 400 and found == soak_batches.answers(tmp_path / "whole.jsonl")
