"""specdec: speculative decoding for Hugging Face causal language models, with exactly the model's own output."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specdec.shadowing import check_sibling

if TYPE_CHECKING:
    from specdec.errors import SpecdecError
    from specdec.model import SpeculativeModel
    from specdec.requests.request import Completion
    from specdec.requests.sampling import SamplingParams

_PUBLIC = {
    "Completion": "specdec.requests.request",
    "SamplingParams": "specdec.requests.sampling",
    "SpecdecError": "specdec.errors",
    "SpeculativeModel": "specdec.model",
}

__all__ = ["Completion", "SamplingParams", "SpecdecError", "SpeculativeModel"]


for _name in ("attention", "drafters"):
    check_sibling(_name)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
