"""Write a model folder whose `generate` speculates by itself: transformers runs its `custom_generate/generate.py`.

Source: huggingface/transformers, generation/utils.py: `load_custom_generate`.
"""

from __future__ import annotations

import os
import shutil
from importlib.metadata import version
from pathlib import Path

from specdec.errors import InvalidInputError
from specdec.extensions.attached.custom import HEAD_FOLDER

_CODE = '''"""Speculative decoding with the draft head beside this file; see `specdec export`."""

EXPORTED = {folder!r}


def generate(*given, model, **named):
    from specdec.extensions.attached.custom import generate_in_repository

    return generate_in_repository(EXPORTED, given, model, named)
'''
_PROJECT = "specdec-hf"


def write_repository(head: Path, target: Path | None, out: Path) -> Path:
    """Write `out`/custom_generate, with a copy of the head, and beside it the target's own files; returns `out`.

    Files of the target are hard links where the file system has them, else copies.

    target: a folder with a transformers checkpoint; None: only the folder that belongs into the target's repository.

    Raises:
        InvalidInputError: the head is a file, or there is a custom_generate folder in the target.
    """
    if not head.is_dir():
        raise InvalidInputError(f"{head} is no folder; give the folder of a head")
    if target is not None and (target / "custom_generate").exists():
        raise InvalidInputError(f"{target} has a custom_generate folder already; give a target without one")
    folder = out / "custom_generate"
    folder.mkdir(parents=True)
    shutil.copytree(head, out / HEAD_FOLDER)
    (folder / "generate.py").write_text(_CODE.format(folder=str(out.resolve())), "utf-8")
    (folder / "requirements.txt").write_text(f"{_PROJECT}>={version(_PROJECT)}\n", "utf-8")
    for path in () if target is None else target.iterdir():
        if path.is_file():
            _linked(path.resolve(), out / path.name)
    return out


def _linked(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)
