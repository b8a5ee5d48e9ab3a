"""Errors of the evaluations; they belong to the library's one tree."""

from __future__ import annotations

from importlib.util import find_spec

from specdec.errors import InvalidInputError, SpecdecError


class DataError(InvalidInputError):
    """A data set is missing, empty or malformed. The message names the file and the line."""


class RunStoreError(InvalidInputError):
    """A run folder cannot be continued: another run has it open, it belongs to other settings, or is damaged."""


class MissingExtraError(SpecdecError):
    """A package of an optional extra is not installed. The message has the command that installs it."""


class WorkerError(SpecdecError):
    """The workers of a distributed run cannot be started or kept alive."""


def require(package: str, extra: str) -> None:
    """Check that a package of an extra is installed, without importing it. Raises MissingExtraError: it is not."""
    if find_spec(package) is None:
        raise MissingExtraError(
            f"this needs the package {package!r}, which is not installed; "
            f"install it with: pip install 'specdec-hf[{extra}]'"
        )
