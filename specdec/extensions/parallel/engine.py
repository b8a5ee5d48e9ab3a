"""The engine of a tensor-parallel target: every rank runs the same one, and rank 0 decides what comes next.

Rank 0 sends requests, aborts and steps in the order in which it does them itself; only it has users, threads and texts.
What a step decides follows from what was submitted and from the verification results, which are rank 0's on every
rank. If ranks still decided differently, that is noticed before anything is launched: rank 0 sends a digest of every
round's schedule, with which the others compare their own. (Sums of different sizes would hang with NCCL, and with gloo
end the process.)
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from attention.errors import named_error
from specdec.engine.engine import Engine
from specdec.errors import RanksLostError, SpecdecError
from specdec.extensions.parallel.collectives import RankGoneError
from specdec.extensions.parallel.messages import CallMethod
from specdec.extensions.parallel.ranks import HeldInterrupt, Ranks
from specdec.requests.request import Update
from specdec.requests.sampling import SamplingParams
from specdec.values import Function, IdSequence


class LeadingEngine(Engine):
    """Rank 0's engine. An error inside a round ends all requests: the ranks may be at different places after it."""

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        """parts: see `Engine`. The ranks' channel is a `Link`."""
        self.ranks = ranks
        self._link: Any = ranks.channel
        super().__init__(*parts)

    def submit(
        self,
        token_ids: IdSequence,
        params: SamplingParams,
        sample_index: int = 0,
        eos_token_ids: IdSequence | None = None,
    ) -> int:
        """See `Engine.submit`. Refused requests are not broadcast to other ranks. Raises RanksLostError."""
        self.admission.check(token_ids, params)
        with self.all_ranks():
            own = (list(token_ids), params.for_other_ranks, sample_index, eos_token_ids)
            self.tell("engine", "submit", *own)
            return super().submit(token_ids, params, sample_index, eos_token_ids)

    def arrange(self, request_ids: IdSequence) -> None:
        """See `Engine.arrange`. Raises RanksLostError when a rank is lost."""
        with self.all_ranks():
            self.tell("engine", "arrange", list(request_ids))
            super().arrange(request_ids)

    def abort(self, request_ids: IdSequence) -> None:
        """See `Engine.abort`. With a lost rank the requests are forgotten here."""
        with self.all_ranks():
            try:
                self.tell("engine", "abort", list(request_ids))
            except RanksLostError:
                self._forget_all()
            super().abort(request_ids)

    def forget_prefixes(self) -> None:
        with self.all_ranks():
            self.tell("engine", "forget_prefixes")
            super().forget_prefixes()

    def step(self) -> list[Update]:
        """See `Engine.step`. Raises RanksLostError when a rank is lost."""
        with self.all_ranks():
            if self.guests is not None:
                self.guests.settle()
            self.tell("engine", "step")
            updates = super().step()
            ended = [update.request_id for update in updates if update.last and _by_text(update)]
            if ended and not self._link.workers.is_lost:
                self.tell("engine", "abort", ended)
        return updates

    def tell(self, of: Literal["engine", "guests", "transfers"], method: str, *arguments: Any) -> None:
        """Let the other ranks call a method, see `CallMethod`; inside of `all_ranks`.

        Raises:
            RanksLostError: a rank is lost.
        """
        self._link.send(CallMethod(of, method, arguments))

    def run(self, function: Function, *arguments: Any) -> Any:
        """Call a function of a module on each rank with its engine, between two rounds; returns the result here."""
        with self.all_ranks():
            self.tell("engine", "run", function, *arguments)
            return function(self, *arguments)

    @contextmanager
    def all_ranks(self) -> Iterator[None]:
        """A block that every rank executes to its end: a first interrupt waits for its end, a second strikes at once.

        If it fails, the ranks are at different places and the model is given up.

        Raises:
            RanksLostError: a rank is lost, which is named.
        """
        with HeldInterrupt(), self._link.workers.lock, self.ranks.together():
            try:
                yield
            except RankGoneError as error:
                workers = self._link.workers
                raise workers.give_up(workers.found_loss() or str(error)) from error
            except RanksLostError:
                raise
            except BaseException as error:
                self._link.workers.give_up(f"rank 0 was stopped in the midst of a call ({named_error(error)})")
                raise

    def _run_again(self, error: Exception, reported: list[Update]) -> None:
        """Fail at once: ranks are at different places of the failed round, so it cannot be repeated."""
        self._kept = reported
        try:
            self._fail_round(error)
        finally:
            self._kept = []

    def _fail_round(self, error: Exception, struck: Container[int] = ()) -> None:
        reason = self._link.workers.found_loss() or f"a round failed on rank 0 ({named_error(error)})"
        lost = self._link.workers.give_up(reason)
        errors = [Update(request_id, [], "", error=_copy(lost, error)) for request_id in self._requests]
        self.reported = self._kept + errors
        self._forget_all()

    def _forget_all(self) -> None:
        """Drop all requests; tables are empty, and no round will use them."""
        self._requests.clear()
        self._start([])


def _copy(found: RanksLostError, cause: Exception) -> SpecdecError:
    """An error object for each request: callers in several threads raise them."""
    own = RanksLostError(str(found))
    own.__cause__ = cause
    return own


def _by_text(update: Update) -> bool:
    """Whether a request ended by something only rank 0 sees: its text, an error in it, the time, its caller."""
    done = update.completion
    return update.error is not None or (done is not None and done.finish_reason in ("stop", "timeout", "cancelled"))


def differing_ids(engine: Any) -> list[int]:
    """How many drafts and decided tokens of each rank differed from rank 0's before they were overwritten.

    Counted with SPECDEC_CHECK=1, otherwise 0. Ids may differ where logits are nearly equal, in half precision or if a
    rank has chosen other kernels. Called on rank 0, between two rounds; waits for the devices.
    """
    return list(engine.run(_gathered_differing))


def _gathered_differing(engine: LeadingEngine | FollowingEngine) -> list[int]:
    ranks = engine.ranks
    own = torch.tensor([ranks.count_differing()], dtype=torch.int64, device=ranks.device)
    return ranks.collectives.gather(own).flatten().tolist()


class FollowingEngine(Engine):
    """The engine of another rank: it does what rank 0 does, and has no texts. Any error ends its process."""

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        """parts: see `Engine`."""
        self.ranks = ranks
        super().__init__(*parts)

    def run(self, function: Function, *arguments: Any) -> None:
        """Call a function, see `LeadingEngine.run`."""
        function(self, *arguments)

    def _run_again(self, error: Exception, reported: list[Update]) -> None:
        raise error
