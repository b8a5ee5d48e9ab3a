"""Errors of training."""

from __future__ import annotations

from attention.errors import SpecdecError


class TrainingDivergedError(SpecdecError):
    """The loss became NaN or infinite; the last checkpoint is from before that."""
