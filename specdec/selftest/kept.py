"""Verdicts of self-tests, kept between starts: what came out right once is tested again when something has changed.

A verdict is a file named by a digest of all that it depends on (`fingerprint`). One that cannot be read or written
means testing again. Two starts may write at once: each writes a whole file, of the same content.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from specdec.errors import OutputError
from specdec.import_names import ROOT, version_of
from specdec.run_files import cache_folder, write_atomically
from specdec.wrapped.fingerprint import weights_fingerprint
from specdec.wrapped.settings import Settings

log = logging.getLogger("specdec")
_COMPUTES = (
    *("specdec-hf", "torch", "transformers", "numpy", "triton", "flashinfer-python", "nvidia-cutlass-dsl", "kernels"),
    *("gguf", "torchao", "compressed-tensors", "bitsandbytes", "optimum-quanto", "peft"),
)
"""Distributions whose code computes a target's results."""


class SelfTest(NamedTuple):
    """How a start tests its target.

    Attributes:
        mode: "full" or "quick". error: of an earlier start's verdict, so that nothing is tested; None: test.
        file: where this start's verdict is kept; None: nowhere.
    """

    mode: str = "full"
    error: float | None = None
    file: Path | None = None

    def __str__(self) -> str:
        """Which tests the start ran."""
        return self.mode if self.error is None else "none, by an earlier start's verdict"

    def keep(self, error: float) -> None:
        """Keep the relative logit error of a target that came out right."""
        if self.file is not None and self.error is None:
            try:
                write_atomically(self.file, str(error))
            except OutputError as failed:
                log.warning("the self-test's verdict is not kept: %s", failed)


FULL = SelfTest()


def self_test_of(mode: str, key: str | None) -> SelfTest:
    """mode: the load option self_test. key: the start's fingerprint; None where no verdict of it may be kept."""
    if key is None:
        return SelfTest("quick") if mode == "quick" else FULL
    file = cache_folder() / "self-tests" / key
    error = None
    if mode == "cached":
        with suppress(OSError, ValueError):
            error = float(file.read_text("utf-8"))
    return SelfTest(error=error, file=file)


def fingerprint(model: PreTrainedModel, head: Any, files: Iterable[Path], facts: Any) -> str:
    """64 hex digits over all that the self-tests' results depend on.

    Of target and head: classes, functions, settings, and a sample of the weights. Of the target's own `files`: size and
    time. Then versions, device, the code of specdec, and `repr(facts)`.
    """
    roots = [each for each in (model, head) if isinstance(each, torch.nn.Module)]
    settings = Settings.of(*roots)
    parts = (
        facts,
        settings.in_words(),
        [kind.__qualname__ for kind in settings.kinds],
        [weights_fingerprint(root, whole=False) for root in roots],
        [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in sorted(files)],
        [*map(version_of, _COMPUTES), sys.version, torch.__config__.show()],
        str(torch.cuda.get_device_properties(model.device)) if model.device.type == "cuda" else "cpu",
        _OWN_CODE,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _own_code() -> str:
    digest = hashlib.sha256()
    for file in sorted(file for package in _PACKAGES for file in (ROOT / package).rglob("*.py")):
        digest.update(f"{file}\n".encode() + file.read_bytes())
    return digest.hexdigest()


_PACKAGES = ("attention", "drafters", "specdec")
_OWN_CODE = _own_code()
"""When this is imported, as the rest of the library is: files may change before a model is loaded."""
