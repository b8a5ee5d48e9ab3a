"""Errors of loading, matching and training draft heads."""

from __future__ import annotations

from attention.errors import InvalidInputError, SpecdecError


class HeadLoadError(SpecdecError):
    """A head's checkpoint is missing, incomplete, of an unknown format or contradicts its own configuration."""


class HeadMismatchError(InvalidInputError):
    """The head was made for another target (hidden size or vocabulary differ)."""


class TrainingDivergedError(SpecdecError):
    """The loss or a weight became NaN or infinite; the last checkpoint is from before that."""


class RunFolderError(SpecdecError):
    """The folder of a run cannot be used: another process writes to it, it is damaged, or it cannot be written."""
