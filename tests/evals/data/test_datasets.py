"""Loaders: the shapes they take, and errors that name file and line."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evals.data import datasets
from evals.data.datasets import DATA_VARIABLE, NAMED, load, read_jsonl
from evals.errors import DataError


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def test_takes_turns_prompt_question_and_messages(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    path = write(
        tmp_path / "mixed.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
        {"task_id": "HumanEval/0", "prompt": "def f():"},
        {"question": "How many?"},
        {"id": "chat", "messages": chat},
    )
    loaded = load(str(path)).questions
    assert [q.id for q in loaded] == ["81", "HumanEval/0", "2", "chat"]
    assert [q.turns for q in loaded] == [("one", "two"), ("def f():",), ("How many?",), ("hello",)]
    assert loaded[3].history == (("system", "s"),)
    assert loaded[0].category == "writing" and loaded[1].category == "mixed"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not a line of JSON"),
        ("[1, 2]", "a JSON object is needed, this is list"),
        ('{"text": "x"}', "needs one of 'turns', 'prompt', 'question' or 'messages'"),
        ('{"turns": []}', "'turns' must be text or a list of texts"),
        ('{"turns": ["a", ""]}', "none of them empty"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "last message must have the role 'user'"),
        ('{"messages": [{"role": "user"}]}', "'messages' must be a list of objects"),
        ('{"question_id": 0, "prompt": "again"}', "already used at"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"question_id": 0, "prompt": "fine"}, "", line)
    with pytest.raises(DataError, match=r"bad\.jsonl:3: ") as error:
        load(str(path))
    assert message in str(error.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "ok"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2"):
        load(str(path))


def test_line_separators_inside_a_text_do_not_cut_it(tmp_path: Path) -> None:
    path = write(tmp_path / "u.jsonl", '{"prompt": "a\u2028b"}')
    assert load(str(path)).questions[0].turns == ("a\u2028b",)


def test_missing_empty_and_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist"):
        load(str(tmp_path / "gone.jsonl"))
    with pytest.raises(DataError, match="has no questions"):
        load(str(write(tmp_path / "empty.jsonl")))
    with pytest.raises(DataError, match=r"unknown data set 'gsm9k'; known are arithmetic, gsm8k, humaneval"):
        load("gsm9k")
    with pytest.raises(DataError, match=r"needs the file spec_bench/question.jsonl"):
        load("spec_bench")
    with pytest.raises(DataError, match=r"data folder .* does not exist"):
        load("gsm8k", data_dir=tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"needs the file gsm8k/test.jsonl in"):
        load("gsm8k", data_dir=tmp_path)


def published_with(count: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Say of a known set that it has so many questions."""
    monkeypatch.setattr("evals.data.datasets.NAMED", NAMED | {name: replace(NAMED[name], questions=count)})


def test_a_part_of_a_known_set_is_not_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(tmp_path / "mt_bench" / "question.jsonl", *[{"turns": [f"q{i}"]} for i in range(80)])
    assert len(load("mt_bench", data_dir=tmp_path).questions) == 80
    assert len(load("mt_bench", data_dir=tmp_path, limit=8).questions) == 8
    cut = b"".join(whole.read_bytes().splitlines(keepends=True)[:79])
    whole.write_bytes(cut)
    with pytest.raises(DataError, match=r"'mt_bench' has 80 questions, .*question\.jsonl holds 79: it is cut off"):
        load("mt_bench", data_dir=tmp_path, limit=8)
    assert len(load(str(whole)).questions) == 79  # under the file's own name
    whole.write_bytes(cut[:-4])
    with pytest.raises(DataError, match=r"question\.jsonl:79: not a line of JSON"):
        load(str(whole))


def test_known_name_is_read_from_the_folder_with_its_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published_with(4, "spec_bench", monkeypatch)
    rows = [{"question_id": i, "category": c, "turns": ["x"]} for i, c in enumerate(("writing", "stem", "rag", "qa"))]
    write(tmp_path / "spec_bench" / "question.jsonl", *rows)
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert [q.task for q in load("spec_bench").questions] == ["mt_bench", "mt_bench", "rag", "qa"]


def test_limit_spreads_over_the_set(tmp_path: Path) -> None:
    path = write(tmp_path / "ten.jsonl", *[{"prompt": f"p{i}"} for i in range(10)])
    assert [q.id for q in load(str(path), limit=4).questions] == ["0", "2", "5", "7"]
    assert len(load(str(path), limit=99).questions) == 10
    with pytest.raises(DataError, match="--limit is 0"):
        load(str(path), limit=0)


def test_hub_is_asked_through_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("datasets")
    asked: list[Any] = []

    def fake(repository: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((repository, config, split))
        return [{"prompt": ["first", "second"], "prompt_id": 7, "category": "math"}]

    published_with(1, "mt_bench", monkeypatch)
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setattr(hub, "load_dataset", fake)
    assert load("mt_bench").questions[0].turns == ("first", "second")
    assert load("someone/set:dev").questions[0].id == "7"
    assert asked == [("HuggingFaceH4/mt_bench_prompts", None, "train"), ("someone/set", None, "dev")]

    def absent(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("no such data set")

    monkeypatch.setattr(hub, "load_dataset", absent)
    with pytest.raises(DataError, match=r"cannot load someone/set .* from the hub"):
        load("someone/set")


@pytest.mark.skipif(not os.environ.get(DATA_VARIABLE), reason=f"{DATA_VARIABLE} is not set")
@pytest.mark.parametrize(
    ("name", "count"), [("gsm8k", 1319), ("spec_bench", 480), ("mt_bench", 80), ("humaneval", 164)]
)
def test_the_public_sets_load_whole(name: str, count: int) -> None:
    assert len(load(name).questions) == count


@pytest.mark.skipif(not os.environ.get(DATA_VARIABLE), reason=f"{DATA_VARIABLE} is not set")
def test_spec_bench_has_six_tasks_of_eighty() -> None:
    tasks = [q.task for q in load("spec_bench").questions]
    expected = {"mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"}
    assert {task: tasks.count(task) for task in tasks} == dict.fromkeys(expected, 80)


def test_arithmetic_is_generated_and_repeatable() -> None:
    first, again = load("arithmetic", limit=5, seed=3), load("arithmetic", limit=5, seed=3)
    assert first == again and len(first.questions) == 5
    assert first.sha256 != load("arithmetic", limit=5, seed=4).sha256


def test_blank_lines_keep_the_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "b.jsonl", "", {"prompt": "x"})
    assert [number for number, _ in read_jsonl(path)] == [2]
    assert datasets.load(str(path)).questions[0].id == "0"


def test_a_byte_order_mark_and_fields_that_are_null(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    rows = b'{"prompt": null, "question": "a"}\n{"messages": null, "turns": ["b", "c"]}\n'
    file.write_bytes(b"\xef\xbb\xbf" + rows)
    assert [question.turns for question in load(str(file)).questions] == [("a",), ("b", "c")]
