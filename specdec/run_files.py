"""Files of a run that goes on after it was killed: written whole or not at all, one writer, the same settings.

What a run has done is a file of lines (`KeptLines`), each appended as it comes. Beside it lie a lock, which the system
frees when the process that holds it ends, and the settings that the lines depend on.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, ClassVar, Self

from filelock import AcquireReturnProxy, FileLock, Timeout

from specdec.errors import InvalidInputError, OutputError, SpecdecError
from specdec.user_warnings import warn_user
from specdec.values import Json

SYNC_S = 1.0
"""Seconds between two moments at which all that was written is on the disk. A killed process loses nothing of it
anyway; a machine without power at most this."""


def cache_folder() -> Path:
    """The folder of files that specdec keeps between starts: specdec in $XDG_CACHE_HOME, or in ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: relative paths are invalid and ignored.
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "specdec"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError while `path` is written into an OutputError that names it and a remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, Timeout):
            raise
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; make room or give another place. What a run has answered "
            "is kept: the same command goes on from there"
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing; a pipe or device is written directly.

    Raises:
        OutputError: it cannot be written.
    """
    with writing(path):
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def check_writable(path: Path) -> None:
    """Check that a file or folder can be made at `path`; leaves nothing behind.

    Raises:
        OutputError: it cannot.
    """
    folder = path if path.is_dir() else path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with writing(path):
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"Not a directory ({folder} is a file)")
        if path.is_file():
            path.open("ab").close()
        if path.is_file() or path.is_dir() or not path.exists():  # else a pipe or a device
            tempfile.TemporaryFile(dir=folder).close()


def locked(path: Path, refused: Callable[[str], SpecdecError], *, nests: bool = False) -> AcquireReturnProxy:
    """A lock file, held until it is released or this process ends, killed or not. A context manager that releases it.

    refused: the error for a lock that cannot be had; it is given why, as "is … ; …, or": a remedy must follow. nests:
    this process may hold it several times.

    Raises:
        SpecdecError: that of `refused`: another process holds it, or the file system knows no locks.
        OutputError: it cannot be written.
    """
    lock = FileLock(path, thread_local=False, is_singleton=nests)
    try:
        with writing(path):
            return lock.acquire(timeout=0)
    except Timeout as error:
        with writing(path):
            path.touch()  # some file systems take no new files, and the lock takes that for another's
        raise refused("is in use by another run that has not ended; wait for it, stop it, or") from error
    except NotImplementedError as error:
        raise refused(f"is on a file system without locks ({error});") from error


def changes(earlier: Any, current: Any, name: str = "") -> Iterator[str]:
    """What differs between two JSON documents, value by value: "asking.params.seed: 1 -> 2"."""
    both = (earlier, current)
    if all(isinstance(one, dict) for one in both):
        for key in sorted({*earlier, *current}):
            yield from changes(earlier.get(key), current.get(key), f"{name}.{key}" if name else key)
    elif all(isinstance(one, list) for one in both) and len(earlier) == len(current):
        for i, (left, right) in enumerate(zip(*both, strict=True)):
            yield from changes(left, right, f"{name}[{i}]")
    elif earlier != current:
        yield f"{name}: {_short(earlier)} -> {_short(current)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


class KeptLines:
    """A file of lines that are appended as they come: those of a new run, or of one that is continued.

    One process at a time has it open: leave it as a context manager, or with `close`. A subclass reads the lines.

    Attributes:
        error, remedy: of what is refused, and what to do then. lost: what becomes of a last line that was cut off.
    """

    error: ClassVar[type[SpecdecError]] = InvalidInputError
    remedy: ClassVar[str]
    lost: ClassVar[str]

    def __init__(
        self, path: Path, lock: Path, settings: tuple[Path, Json] | None = None, shown: Path | None = None
    ) -> None:
        """Read the lines, and cut off a last one without an end, with a warning.

        settings: where those of the run are kept, and what they are. shown: how errors name the run, default `path`.

        Raises:
            SpecdecError: of the class `error`: another process has the run, it has other settings, or it is damaged.
            OutputError: it cannot be written.
        """
        self.path = path
        self._shown = shown or path
        self._synced = time.monotonic()
        self._file = None
        self._lock = locked(lock, lambda why: self.error(f"{self._shown} {why} {self.remedy}")).lock
        try:
            if settings is not None:
                self._check_settings(*settings)
            with writing(path):
                self._read()
                self._file = path.open("ab", buffering=0)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is left to the disk and release the run. Idempotent."""
        file = self._file
        self._file = None
        try:
            if file is not None:
                with writing(self.path), file:
                    os.fsync(file.fileno())
        finally:
            self._lock.release()

    def write(self, lines: bytes) -> None:
        """Append whole lines.

        Raises:
            OutputError: they cannot be written; those before stay.
        """
        assert self._file is not None
        with writing(self.path):
            write_whole(self._file, lines)
            if time.monotonic() - self._synced > SYNC_S:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()

    def take(self, line: bytes, place: str) -> None:
        """Read a line that an earlier process wrote; place: its file and number."""
        raise NotImplementedError

    def _check_settings(self, kept: Path, settings: Json) -> None:
        """Compare with those of the run, or keep these for a new one."""
        if not kept.is_file():
            write_atomically(kept, json.dumps(settings, indent=2, sort_keys=True) + "\n")
            return
        try:
            earlier = json.loads(kept.read_bytes())
            if not isinstance(earlier, dict):
                raise ValueError("it holds no object")
        except (OSError, ValueError) as error:
            raise self.error(f"{kept} is damaged ({error}); {self.remedy}, or remove {self._shown.name}") from error
        if changed := list(changes(earlier, json.loads(json.dumps(settings)))):
            remedy = f"{self.remedy}, or remove it"
            if all(one.startswith("input.") for one in changed):
                remedy = f"the input was changed since: restore it to go on, or {remedy}"
            raise self.error(f"{self._shown} holds answers to other settings ({'; '.join(changed)}); {remedy}")

    def _read(self) -> None:
        """The lines of earlier processes. Raises OSError."""
        if not self.path.exists():
            return
        whole = place = 0
        with self.path.open("rb") as file:
            for place, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    self.take(line, f"{self.path}:{place}")
                    whole += len(line)
        if whole < self.path.stat().st_size:
            warn_user(f"{self.path}:{place}: the last line was cut off; it is dropped, and {self.lost}")
            os.truncate(self.path, whole)


def write_whole(file: IO[bytes], data: bytes) -> None:
    """Write all of it: an unbuffered file may take a part. Raises OSError."""
    while data:
        data = data[file.write(data) :]
