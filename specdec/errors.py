"""Every error a user can meet. One tree, rooted at `SpecdecError`.

Users find these in `specdec` itself, and tracebacks name them so (`specdec.InvalidInputError`), wherever they are
defined: `attention` and `drafters` raise errors of the same tree without importing this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from attention.errors import (
    HandoffMismatchError,
    InvalidInputError,
    InvariantError,
    KernelBuildError,
    OutOfPagesError,
    SpecdecError,
    StaleMetadataError,
    TransferError,
    TransferTimeoutError,
    UnsupportedAttentionError,
)
from drafters.errors import HeadLoadError, HeadMismatchError, RunFolderError, TrainingDivergedError


class ModelLoadError(SpecdecError):
    """The target model or its tokenizer cannot be loaded."""


class UnsupportedModelError(SpecdecError):
    """The target would come out wrong through this library's attention; the message gives the reason."""


class ModelChangedError(SpecdecError):
    """The wrapped model was changed in a way that the engine cannot follow; the message names the change."""


class CacheTooSmallError(InvalidInputError):
    """The KV cache cannot hold even one such request."""


class OutOfDeviceMemoryError(SpecdecError):
    """The device ran out of memory while the engine was built; the message names what takes it."""


class OutputError(SpecdecError):
    """A file of a run cannot be written: no permission, no room, no such folder. The message names the file."""


class ClosedModelError(SpecdecError):
    """A SpeculativeModel was used after its `close()`, or closed while the request was running."""


class QueueFullError(SpecdecError):
    """As many requests wait as `max_waiting_requests` allows; nothing of this call was queued."""


class DrainingError(SpecdecError):
    """The model ends what it has (`drain`, `aclose`) and takes no new requests."""


class NotCopyableError(SpecdecError, TypeError):
    """A SpeculativeModel was to be copied or pickled; it holds caches, hooks and device memory that have no copy."""


def refuse_copy(model: object, protocol: object) -> NoReturn:
    """`__reduce_ex__`: pickle, copy and deepcopy end here. Raises NotCopyableError."""
    raise NotCopyableError(
        "a SpeculativeModel cannot be copied or pickled: it holds caches and device memory; call "
        "SpeculativeModel.from_pretrained where it is needed (in the other process)"
    )


class _EndedError(SpecdecError):
    """A request was ended by an error."""

    index: int | None = None
    completions: Mapping[int, Any] = MappingProxyType({})


class RequestFailedError(_EndedError):
    """One request failed and was ended: its tokenizer, its stop strings or its parameters raised (`__cause__`).

    Attributes:
        index: its completion's place in the call; None where no call was read. completions: of `generate` and
            `Stream.completions`, by place: those that did finish.
    """


class RoundFailedError(_EndedError):
    """A round failed (`__cause__`, for example an error of the device); the requests that ran in it were ended.

    Attributes:
        index, completions: see `RequestFailedError`.
    """


ENDED = RequestFailedError, RoundFailedError
"""What a request that failed is reported with."""


class RanksLostError(SpecdecError):
    """A process of a tensor-parallel model ended or failed, or its ranks disagreed; the model must be loaded again."""


class SpecdecWarning(UserWarning):
    """Something a user should know, that does not make the result wrong."""


UNNAMED_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What the code of a model raises that was given inputs it was not written for."""

__all__ = [
    "CacheTooSmallError",
    "ClosedModelError",
    "DrainingError",
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
    "SpecdecError",
    "SpecdecWarning",
    "StaleMetadataError",
    "TrainingDivergedError",
    "TransferError",
    "TransferTimeoutError",
    "UnsupportedAttentionError",
    "UnsupportedModelError",
]

for _name in __all__:
    globals()[_name].__module__ = "specdec"
