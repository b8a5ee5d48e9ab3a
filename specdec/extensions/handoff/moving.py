"""Requests that move between engines, as one engine sees them: `Guests` whose requests come from or go to others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attention.cache.pages import BlockTables
from attention.errors import HandoffMismatchError, OutOfPagesError
from drafters.loops.base import Draft
from specdec.engine.admission import Admission
from specdec.engine.engine import Engine
from specdec.engine.guests import DraftsOf, Guests
from specdec.execution.base import Executor, Round
from specdec.extensions.handoff.batch import Arrivals, Departures
from specdec.extensions.handoff.held import ROUNDS_IN_VAIN, HeldPages
from specdec.extensions.handoff.moved import Arrival, Leaving, MovedRequest
from specdec.extensions.handoff.tensors import RowTensors, row_tensors
from specdec.requests.request import Request, Times, Update
from specdec.requests.text import TextStream
from specdec.rounds.rows import Schedule


class MovingRequests(Guests):
    """The requests of one engine that come from other engines or leave for them. Not thread-safe.

    held: their pages while they have no row.
    """

    def __init__(self, engine: Engine) -> None:
        """For an engine, which starts to use it with `Engine.host`."""
        self._engine = engine
        self.held = HeldPages()
        self._arrivals = Arrivals()
        self._departures = Departures(self.held)
        self._tensors: tuple[Executor, RowTensors] | None = None

    @property
    def tensors(self) -> RowTensors:
        """Access to what rows carry on the device besides pages, for the engine's present executor."""
        executor = self._engine.executor
        if self._tensors is None or self._tensors[0] is not executor:
            self._tensors = executor, row_tensors(self._engine)
        return self._tensors[1]

    @property
    def leaving(self) -> bool:
        return self._departures.expected

    def begin_round(self) -> None:
        if self.held.active:
            self.held.begin_round()
            self.settle()

    def idle(self) -> None:
        """See `Guests.idle`: requests may wait for pages that only a peer or the end of a lease frees."""
        self.held.pause(bool(self._engine.scheduler.waiting))

    def settle(self) -> None:
        if self.held.active:
            self.held.settle(self._engine.scheduler.pools(), self.held.due())

    def keep(self, pools: Sequence[BlockTables], waiting: Sequence[Request]) -> None:
        self._arrivals.forget()
        self._departures.forget(waiting)
        self.held.keep(pools)

    def enter(self, schedule: Schedule) -> Schedule:
        return self._arrivals.enter(self._engine, schedule, self.tensors)

    def discard(self, request: Request) -> None:
        self._departures.expect_no_more(request)
        self._arrivals.discard(self._engine, request)

    def join(self, round_: Round, draft: Draft | None) -> Draft | None:
        return self._arrivals.join(round_, draft, self.tensors)

    def leave(self, owners: Sequence[Request | None], drafts_of: DraftsOf) -> None:
        self._departures.leave(self._engine, owners, self.tensors, drafts_of)

    def reported(self, request: Request, update: Update) -> Update:
        return self._departures.reported(request, update)

    def submit_leaving(self, request: Leaving) -> int:
        """As `Engine.submit`, but the request leaves with its first token, for another engine."""
        limit, engine = self.check_leaving(request), self._engine
        own = (request.token_ids, request.params, limit, request.sample_index, request.eos_token_ids)
        queued = engine.admission.request(engine.take_id(), *own)
        request_id = engine.queue(queued)
        self._departures.expect(queued, request.seconds)
        return request_id

    def check_leaving(self, request: Leaving) -> int:
        """As `Engine.check`, for a request of which only the prompt is read here.

        Raises:
            HandoffMismatchError: the rounds have state that cannot move, see `RoundExtra.refuses_handoff`.
        """
        _check_extras(self._engine.admission)
        if request.params.user_code:
            raise HandoffMismatchError(
                f"{', '.join(request.params.user_code)}: code of the caller's does not move to another engine; "
                "generate such requests where they are submitted"
            )
        if request.params.grammar is not None:
            raise HandoffMismatchError(
                "grammar: where a request stands in it does not move to another engine; generate such requests where "
                "they are submitted"
            )
        if request.params.told:
            raise HandoffMismatchError(
                f"{', '.join(request.params.told)}: what the first round tells does not move to another engine; leave "
                "them out"
            )
        return self._engine.admission.check(request.token_ids, request.params, prompt_alone=True)

    def check_moved(self, moved: MovedRequest) -> None:
        """Check that a request from another engine can be served as it would have been there.

        Raises:
            InvalidInputError, CacheTooSmallError: as in `Admission.check`; or its limits exceed this engine's.
        """
        admission = self._engine.admission
        _check_extras(admission)
        longest, num_drafts = admission.config.max_model_len, admission.config.num_speculative_tokens
        if moved.limit > longest or moved.num_drafts > num_drafts:
            raise HandoffMismatchError(
                f"the request may have {moved.limit} tokens and {moved.num_drafts} drafts a round; this model was "
                f"loaded for max_model_len={longest} and num_speculative_tokens={num_drafts}; "
                "load it for as much, or give SamplingParams(max_new_tokens=…, num_speculative_tokens=…) to prefill"
            )
        admission.check_prompt(moved.prompt_token_ids)
        admission.check_ids("new tokens: ", moved.new_token_ids)
        admission.check_ids("stop_token_ids: ", moved.params.stop_token_ids)
        if not moved.new_token_ids or len(moved.prompt_token_ids) + len(moved.new_token_ids) >= moved.limit:
            raise HandoffMismatchError(
                f"a moved request has {len(moved.prompt_token_ids)} prompt tokens, {len(moved.new_token_ids)} new ones "
                f"and a limit of {moved.limit}: at least one new token, and room for one more, are needed"
            )
        admission.check_cache(len(moved.prompt_token_ids), moved.limit)

    def reserve(self, moved: MovedRequest) -> int:
        """Take pages for a request from another engine, to be filled and then given to `resume`; returns their number.

        Raises:
            InvalidInputError, CacheTooSmallError: such a request cannot be served here, see `check_moved`.
            OutOfPagesError: not now.
        """
        engine = self._engine
        self.check_moved(moved)
        with engine.change:
            self.settle()
            without_head = engine.scheduler.head_pages is not None and not moved.num_drafts
            rounds = 0 if engine.inflight is None else ROUNDS_IN_VAIN
            try:
                return self.held.reserve(engine.scheduler.pools(), moved, without_head, rounds)
            except OutOfPagesError as error:
                missing = error
        raise missing  # outside: an error that leaves the block makes the engine renew its rows

    def may_fill(self, number: int) -> bool:
        """Whether reserved pages may be written to, see `HeldPages.may_fill`."""
        return self._engine.inflight is None or self.held.may_fill(number)

    def resume(self, moved: MovedRequest, arrival: tuple[int, Mapping[str, torch.Tensor]] | None = None) -> int:
        """Queue a request from another engine; it continues as if it had always been here.

        arrival: the number of its filled pages, and its tensors (see `Departure`); None to read its tokens again.
        """
        self.check_moved(moved)
        request = moved_here(self._engine.admission, self._engine.take_id(), moved)
        request_id = self._engine.queue(request)  # first: it repairs what an interrupt has left, and keeps held pages
        if arrival is not None:
            number, tensors = arrival
            with self._engine.change:
                self._arrivals.add(request, Arrival(self.held.take(number), tensors))
        return request_id

    def release(self, leases: Sequence[str]) -> None:
        """Free pages held for requests that left and will not be read. Unknown leases have ended already."""
        with self._engine.change:
            self.held.release(self._engine.scheduler.pools(), leases)

    def drop(self, number: int, settled: Callable[[], bool]) -> None:
        """Give up reserved pages because the request does not arrive, see `HeldPages.drop`."""
        with self._engine.change:
            self.held.drop(self._engine.scheduler.pools(), number, settled)


def moving_requests(engine: Engine, make: Callable[[Any], MovingRequests] = MovingRequests) -> MovingRequests:
    """The moving requests of an engine, made at first use. Called between two rounds.

    make: makes them; on one of several ranks see `specdec.extensions.parallel.among_ranks`.
    """
    if not isinstance(engine.guests, MovingRequests):
        engine.host(make(engine))
    assert isinstance(engine.guests, MovingRequests)
    return engine.guests


def _check_extras(admission: Admission) -> None:
    for extra in admission.config.extras:
        if extra.refuses_handoff:
            raise HandoffMismatchError(f"requests do not move between engines: {extra.refuses_handoff}")


def moved_here(admission: Admission, request_id: int, moved: MovedRequest) -> Request:
    """A waiting request that was begun in another engine. Its text and first tokens are reported here; its times are
    set back by the seconds spent there."""
    now, new = time.perf_counter(), list(moved.new_token_ids)
    stream = TextStream(admission.vocabulary, moved.params.stop)
    stream.push(new, len(new))
    return Request(
        id=request_id,
        params=moved.params,
        prompt_len=len(moved.prompt_token_ids),
        limit=moved.limit,
        num_drafts=moved.num_drafts,
        key=moved.key,
        committed=moved.committed,
        stream=stream,
        sample_index=moved.sample_index,
        eos_token_ids=moved.eos_token_ids,
        times=Times(now - moved.queue_s - moved.prefill_s, now - moved.prefill_s, now),
        preemptions=moved.preemptions,
        prefix_hit_tokens=moved.prefix_hit_tokens,
        cached_tokens=moved.cached_tokens,
        variant=moved.variant,
        new_tokens=new,
    )
