"""The file of answers, which a run that was killed goes on with.

OUT                   a line for each row that has ended, in order of their ends
OUT.settings.json     what the answers depend on
.OUT.lock             held by the one process that may write; the system frees it when that process ends, killed or not
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from filelock import FileLock

from specdec.errors import InvalidInputError
from specdec.extensions.batches.records import Record, row_number
from specdec.run_files import changes, locked, write_atomically, writing
from specdec.user_warnings import warn_user

SYNC_S = 1.0
"""Seconds between two moments at which all that was written is on the disk. A killed process loses nothing of it
anyway; a machine without power at most this."""


class Output:
    """The answers of one run: of a new file, or of one with the same settings, which is continued.

    One process at a time has it open: leave it as a context manager, or with `close`.

    Attributes:
        done: for each line of the input, 1 where its row has ended. failed: errors among them.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], lines: int) -> None:
        """lines: of the input, those that are blank among them. A last line that was cut off is dropped.

        Raises:
            InvalidInputError: another process has the file, it was made with other settings or by something else, or
                it is damaged.
            OutputError: it cannot be written.
        """
        self.path, self.done, self.failed = path, bytearray(lines + 1), 0
        self._synced, self._file = time.monotonic(), None
        if path.exists() and not path.is_file():
            raise InvalidInputError(f"{path} is no file that answers can be added to")
        if not path.absolute().parent.is_dir():
            raise InvalidInputError(f"{path}: there is no folder {path.absolute().parent}")
        self._lock = self._locked()
        try:
            self._check_settings(settings)
            self._read()
            with writing(path):
                self._file = path.open("ab", buffering=0)
        except BaseException:
            self.close()
            raise

    def _locked(self) -> FileLock:
        lock = self.path.with_name(f".{self.path.name}.lock")
        return locked(lock, lambda why: InvalidInputError(f"{self.path} {why} give another file"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is left to the disk and release the file. Idempotent."""
        file, self._file = self._file, None
        try:
            if file is not None:
                with writing(self.path), file:
                    os.fsync(file.fileno())
        finally:
            self._lock.release()

    def add(self, record: Record) -> None:
        """Write an answer, once for its row.

        Raises:
            OutputError: it cannot be written; those before stay.
        """
        if self.done[record.number]:
            return
        assert self._file is not None
        with writing(self.path):
            write_whole(self._file, record.data)
            if time.monotonic() - self._synced > SYNC_S:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        self.done[record.number] = 1
        self.failed += record.failed

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Compare with those of the file, or keep these for a new one."""
        kept = self.path.with_name(f"{self.path.name}.settings.json")
        if self.path.exists() and self.path.stat().st_size:  # an empty file binds nobody
            if not kept.is_file():
                raise InvalidInputError(f"{self.path} exists and is no batch's ({kept.name} is missing); give another")
            try:
                earlier = json.loads(kept.read_bytes())
            except (OSError, ValueError) as error:
                raise InvalidInputError(f"{kept} is damaged ({error}); remove it and {self.path.name}") from error
            if changed := list(changes(earlier, json.loads(json.dumps(settings)))):
                remedy = "give another file, or remove it"
                if all(one.startswith("input.") for one in changed):
                    remedy = f"the input was changed since: restore it to go on, or {remedy}"
                raise InvalidInputError(f"{self.path} holds answers to other settings ({'; '.join(changed)}); {remedy}")
            return
        write_atomically(kept, json.dumps(settings, indent=2, sort_keys=True) + "\n")

    def _read(self) -> None:
        """Rows that have ended before."""
        if not self.path.exists():
            return
        whole = 0
        try:
            with self.path.open("rb") as file:
                for place, line in enumerate(file, 1):
                    if line.endswith(b"\n"):
                        self._take(line, place)
                        whole += len(line)
        except OSError as error:
            raise InvalidInputError(f"cannot read {self.path}: {error.strerror or error}") from error
        if whole < self.path.stat().st_size:
            warn_user(f"{self.path}: the last line was cut off; it is dropped, and its row is asked again")
            with writing(self.path):
                os.truncate(self.path, whole)

    def _take(self, line: bytes, place: int) -> None:
        try:
            record = json.loads(line)
            number = row_number(record)
            self.failed += not self.done[number] and record["error"] is not None
            self.done[number] = 1
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidInputError(
                f"{self.path}:{place}: no answer of this batch ({type(error).__name__}: {error}); remove the line, or "
                "give another file"
            ) from error


def write_whole(file: IO[bytes], data: bytes) -> None:
    """Write all of it: an unbuffered file may take a part. Raises OSError."""
    while data:
        data = data[file.write(data) :]
