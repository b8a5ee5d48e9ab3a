"""The file of answers: one writer, the same settings, and no row twice whatever moment a run was killed at."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from specdec import run_files
from specdec.errors import InvalidInputError, OutputError
from specdec.extensions.batches.records import Record, line_of
from specdec.extensions.batches.run_batch import Output
from specdec.run_files import write_whole
from specdec.user_warnings import SpecdecWarning
from tests.specdec.extensions.batches.made import read

SETTINGS = {"model": "m", "load": {"dtype": "auto", "seed": 1}}


def record(number: int, failed: bool = False) -> Record:
    return Record(number, line_of({"line": number, "error": "no" if failed else None}), failed)


def opened(path: Path, settings: Any = None, lines: int = 5) -> Output:
    return Output(path, SETTINGS if settings is None else settings, lines)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with answers to lines 2 and 4, the second an error."""
    with opened(tmp_path / "out.jsonl") as file:
        file.add(record(2))
        file.add(record(4, failed=True))
    return tmp_path / "out.jsonl"


def test_answers_are_found_again_and_none_is_added_twice(path: Path) -> None:
    with opened(path) as file:
        assert (list(file.done), file.failed) == ([0, 0, 1, 0, 1, 0], 1)
        for number in (1, 2, 4):
            file.add(record(number))
    assert [each["line"] for each in read(path)] == [2, 4, 1]


def test_an_error_that_is_there_twice_counts_once(path: Path) -> None:
    with path.open("ab") as file:
        file.write(record(4, failed=True).data + record(2, failed=True).data)
    with opened(path) as again:
        assert (list(again.done), again.failed) == ([0, 0, 1, 0, 1, 0], 1)


@pytest.mark.parametrize("size", range(1, len(record(5).data)))
def test_a_last_line_that_was_cut_off_is_asked_again(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.write(record(5).data[:size])
    with pytest.warns(SpecdecWarning, match="the last line was cut off; it is dropped"), opened(path) as again:
        assert list(again.done) == [0, 0, 1, 0, 1, 0]
        again.add(record(5))
    assert [each["line"] for each in read(path)] == [2, 4, 5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{bad\n", "out.jsonl:3: no answer of this batch"),
        (b"\x00\x00\n", "out.jsonl:3"),
        (b'{"line": 9, "error": null}\n', "out.jsonl:3: no answer of this batch .IndexError"),
        (b'{"line": 1}\n', "KeyError"),
        (b"\n", "out.jsonl:3"),
        (b'{"text": "mine"}\n', "out.jsonl:3"),
    ],
)
def test_other_lines_are_named(path: Path, line: bytes, message: str) -> None:
    with path.open("ab") as file:
        file.write(line)
    with pytest.raises(InvalidInputError, match=message):
        opened(path)
    path.write_bytes(path.read_bytes().removesuffix(line))
    opened(path).close()  # the refusal has kept no lock


def test_other_settings_are_named(path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"other settings \(load.seed: 1 -> 2; model: \"m\" -> \"n\"\)"):
        opened(path, {"model": "n", "load": {"dtype": "auto", "seed": 2}})
    path.unlink()
    opened(path, {"model": "n"}).close()  # without answers the settings bind nobody


def test_a_file_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("important\n")
    with pytest.raises(InvalidInputError, match=r"exists and is no batch's \(mine.jsonl.settings.json is missing\)"):
        opened(path)
    (tmp_path / "mine.jsonl.settings.json").write_text("{bad")
    with pytest.raises(InvalidInputError, match="is damaged"):
        opened(path)
    assert path.read_text() == "important\n"
    with pytest.raises(InvalidInputError, match="is no file that answers can be added to"):
        opened(tmp_path)


def test_two_processes_do_not_write_one_file(path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        file = opened(path)
        os.write(writing, b"x")
        while file is not None:
            signal.pause()
    try:
        assert os.read(reading, 1) == b"x"
        with pytest.raises(InvalidInputError, match="is in use by another run that has not ended"):
            opened(path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    opened(path).close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="there is no folder"):
        opened(tmp_path / "none" / "out.jsonl")
    (tmp_path / "folder").mkdir(mode=0o500)
    if os.access(tmp_path / "folder", os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(OutputError, match="Permission denied"):
        opened(tmp_path / "folder" / "out.jsonl")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux alone has it")
def test_a_file_system_that_takes_no_files_is_no_other_run() -> None:
    with pytest.raises(OutputError, match=r"cannot write /proc/\.out\.jsonl\.lock: (No such file|Permission denied)"):
        opened(Path("/proc/out.jsonl"))


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OutputError, match=r"cannot write .*: Read-only file system; make room or give another place"):
        opened(tmp_path / "out.jsonl")


class FullDisk:
    """A file for which there are so many bytes left."""

    def __init__(self, inner: Any, left: int) -> None:
        self.inner, self.left = inner, left

    def write(self, data: bytes) -> int:
        """As a disk does: a part of it first, then an error."""
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.inner.write(data[: self.left])
        self.left -= written
        return int(written)


def test_a_full_disk_is_named_and_costs_the_last_line_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "write_whole", lambda file, data: write_whole(FullDisk(file, 10), data))  # type: ignore[arg-type]
    with opened(path) as file, pytest.raises(OutputError, match="No space left on device; make room"):
        file.add(record(1))
    monkeypatch.undo()
    with pytest.warns(SpecdecWarning, match="cut off"), opened(path) as file:
        assert list(file.done) == [0, 0, 1, 0, 1, 0]


def test_answers_are_on_the_disk_after_a_while_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with opened(tmp_path / "out.jsonl") as file:
        file.add(record(1))
        file.add(record(2))
        assert not synced
        monkeypatch.setattr(run_files, "SYNC_S", -1.0)
        file.add(record(3))
        assert len(synced) == 1
    assert len(synced) == 2
