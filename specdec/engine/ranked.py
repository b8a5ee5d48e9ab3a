"""The engine of a tensor-parallel target: every rank runs the same one, and rank 0 says what comes next.

Requests, aborts and steps go one way, in the order in which rank 0 does them itself; its users, threads and texts are
its own. What a step decides follows from what was submitted and from the verification results, which are rank 0's on
every rank. Should ranks come to other decisions nevertheless, it is noticed before anything is launched: rank 0 sends
a digest of every round's schedule, with which the others compare their own. (Sums of different sizes would hang with
NCCL, and with gloo end the process.)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from attention.cache.handoff import EngineTable
from attention.errors import OutOfPagesError
from attention.transport.transports import synchronize
from specdec.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.handoff import Due
from specdec.errors import RanksLostError, SpecdecError
from specdec.execution.base import Drafter, Executor
from specdec.parallel.collectives import RankGoneError
from specdec.parallel.inbox import Ear
from specdec.parallel.interrupts import HeldInterrupt
from specdec.parallel.messages import (
    Abort,
    Arrange,
    Drop,
    Forget,
    Launching,
    Release,
    Reserve,
    Resume,
    Run,
    Step,
    Submit,
    SubmitLeaving,
)
from specdec.parallel.ranks import Ranks
from specdec.parallel.workers import Link
from specdec.requests.handoff import Handoff
from specdec.requests.moved import MovedRequest, Pages
from specdec.requests.request import Update
from specdec.requests.sampling import SamplingParams
from specdec.requests.submission import Submission
from specdec.requests.text import Tokenizer
from specdec.rounds.verification import TargetArrays
from specdec.wrapped.target import Target
from specdec.wrapped.versions import WeightVersions

Parts = tuple[Target, Drafter | None, Tokenizer, EngineConfig, Sequence[int], Executor, WeightVersions]
"""What an engine is made of."""
NOBODY = EngineTable("", "", {}, ())
"""The source of a handoff that only brings a request and its tensors to another rank."""


def make_engine(
    target: Target,
    drafter: Drafter | None,
    tokenizer: Tokenizer,
    config: EngineConfig,
    eos_token_ids: Sequence[int],
    executor: Executor,
    versions: WeightVersions,
) -> Engine:
    """The engine of a target, by the ranks that it is divided among."""
    parts: Parts = (target, drafter, tokenizer, config, eos_token_ids, executor, versions)
    if target.ranks is None:
        return Engine(*parts)
    ranks, channel = target.ranks, target.ranks.channel
    return FollowingEngine(parts, ranks, channel) if isinstance(channel, Ear) else LeadingEngine(parts, ranks, channel)


def digest_of(target: TargetArrays) -> int:
    """Of the schedule of a round: its rows, what each reads from where, and how many drafts it verifies."""
    digest = 0
    for array in (target.request_rows, target.start, target.num_new, target.drafts, target.decided):
        digest = zlib.crc32(array.tobytes(), digest)
    return digest


class LeadingEngine(Engine):
    """Rank 0's. An error inside a round ends all requests: the ranks may stand at different places after it."""

    def __init__(self, parts: Parts, ranks: Ranks, link: Link) -> None:
        self.ranks = ranks
        self._link = link
        super().__init__(*parts, announce=self._tell)
        self.moving.confirm = partial(confirm, ranks)

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        sample_index: int = 0,
        eos_token_ids: Sequence[int] | None = None,
    ) -> int:
        """See `Engine.submit`; a request that is refused is told to nobody.

        Raises:
            RanksLostError: a rank is lost.
        """
        self.check(token_ids, params)
        with self._all_ranks():
            self._link.send(Submit(list(token_ids), params, sample_index, eos_token_ids))
            return super().submit(token_ids, params, sample_index, eos_token_ids)

    def arrange(self, request_ids: Sequence[int]) -> None:
        """See `Engine.arrange`. Raises RanksLostError when a rank is lost."""
        with self._all_ranks():
            self._link.send(Arrange(list(request_ids)))
            super().arrange(request_ids)

    def abort(self, request_ids: Sequence[int]) -> None:
        """See `Engine.abort`. With a lost rank the requests are forgotten here."""
        with self._all_ranks():
            try:
                self._link.send(Abort(list(request_ids)))
            except RanksLostError:
                self._forget_all()
            super().abort(request_ids)

    def forget_prefixes(self) -> None:
        """See `Engine.forget_prefixes`."""
        with self._all_ranks():
            self._link.send(Forget())
            super().forget_prefixes()

    def step(self) -> list[Update]:
        """See `Engine.step`. Raises RanksLostError when a rank is lost."""
        with self._all_ranks():
            self._collect()
            self._link.send(Step())
            updates = super().step()
            ended = [update.request_id for update in updates if update.last and _by_text(update)]
            if ended and not self._link.workers.is_lost:
                self._link.send(Abort(ended))
        return updates

    def submit_leaving(self, request: Submission) -> int:
        """See `Visited.submit_leaving`. Raises RanksLostError: a rank is lost."""
        self.check_leaving(request)
        with self._all_ranks():
            self._link.send(SubmitLeaving(request))
            return super().submit_leaving(request)

    def reserve(self, moved: MovedRequest) -> int:
        """See `Visited.reserve`; where there are no pages nobody is told.

        Raises:
            OutOfPagesError: there are none. RanksLostError: a rank is lost.
        """
        self.check_moved(moved)
        missing: OutOfPagesError | None = None
        with self._all_ranks():
            try:
                number = super().reserve(moved)
                self._link.send(Reserve(moved))
            except OutOfPagesError as error:
                missing = error
        if missing is not None:
            raise missing
        return number

    def resume(self, moved: MovedRequest, arrival: tuple[int, Mapping[str, torch.Tensor]] | None = None) -> int:
        """See `Visited.resume`. What it brings goes to the other ranks as the bytes that came here."""
        self.check_moved(moved)
        number, tensors = (None, {}) if arrival is None else arrival
        with self._all_ranks():
            self._link.send(Resume(Handoff(NOBODY, "", 0.0, moved, {}, tensors).to_bytes(), number))
            return super().resume(moved, arrival)

    def release(self, leases: Sequence[str]) -> None:
        """See `Visited.release`. With a lost rank pages are free here alone."""
        self._settle_on_all(Due(tuple(leases)))

    def drop(self, number: int, settled: Callable[[], bool]) -> None:
        """See `Visited.drop`. Of late reads rank 0 says when they are over, on whichever rank they were."""
        now = settled()
        if self._link.workers.is_lost:
            super().drop(number, settled)
            return
        with self._all_ranks():
            self._link.send(Drop(number, now))
            super().drop(number, lambda: now)
            self.moving.watch(number, settled)

    def tell(self, message: Any) -> None:
        """Tell the other ranks something between two rounds. Raises RanksLostError when one is lost."""
        with self._all_ranks():
            self._link.send(message)

    def _begin_moving(self) -> None:
        self.moving.begin_round()  # what is due was told before the step

    def _collect(self) -> None:
        due = self.moving.due()
        if due:
            self._settle_on_all(due)

    def _settle_on_all(self, due: Due) -> None:
        if self._link.workers.is_lost:
            self.moving.settle(self.scheduler.pools(), due)
            return
        with self._all_ranks():
            self._link.send(Release(due.leases, due.reads))
            self.moving.settle(self.scheduler.pools(), due)

    def run(self, function: str, *arguments: Any) -> Any:
        """Call a function ("module:name") with these arguments on every rank; what it returns here.

        The first argument on each rank is its engine. Between two rounds only.
        """
        with self._all_ranks():
            self._link.send(Run(function, arguments))
            return named_function(function)(self, *arguments)

    @contextmanager
    def _all_ranks(self) -> Iterator[None]:
        """Whatever is begun here is done on every rank: no interrupt strikes in the middle, but a second one.

        What is left half done here leaves the ranks at different places: then the model is given up.

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
                self._link.workers.give_up(
                    f"rank 0 was stopped in the midst of a call ({type(error).__name__}: {error})"
                )
                raise

    def _tell(self, target: TargetArrays) -> None:
        self._link.send(Launching(digest_of(target)))

    def _run_again(self, error: Exception, reported: list[Update]) -> None:
        """Not with ranks, which stand at different places."""
        self._kept = reported
        try:
            self._fail_round(error)
        finally:
            self._kept = []

    def _fail_round(self, error: Exception, struck: Container[int] = ()) -> None:
        reason = self._link.workers.found_loss() or f"a round failed on rank 0 ({type(error).__name__}: {error})"
        lost = self._link.workers.give_up(reason)
        errors = [Update(request_id, [], "", error=_copy(lost, error)) for request_id in self._requests]
        self.reported = [*self._kept, *errors]
        self._forget_all()

    def _forget_all(self) -> None:
        """No requests, and empty tables, which no round will use."""
        self._requests.clear()
        self._start([])


def confirm(ranks: Ranks, granted: Mapping[str, Pages]) -> None:
    """Wait until every rank has written the pages of requests that leave, and lets them be read.

    Raises:
        RanksLostError: a rank is lost, or has granted others.
    """
    synchronize([torch.empty(0, device=ranks.device)])
    digest = zlib.crc32(repr(sorted(granted.items())).encode())
    least, most = ranks.collectives.least([digest, -digest])
    if least != -most:
        raise RanksLostError(f"the ranks disagree about the pages of requests that leave (here: {granted})")


def _copy(found: RanksLostError, cause: Exception) -> SpecdecError:
    """An error of its own for each request: callers in several threads raise them."""
    own = RanksLostError(str(found))
    own.__cause__ = cause
    return own


def _by_text(update: Update) -> bool:
    """Whether a request ended by what rank 0 alone sees: its text, or an error in it."""
    return update.error is not None or (update.completion is not None and update.completion.finish_reason == "stop")


def named_function(name: str) -> Any:
    """ "module:name" -> the function."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def own_logits(engine: Engine, token_ids: Sequence[int]) -> torch.Tensor:
    """[T, V]: what the target's own forward says after each of these tokens; of several ranks all must call it."""
    model = engine.target.hf_model
    ids = torch.tensor([list(token_ids)], device=model.device)
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, use_cache=False).logits[0]
    return logits


def differing_ids(engine: LeadingEngine | FollowingEngine) -> list[int]:
    """How many drafts and decided tokens of each rank were not rank 0's before they were overwritten.

    Counted with SPECDEC_CHECK=1; elsewhere 0. Ids may differ where logits are as good as equal, in half precision or
    where a rank's kernels are others. On rank 0, between two rounds; waits for the devices.
    """
    if isinstance(engine, LeadingEngine):
        return list(engine.run("specdec.engine.ranked:_gathered_differing"))
    return _gathered_differing(engine)


def _gathered_differing(engine: LeadingEngine | FollowingEngine) -> list[int]:
    ranks = engine.ranks
    own = torch.tensor([ranks.count_differing()], dtype=torch.int64, device=ranks.device)
    return [int(count) for count in ranks.collectives.gather(own).flatten().tolist()]


class FollowingEngine(Engine):
    """Another rank's: it does what rank 0 says, and has no texts. Whatever goes wrong is raised: the process ends."""

    def __init__(self, parts: Parts, ranks: Ranks, ear: Ear) -> None:
        self.ranks = ranks
        self._ear = ear
        super().__init__(*parts, announce=self._compare)
        self.moving.confirm = partial(confirm, ranks)

    def follow(self, message: Any) -> None:
        """Do what rank 0 does.

        Raises:
            RanksLostError: a message that does not belong here: the ranks stand at different places.
        """
        if isinstance(message, Step):
            self.step()
        elif isinstance(message, Submit):
            params = replace(message.params, stop=())
            self.submit(message.token_ids, params, message.sample_index, message.eos_token_ids)
        elif isinstance(message, Arrange):
            self.arrange(message.request_ids)
        elif isinstance(message, Abort):
            self.abort(message.request_ids)
        elif isinstance(message, Forget):
            self.forget_prefixes()
        elif isinstance(message, SubmitLeaving):
            request = message.request
            self.submit_leaving(replace(request, params=replace(request.params, stop=())))
        elif isinstance(message, Reserve):
            self.reserve(message.moved)
        elif isinstance(message, Resume):
            self._resume(message)
        elif isinstance(message, Drop):
            self.drop(message.number, lambda: message.settled)
        elif isinstance(message, Release):
            self.moving.settle(self.scheduler.pools(), Due(message.leases, message.reads))
            self.moving.finished()  # peers tell all ranks; rank 0 alone listens
        elif isinstance(message, Run):
            named_function(message.function)(self, *message.arguments)
        else:
            raise RanksLostError(f"the ranks disagree: rank 0 launched a round that is not launched here ({message})")

    def _resume(self, message: Resume) -> None:
        handoff = Handoff.from_bytes(message.data)
        moved = handoff.moved
        assert moved is not None
        arrival = None if message.number is None else (message.number, handoff.tensors)
        self.resume(replace(moved, params=replace(moved.params, stop=())), arrival)

    def _collect(self) -> None:
        """Rank 0 says what is due."""

    def _compare(self, target: TargetArrays) -> None:
        own, message = digest_of(target), self._ear.get()
        if message != Launching(own):
            raise RanksLostError(
                f"the ranks disagree about a round: rank 0 says {message}, its digest here is {own} (rows "
                f"{target.request_rows.tolist()}, from {target.start.tolist()}, {target.num_new.tolist()} tokens, "
                f"{target.drafts.tolist()} drafts)"
            )

    def _run_again(self, error: Exception, reported: list[Update]) -> None:
        raise error
