"""specdec: speculative decoding for Hugging Face causal language models, with exactly the model's own output."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.engine.sharing import StreamUpdate
    from specdec.errors import (
        CacheTooSmallError,
        ClosedModelError,
        HeadLoadError,
        HeadMismatchError,
        InvalidInputError,
        InvariantError,
        ModelChangedError,
        ModelLoadError,
        NotCopyableError,
        OutOfDeviceMemoryError,
        OutOfPagesError,
        RequestFailedError,
        RoundFailedError,
        RunFolderError,
        SpecdecError,
        SpecdecWarning,
        StaleMetadataError,
        TrainingDivergedError,
        UnsupportedAttentionError,
        UnsupportedModelError,
    )
    from specdec.model import SpeculativeModel
    from specdec.requests.request import Completion
    from specdec.requests.sampling import SamplingParams

__all__ = [
    "CacheTooSmallError",
    "ClosedModelError",
    "Completion",
    "HeadLoadError",
    "HeadMismatchError",
    "InvalidInputError",
    "InvariantError",
    "ModelChangedError",
    "ModelLoadError",
    "NotCopyableError",
    "OutOfDeviceMemoryError",
    "OutOfPagesError",
    "RequestFailedError",
    "RoundFailedError",
    "RunFolderError",
    "SamplingParams",
    "SpecdecError",
    "SpecdecWarning",
    "SpeculativeModel",
    "StaleMetadataError",
    "StreamUpdate",
    "TrainingDivergedError",
    "UnsupportedAttentionError",
    "UnsupportedModelError",
]

_HOMES = {
    "Completion": "specdec.requests.request",
    "SamplingParams": "specdec.requests.sampling",
    "SpeculativeModel": "specdec.model",
    "StreamUpdate": "specdec.engine.sharing",
}
"""Where the public names are defined that are not in `specdec.errors`."""


def _check_siblings() -> None:
    """`attention` and `drafters` are common names: make sure that the packages found are the ones beside this one."""
    root = Path(__file__).resolve().parent.parent
    for name in ("attention", "drafters"):
        spec = find_spec(name)
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if found is None or found.parent.parent != root:
            raise ImportError(
                f"specdec needs its own package {name!r} at {root / name}, but `import {name}` finds "
                f"{found or 'nothing'}; remove or rename what shadows it"
            )


_check_siblings()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "specdec.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
