"""Warnings to a user, shown at the user's own line: the one that called into this library."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from pathlib import Path

from specdec.errors import SpecdecWarning

_ROOT = Path(__file__).resolve().parents[1]
_OURS = ("attention", "drafters", "specdec")
"""Packages whose lines are not the user's; so is the one that warns, which may add commands to these."""
_BUSY = 0.75
"""Share of the cores in use from which more than one thread is a hindrance."""
_BETWEEN = (contextlib.__file__, f"{os.sep}torch{os.sep}utils{os.sep}_contextlib.py")
"""Files of decorators that stand between two functions of specdec."""
_IMPORTING = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
"""Files of the import statement, whose frames `warnings.warn` does not count."""


def warn_user(message: str) -> None:
    """Warn with a SpecdecWarning at the first line outside of this library; in its commands, at that of the script."""
    frame = sys._getframe(1)
    level = 2
    packages = {*_OURS, str(frame.f_globals["__name__"]).partition(".")[0]}
    folders = tuple(f"{_ROOT / package}{os.sep}" for package in packages)
    file = frame.f_code.co_filename
    while frame.f_back is not None and (file.startswith(folders) or file.endswith(_BETWEEN + _IMPORTING)):
        frame = frame.f_back
        file = frame.f_code.co_filename
        level += not file.endswith(_IMPORTING)
    warnings.warn(message, SpecdecWarning, stacklevel=level)


_NOISE = {
    "torchao": r"Failed to load \S*torchao/\S*_C\S*\.so: ",
    "torch.utils._pytree": r".*is an Enum subclass and is now natively supported by torch\.compile",
}
"""What is logged when transformers imports torchao, whoever needs it: kernels for other machines, and a deprecation
that concerns its authors. By logger, as a regular expression."""


def drop_noise() -> None:
    """Drop the messages of `_NOISE`, which our imports of transformers cause; others of these loggers are kept."""
    for name in _NOISE:
        logging.getLogger(name).addFilter(_is_no_noise)


def _is_no_noise(record: logging.LogRecord) -> bool:
    return not re.match(_NOISE[record.name], record.getMessage())


def busy_cores(threads: int) -> str:
    """Why so many threads of torch would wait for cores that are in use, and what to set; "" where they would not."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if threads == 1 or load <= _BUSY * cores:
        return ""
    return (
        f"the {cores} cores are busy (load {load:.1f}) and torch has {threads} threads, which wait for one another: "
        "rounds on a CPU may take many times as long; set OMP_NUM_THREADS=1, or call torch.set_num_threads(1)"
    )
