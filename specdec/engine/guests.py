"""Guests: the interface of a feature that moves requests into and out of an engine with their keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from numpy import ndarray

from attention.cache.pages import BlockTables
from drafters.loops.base import Draft
from specdec.acceptance.judge import Drafted
from specdec.execution.base import Round
from specdec.requests.request import Request, Update
from specdec.rounds.rows import Schedule

DraftsOf = Callable[[Schedule], tuple[Draft, ndarray]]
"""Drafts of some rows, and each row's place among them: see `Launcher.drafts_of`."""


class Guests(Protocol):
    """Calls of an engine about requests that arrive with keys and values, or leave with them. See `Engine.host`.

    A waiting request with `Request.has_pages` gets its row from `enter`. One with `Request.leaves` is taken out of the
    batch by `leave` once it has its first token.
    """

    @property
    def leaving(self) -> bool:
        """Whether any request of the engine will leave."""

    def begin_round(self) -> None:
        """Called when a round begins."""

    def idle(self) -> None:
        """Called when a round has no work."""

    def settle(self) -> None:
        """Free pages that are no longer needed. Called between two rounds."""

    def keep(self, pools: Sequence[BlockTables], waiting: Sequence[Request]) -> None:
        """Called when rows and pages were made anew, after an interrupt or a failed round.

        Args:
            pools: the new block tables, in which the pages of this feature must not become free.
            waiting: all requests of the engine; none of them has a row or pages.
        """

    def enter(self, schedule: Schedule) -> Schedule:
        """Open rows for waiting requests that have pages; the schedule with them, their drafts after the others'.

        A row whose drafts lie at a place of the executor's buffer has that place in `RowTable.previous`.
        """

    def discard(self, request: Request) -> None:
        """Called when a request is removed from the scheduler. Idempotent."""

    def join(self, round_: Round, draft: Drafted) -> Drafted:
        """The drafts of a round with those that entered rows have brought along; called once after each schedule."""

    def leave(self, owners: Sequence[Request | None], drafts_of: DraftsOf) -> None:
        """Take requests that have their first token out of the batch.

        Args:
            owners: the requests of the rows that a round decided; None for a request that is gone.
        """

    def reported(self, request: Request, update: Update) -> Update:
        """The update to report in place of a request's own."""
