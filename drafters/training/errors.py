"""Errors of training."""

from __future__ import annotations

from attention.errors import SpecdecError


class TrainingDivergedError(SpecdecError):
    """The loss or a weight became NaN or infinite; the last checkpoint is from before that."""


class RunFolderError(SpecdecError):
    """The folder of a run cannot be used: another process writes to it, it is damaged, or it cannot be written."""
