"""specdec: speculative decoding for Hugging Face causal language models, with exactly the model's own output."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specdec.shadowing import check_sibling

for _name in ("attention", "drafters"):  # before anything is imported from them
    check_sibling(_name)

from specdec import errors as _errors  # noqa: E402
from specdec.errors import *  # noqa: E402, F403

if TYPE_CHECKING:
    from specdec.engine.streams import StreamUpdate
    from specdec.handoff.moved import Handoff
    from specdec.model import SpeculativeModel
    from specdec.requests.request import Completion
    from specdec.requests.sampling import SamplingParams

__all__ = ["Completion", "Handoff", "SamplingParams", "SpeculativeModel", "StreamUpdate"]
__all__ += _errors.__all__
__all__.sort()

_HOMES = {
    "Completion": "specdec.requests.request",
    "Handoff": "specdec.handoff.moved",
    "SamplingParams": "specdec.requests.sampling",
    "SpeculativeModel": "specdec.model",
    "StreamUpdate": "specdec.engine.streams",
}
"""Modules of the public names that are imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
