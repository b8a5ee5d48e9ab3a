"""specdec: speculative decoding for Hugging Face causal language models, with exactly the model's own output."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from specdec.import_names import OldNames, check_sibling, other_distribution, uncollected

if TYPE_CHECKING:
    from specdec.engine.streams import StreamUpdate
    from specdec.errors import (
        CacheTooSmallError,
        ClosedModelError,
        DrainingError,
        HandoffMismatchError,
        HeadLoadError,
        HeadMismatchError,
        InvalidInputError,
        InvariantError,
        KernelBuildError,
        ModelChangedError,
        ModelLoadError,
        NotCopyableError,
        OutOfDeviceMemoryError,
        OutOfPagesError,
        OutputError,
        QueueFullError,
        RanksLostError,
        RequestFailedError,
        RoundFailedError,
        RunFolderError,
        SpecdecError,
        SpecdecWarning,
        StaleMetadataError,
        TrainingDivergedError,
        TransferError,
        TransferTimeoutError,
        UnsupportedAttentionError,
        UnsupportedModelError,
    )
    from specdec.extensions.attached.attach import Attachment, attach
    from specdec.extensions.attached.custom import custom_generate
    from specdec.extensions.handoff.moved import Handoff
    from specdec.extensions.rollouts.trl import invariant
    from specdec.loading.heads import draft_vocab_of
    from specdec.model import SpeculativeModel
    from specdec.requests.grammar import Grammar
    from specdec.requests.request import Completion
    from specdec.requests.sampling import SamplingParams
    from specdec.requests.submission import Score
    from specdec.requests.user_code import row_wise

__all__ = [
    "Attachment",
    "CacheTooSmallError",
    "ClosedModelError",
    "Completion",
    "DrainingError",
    "Grammar",
    "Handoff",
    "HandoffMismatchError",
    "HeadLoadError",
    "HeadMismatchError",
    "InvalidInputError",
    "InvariantError",
    "KernelBuildError",
    "ModelChangedError",
    "ModelLoadError",
    "NotCopyableError",
    "OutOfDeviceMemoryError",
    "OutOfPagesError",
    "OutputError",
    "QueueFullError",
    "RanksLostError",
    "RequestFailedError",
    "RoundFailedError",
    "RunFolderError",
    "SamplingParams",
    "Score",
    "SpecdecError",
    "SpecdecWarning",
    "SpeculativeModel",
    "StaleMetadataError",
    "StreamUpdate",
    "TrainingDivergedError",
    "TransferError",
    "TransferTimeoutError",
    "UnsupportedAttentionError",
    "UnsupportedModelError",
    "attach",
    "custom_generate",
    "draft_vocab_of",
    "invariant",
    "row_wise",
]

_HOMES = {
    "Attachment": "specdec.extensions.attached.attach",
    "attach": "specdec.extensions.attached.attach",
    "custom_generate": "specdec.extensions.attached.custom",
    "draft_vocab_of": "specdec.loading.heads",
    "invariant": "specdec.extensions.rollouts.trl",
    "row_wise": "specdec.requests.user_code",
    "Completion": "specdec.requests.request",
    "Grammar": "specdec.requests.grammar",
    "Handoff": "specdec.extensions.handoff.moved",
    "SamplingParams": "specdec.requests.sampling",
    "Score": "specdec.requests.submission",
    "SpeculativeModel": "specdec.model",
    "StreamUpdate": "specdec.engine.streams",
}
"""Where the public names are defined that are not in `specdec.errors`."""


def _prepare() -> None:
    """What the first import does beside names."""
    for name in ("attention", "drafters"):
        check_sibling(name)
    sys.meta_path.insert(0, OldNames())
    from specdec.user_warnings import drop_noise, warn_user

    drop_noise()
    if problem := other_distribution():
        warn_user(problem)


_prepare()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    with uncollected():
        return getattr(import_module(_HOMES.get(name, "specdec.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
