"""Errors of loading and matching draft heads."""

from __future__ import annotations

from attention.errors import InvalidInputError, SpecdecError


class HeadLoadError(SpecdecError):
    """A head's checkpoint is missing, incomplete, of an unknown format or contradicts its own configuration."""


class HeadMismatchError(InvalidInputError):
    """The head was made for another target (hidden size or vocabulary differ)."""
