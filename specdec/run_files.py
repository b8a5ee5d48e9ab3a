"""Files of a run that goes on after it was killed: written whole or not at all, one writer, the same settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specdec.errors import OutputError, SpecdecError


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


def locked(path: Path, refused: Callable[[str], SpecdecError]) -> FileLock:
    """A lock file, held until it is released or this process ends, killed or not.

    refused: the error for a lock that cannot be had; it is given why, as "is … ; …, or": a remedy must follow.

    Raises:
        SpecdecError: that of `refused`: another process holds it, or the file system knows no locks.
        OutputError: it cannot be written.
    """
    lock = FileLock(path, thread_local=False)
    try:
        with writing(path):
            lock.acquire(timeout=0)
    except Timeout as error:
        with writing(path):
            path.touch()  # some file systems take no new files, and the lock takes that for another's
        raise refused("is in use by another run that has not ended; wait for it, stop it, or") from error
    except NotImplementedError as error:
        raise refused(f"is on a file system without locks ({error});") from error
    return lock


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
