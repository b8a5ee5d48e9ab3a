"""The folder of a run: one process at a time, and a record of what the run is made from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from drafters.training.files import write_file
from specdec.errors import InvalidInputError, RunFolderError

FORMAT = 1
"""Of everything in a run folder; a folder of another format is refused."""
_RECORD = "run.json"


@dataclass(frozen=True)
class Setting:
    """One thing that decides a run's result.

    Attributes:
        value: what is compared; JSON.
        name: shown to a person beside the value, and not compared (a path, for example).
    """

    value: Any
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.value})" if self.name else json.dumps(self.value)


def check_writable(folder: Path) -> None:
    """Find out whether `folder` can be made and written to, without making it.

    Raises:
        InvalidInputError: it or something above it is a file, or may not be written.
    """
    above = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))  # "/" does at last
    if not above.is_dir():
        raise InvalidInputError(f"the output folder {folder} cannot be made: {above} is a file; name another folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InvalidInputError(f"the output folder {folder} cannot be written: no permission to write in {above}")


@contextmanager
def locked(folder: Path, name: str = "run") -> Iterator[None]:
    """Make `folder` if it is missing, and keep other processes out of one part of it while the block runs.

    The lock belongs to the process: the operating system takes it back from a killed one. Nested use is allowed.

    Args:
        name: of the part; other parts of the folder stay free.

    Raises:
        RunFolderError: another process holds the lock, or the folder cannot be written.
    """
    lock = FileLock(folder / f".{name}.lock", timeout=0, is_singleton=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise RunFolderError(
            f"another process is writing to {folder} ({name}); wait until it has ended, or name another folder"
        ) from error
    except OSError as error:
        raise RunFolderError(f"cannot write to {folder}: {error}; name another folder") from error
    try:
        yield
    finally:
        lock.release()


def claim(folder: Path, settings: Mapping[str, Setting], leftovers: list[Path]) -> None:
    """Record what a run is made from, or find that the folder holds a run made from just the same.

    Args:
        settings: everything that decides the result.
        leftovers: results in the folder; without a record nobody knows what they were made from.

    Raises:
        InvalidInputError: the folder holds a run made from something else, or results without a record.
        RunFolderError: the record is damaged, or cannot be written.
    """
    path = folder / _RECORD
    if path.exists():
        _check_same(folder, _read(path), settings)
        return
    if leftovers:
        listed = ", ".join(p.name for p in leftovers)
        raise InvalidInputError(
            f"{folder} holds {listed}, but no {_RECORD} that tells what they were made from; give another --output, or "
            "--overwrite to start anew there"
        )
    rows = {key: {"value": s.value, "name": s.name} for key, s in settings.items()}
    write_file(path, (json.dumps({"format": FORMAT, "settings": rows}, indent=2) + "\n").encode())


def release(folder: Path) -> None:
    """Remove the record, so that another run can claim the folder."""
    (folder / _RECORD).unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Setting]:
    try:
        record = json.loads(path.read_bytes())
        version, rows = record["format"], record["settings"]
        found = {key: Setting(row["value"], str(row["name"])) for key, row in rows.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{path} is damaged ({type(error).__name__}: {error}), so nobody knows what this run was made from; give "
            "another --output, or --overwrite to start anew there"
        ) from error
    if version != FORMAT:
        raise RunFolderError(
            f"{path} has format {version!r}, this version of specdec reads {FORMAT}; give another --output, or "
            "--overwrite to start anew there"
        )
    return found


def _check_same(folder: Path, old: Mapping[str, Setting], settings: Mapping[str, Setting]) -> None:
    new = {key: Setting(json.loads(json.dumps(s.value)), s.name) for key, s in settings.items()}
    nothing = Setting(None)
    pairs = {key: (old.get(key, nothing), new.get(key, nothing)) for key in {**old, **new}}
    changed = [f"  {key}: {a} -> {b}" for key, (a, b) in pairs.items() if a.value != b.value]
    if changed:
        raise InvalidInputError(
            f"{folder} holds a run made from something else (there -> asked for):\n" + "\n".join(changed) + "\n"
            "Give another --output, or the settings of that run to go on with it, or --overwrite to start anew there."
        )
