"""The root of the error tree. `specdec.errors` extends and re-exports it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

ERRORS_PAGE = "docs/reference/errors.md"
"""The page with the cause and the remedy of every error."""
_ROOT = Path(__file__).resolve().parents[1]


@cache
def manual(root: Path = _ROOT) -> Path | None:
    """The folder in which an installed wheel has docs/ and examples/; None in a checkout, and where there is none.

    root: the folder of our packages; pip puts `share/doc` into a folder above it ([tool.setuptools.data-files]).
    """
    if (root / ERRORS_PAGE).is_file():
        return None
    found = (folder / "share" / "doc" / "specdec-hf" for folder in (root, *root.parents))
    return next(filter(Path.is_dir, found), None)


class SpecdecError(Exception):
    """Root of every error this project raises on purpose. A traceback ends with where the manual describes it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"See {self.described_at()}")

    @classmethod
    def described_at(cls) -> str:
        """The section of the manual; classes without a section use their base class's."""
        ours = ("attention", "drafters", "specdec", "evals")
        named = (one for one in cls.__mro__ if one.__module__.partition(".")[0] in ours and one.__name__[0] != "_")
        return f"{(manual() or Path()) / ERRORS_PAGE}#{next(named).__name__.lower()}"


class InvalidInputError(SpecdecError, ValueError):
    """An argument is outside the allowed range. The message gives the value, the allowed values and what to do."""


class OutOfPagesError(SpecdecError):
    """The page allocator cannot serve a request. Raised before anything is changed."""


class UnsupportedAttentionError(SpecdecError):
    """A backend does not have an attention variant that a layer needs."""


class KernelBuildError(SpecdecError):
    """A kernel that is compiled at the first start could not be built; the message has the compiler's output."""


class HandoffMismatchError(InvalidInputError):
    """A request cannot move between these two engines; nothing was read. The message names what differs."""


class TransferError(SpecdecError):
    """Keys and values of a moved request did not arrive: its engine is gone, or no longer holds them."""


class TransferTimeoutError(TransferError):
    """They did not arrive before the deadline; where they were to be written is kept from use until it is safe."""


class StaleMetadataError(SpecdecError):
    """Metadata of an earlier round was used after its arena slot was overwritten (only under SPECDEC_CHECK=1)."""


class InvariantError(SpecdecError, AssertionError):
    """An internal invariant does not hold (only checked under SPECDEC_CHECK=1). Always a bug in specdec."""


def named_error(error: BaseException) -> str:
    """An error's class and message.

    >>> named_error(KeyError("rows"))
    "KeyError: 'rows'"
    """
    return f"{type(error).__name__}: {error}"
