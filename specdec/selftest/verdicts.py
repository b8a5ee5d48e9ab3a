"""Verdicts of self-tests, kept between starts: what came out right once is tested again when something has changed.

A verdict lies in a file of its own, named by a digest of all that it depends on (`fingerprint`), and holds that digest.
A file that cannot be read or written, or is damaged, means testing again. Two starts may write at once: each writes a
whole file, of the same content.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from specdec.errors import OutputError
from specdec.import_names import ROOT, version_of
from specdec.run_files import cache_folder, write_atomically
from specdec.selftest.shrinking import Threshold
from specdec.selftest.twin import TwinReport
from specdec.wrapped.fingerprint import weights_sample
from specdec.wrapped.settings import Settings

log = logging.getLogger("specdec")
_FORMAT = 1
_MOST_FILES = 256
_PACKAGES = ("attention", "drafters", "specdec")
_COMPUTES = (
    *(
        "specdec-hf",
        "torch",
        "transformers",
        "numpy",
        "triton",
        "flashinfer-python",
        "nvidia-cutlass-dsl",
        "kernels",
        "gguf",
    ),
    *("torchao", "compressed-tensors", "bitsandbytes", "optimum-quanto", "peft"),
)
"""Distributions whose code computes a target's results."""


class Verdict(NamedTuple):
    """That a target came out right: its relative logit error, and what its twin showed."""

    error: float
    twin: TwinReport


@dataclass(frozen=True)
class SelfTest:
    """How a start tests its target.

    Attributes:
        quick: without long rows of the real weights. verdict: an earlier start's, so that nothing is tested; or None.
        file: where this start's verdict is kept; None: nowhere.
    """

    quick: bool = False
    verdict: Verdict | None = None
    file: Path | None = None

    def __str__(self) -> str:
        """Which tests this start ran."""
        if self.verdict is not None:
            return "none: an earlier start's verdict holds"
        return "quick" if self.quick else "full"

    def keep(self, verdict: Verdict) -> None:
        """Keep a verdict of all tests, unless it is an earlier start's or came with a warning, which is due again."""
        if self.file is None or self.verdict is not None or verdict.twin.unbuilt is not None:
            return
        passed = [(each.name, each.value) for each in verdict.twin.passed]
        content = {"format": _FORMAT, "key": self.file.stem, "error": verdict.error, "passed": passed}
        try:
            write_atomically(self.file, json.dumps(content) + "\n")
            old = sorted(self.file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-_MOST_FILES]
            for each in old:
                each.unlink(missing_ok=True)
        except (OSError, OutputError) as error:
            log.warning("the self-test's verdict is not kept: %s", error)


def self_test_of(mode: str, key: str | None) -> SelfTest:
    """mode: see the load option self_test. key: the start's fingerprint; None where no verdict may be kept of it."""
    if mode == "quick" or key is None:
        return SelfTest(quick=mode == "quick")
    file = folder() / f"{key}.json"
    return SelfTest(verdict=_read(file) if mode == "cached" else None, file=file)


def folder() -> Path:
    """Where verdicts are kept."""
    return cache_folder() / "self-tests"


def _read(file: Path) -> Verdict | None:
    """A kept verdict; None where there is none, or a damaged one."""
    try:
        found = json.loads(file.read_text("utf-8"))
        if (found["format"], found["key"]) != (_FORMAT, file.stem):
            raise ValueError("it is another one's")
        passed = tuple(Threshold(str(name), int(value)) for name, value in found["passed"])
        return Verdict(float(found["error"]), TwinReport(passed))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("testing again: %s is damaged (%s)", file, error)
        return None


def fingerprint(model: PreTrainedModel, modules: Iterable[Any], files: Iterable[Path], facts: Any) -> str | None:
    """64 hex digits over all that the self-tests' results depend on; None where some of its code is in no file.

    Of the target and the further `modules` (heads): classes, settings, functions with the files that define them, and
    a sample of the weights. Of the model's own `files`: size and time. Then versions, device, the code of specdec, and
    `facts`, whose `repr` says all of them.
    """
    roots = [model, *(each for each in modules if isinstance(each, torch.nn.Module))]
    settings, sources = Settings.of(*roots), set[str]()
    read = [
        (place.owner, place.name, _in_words(value, sources))
        for place, value in zip(settings.places, settings.values, strict=True)
    ]
    if not all(map(os.path.isfile, sources)):
        return None
    classes = [(name, type(module).__qualname__) for root in roots for name, module in root.named_modules()]
    parts = (
        facts,
        read,
        classes,
        [weights_sample(root) for root in roots],
        [(each.name, (stat := each.stat()).st_size, stat.st_mtime_ns) for each in sorted(files)],
        _machine(model.device),
        _OWN_CODE,
        [(source, hashlib.sha256(Path(source).read_bytes()).hexdigest()) for source in sorted(sources)],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _machine(device: torch.device) -> tuple[Any, ...]:
    """Versions, and what runs the kernels."""
    versions = [(name, version_of(name)) for name in _COMPUTES]
    kernels = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        kernels = f"{torch.cuda.get_device_properties(device)}"
    return platform.python_version(), versions, torch.version.cuda, str(device), kernels


def _own_code() -> str:
    """A digest of all Python files of the library."""
    digest = hashlib.sha256()
    for file in sorted(file for package in _PACKAGES for file in (ROOT / package).rglob("*.py")):
        digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


_OWN_CODE = _own_code()
"""When this is imported, as the rest of the library is: files may change before a model is loaded."""


def _in_words(value: Any, sources: set[str]) -> Any:
    """A setting that is the same in another process. Files that define functions are added to `sources`."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, FunctionType):
        file = value.__code__.co_filename
        if not file.startswith("<frozen "):  # inside of the interpreter
            sources.add(file)
        return file, value.__qualname__, value.__code__.co_firstlineno
    if isinstance(value, dict):
        return [(str(key), _in_words(item, sources)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, (list, tuple)):
        return [_in_words(item, sources) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__qualname__


def files_of(place: str | Path) -> Iterator[Path]:
    """The files of a model: a folder's, or the one itself; none of a hub model, which its commit names."""
    path = Path(place)
    yield from (each for each in (path.iterdir() if path.is_dir() else [path]) if each.is_file())
