"""A run folder has one owner at a time, and a killed owner does not keep it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from evals.errors import RunStoreError
from evals.runs.answers import Answer, Turn
from evals.runs.store import RunStore
from specdec.errors import OutputError
from specdec.run_files import write_atomically


def test_a_killed_owner_does_not_block_and_a_living_one_does(tmp_path: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        store = RunStore(tmp_path / "run", {"k": 1})
        os.write(write, b"x")
        signal.pause()
        store.close()
        os._exit(0)
    try:
        assert os.read(read, 1) == b"x"
        with pytest.raises(RunStoreError, match="in use by another run"):
            RunStore(tmp_path / "run", {"k": 1})
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with RunStore(tmp_path / "run", {"k": 1}) as store:
        assert store.answers == {} and (tmp_path / "run" / ".lock").exists()


def test_a_refused_folder_stays_free(tmp_path: Path) -> None:
    RunStore(tmp_path / "run", {"a": {"b": [1, 2]}, "c": 3}).close()
    with pytest.raises(RunStoreError, match=r"\(a\.b\[1\]: 2 -> 5\)"):
        RunStore(tmp_path / "run", {"a": {"b": [1, 5]}, "c": 3})
    RunStore(tmp_path / "run", {"a": {"b": [1, 2]}, "c": 3}).close()


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match=r"cannot write .*file/inside"):
        write_atomically(tmp_path / "file" / "inside", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def answer(question: str, error: str | None = None) -> Answer:
    return Answer(question, "arm", "all", "all", () if error else (Turn("a", (97,), "length", 1, 1, ()),), error)


def test_a_last_line_that_was_cut_off_is_dropped_and_written_over(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run", {"k": 1}) as store:
        store.add([answer("1"), answer("2")])
    lines = tmp_path / "run" / "answers.jsonl"
    whole = lines.read_bytes()
    lines.write_bytes(whole[:-5])
    with (
        pytest.warns(match=r"answers.jsonl:2: the last line was cut off"),
        RunStore(tmp_path / "run", {"k": 1}) as store,
    ):
        assert list(store.answers) == [("1", "arm")]
        store.add([answer("2")])
    assert lines.read_bytes() == whole
    with RunStore(tmp_path / "run", {"k": 1}) as store:
        assert list(store.answers) == [("1", "arm"), ("2", "arm")]


def test_questions_that_failed_are_asked_again(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run", {"k": 1}) as store:
        store.add([answer("1"), answer("2", "ValueError")])
        assert [store.finished(question, ["arm"]) for question in "123"] == [True, False, False]
        assert not store.finished("1", ["arm", "other"])


def test_answers_to_other_settings_are_refused(tmp_path: Path) -> None:
    """By the settings beside them, one that is new included; and by each line's own hash."""
    with RunStore(tmp_path / "run", {"k": 1}) as store:
        store.add([answer("1")])
    with pytest.raises(RunStoreError, match=r"\(new: null -> 2\)"):
        RunStore(tmp_path / "run", {"k": 1, "new": 2})
    with RunStore(tmp_path / "other", {"k": 2}):
        pass
    (tmp_path / "other" / "answers.jsonl").write_bytes((tmp_path / "run" / "answers.jsonl").read_bytes())
    with pytest.raises(RunStoreError, match=r"answers.jsonl:1: belongs to other settings"):
        RunStore(tmp_path / "other", {"k": 2})
