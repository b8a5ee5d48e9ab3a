"""AnswerStore: the target's answers on disk, one line each, as they come."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from types import TracebackType

from drafters.training.errors import RunFolderError
from drafters.training.files import sync, write_file

_SYNC_SECONDS = 1.0
"""A killed process loses no answer; a power failure at most those of the last second."""


class AnswerStore:
    """Answers by the index of their question. Reads what an earlier process kept; a context manager.

    A line is a JSON object with `index`, `token_ids` and `check`, a hash of both and of the store's key: a line that
    was cut off, altered, or comes from another store is not taken for an answer.

    Attributes:
        path: the file.
        answers: token ids by index.
        damaged: whole lines that were left out when the file was read.
    """

    def __init__(self, path: Path, key: str) -> None:
        """Read `path`, when there is one.

        Args:
            key: identifies prompts, target and limits.

        Raises:
            RunFolderError: the file cannot be read or repaired.
        """
        self.path = path
        self._key = key
        self.answers: dict[int, list[int]] = {}
        self.damaged = 0
        self._read()
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise RunFolderError(f"cannot write {path}: {error}") from error
        self._synced = time.monotonic()

    def __enter__(self) -> AnswerStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, index: int, token_ids: list[int]) -> None:
        """Keep an answer; it outlives the process when this returns.

        Raises:
            RunFolderError: the file cannot be written; what was kept before stays.
        """
        try:
            self._file.write(self._line(index, token_ids))
            self._file.flush()
            if time.monotonic() > self._synced + _SYNC_SECONDS:
                self.sync()
        except OSError as error:
            raise RunFolderError(
                f"cannot write {self.path}: {error}; {len(self.answers)} answers are kept, the same command goes on "
                "from there"
            ) from error
        self.answers[index] = token_ids

    def sync(self) -> None:
        """Wait until all answers are on the disk.

        Raises:
            OSError: they cannot be written.
        """
        sync(self._file.fileno())
        self._synced = time.monotonic()

    def _line(self, index: int, token_ids: list[int]) -> bytes:
        line = {"index": index, "token_ids": token_ids, "check": self._check(index, token_ids)}
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"

    def _check(self, index: int, token_ids: list[int]) -> str:
        return hashlib.sha256(repr((self._key, index, token_ids)).encode()).hexdigest()[:16]

    def _read(self) -> None:
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunFolderError(f"cannot read {self.path}: {error}") from error
        lines = content.split(b"\n")
        for line in lines[:-1]:
            kept = self._parse(line)
            if kept is None:
                self.damaged += 1
            else:
                self.answers[kept[0]] = kept[1]
        if self.damaged or lines[-1]:  # a last line without its end was being written when the process was killed
            write_file(self.path, b"".join(self._line(i, ids) for i, ids in self.answers.items()))

    def _parse(self, line: bytes) -> tuple[int, list[int]] | None:
        try:
            row = json.loads(line)
            index, token_ids, check = row["index"], row["token_ids"], row["check"]
        except (ValueError, KeyError, TypeError):
            return None
        if check != self._check(index, token_ids):
            return None
        return index, token_ids


def kept_answers(folder: Path) -> int:
    """Lines in all stores of a folder, to tell a person what is there."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("answers-*.jsonl") if os.access(path, os.R_OK))
