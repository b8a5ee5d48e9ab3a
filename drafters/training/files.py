"""Files and folders that appear whole or not at all, even when the process is killed or the disk is full."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from drafters.errors import RunFolderError

MANIFEST = "manifest.json"
"""Lists every other file of a folder with its size and hash; written last."""
_PARTIAL = ".partial"
_OLD = ".old"


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file or nothing: the data goes to a temporary file, which is synced to the disk and renamed.

    Raises:
        RunFolderError: it cannot be written; an earlier file of that name stays.
    """
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    try:
        with partial.open("wb") as out:
            out.write(content)
            sync(out.fileno())  # before the rename: after a crash the new name must not be an empty file
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunFolderError(f"cannot write {path}: {error}") from error


@contextmanager
def whole_folder(path: Path, *, manifest: bool = True) -> Iterator[Path]:
    """Yield an empty folder next to `path`, which replaces `path` when the block ends.

    After an error the new folder is removed, and `path` is unchanged. manifest: add a manifest, by which `damage` can
    check later whether the files have changed.

    Raises:
        RunFolderError: it cannot be written.
    """
    partial = path.with_name(path.name + _PARTIAL)
    old = path.with_name(path.name + _OLD)
    try:
        _remove(partial, old)
        partial.mkdir(parents=True)
        yield partial
        # All files below a folder, once the disk has them.
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        for file in files:
            with file.open("rb+") as opened:  # "+": Windows syncs only files open for writing
                sync(opened.fileno())
        for inner in {file.parent for file in files}:
            _sync_folder(inner)
        if manifest:
            listed = {file.relative_to(partial).as_posix(): _entry(file) for file in files}
            write_file(partial / MANIFEST, (json.dumps(listed, indent=2) + "\n").encode())
        if path.exists():
            os.replace(path, old)  # a folder cannot be renamed onto another one that holds files
        os.replace(partial, path)
        _sync_folder(path.parent)
        _remove(old)
    except BaseException as error:  # also Ctrl-C, and errors of the caller's block
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not path.exists():
            os.replace(old, path)
        if isinstance(error, (OSError, SafetensorError)):
            raise RunFolderError(f"cannot write {path}: {error}") from error
        raise


def damage(folder: Path) -> str | None:
    """How a folder written by `whole_folder` differs from its manifest, in words; None if it does not."""
    try:
        listed = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError) as error:
        return f"its {MANIFEST} cannot be read: {error}"
    if not isinstance(listed, dict) or not listed:
        return f"its {MANIFEST} is no list of files"
    for name, entry in listed.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if entry != _entry(file):
            return f"{name} differs from what was written"
    return None


def sync(descriptor: int) -> None:
    """Wait until the disk has all data written to an open file."""
    os.fsync(descriptor)


def _entry(file: Path) -> dict[str, int | str]:
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def _sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable; Windows opens no folders and needs none of this."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def _remove(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)
