"""Ranks: this process's place among those that run one target, and what they must do alike."""

from __future__ import annotations

import signal
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from attention.checking import CHECKS
from specdec.errors import InvalidInputError, RanksLostError, UnsupportedModelError
from specdec.extensions.parallel.collectives import Collectives
from specdec.extensions.parallel.messages import Launching, RankChannel
from specdec.extensions.parallel.plan import ShardingPlan, Share, as_rank, plan_for, told
from specdec.extensions.parallel.shares import exchanging, take_share
from specdec.loading.targets import AutoClass
from specdec.rounds.verification import TargetArrays
from specdec.values import Function, Json
from specdec.wrapped.group import Group, Reading
from specdec.wrapped.probing import TargetProbe


class Ranks(Group):
    """This process among the N (`size`) that run one target; rank 0 is the user's process.

    Attributes:
        device: this rank's. collectives: sums, gathers and broadcasts.
        channel: rank 0's to the others' processes, or another rank's from it.
        lost: whether a rank was lost before `close`. part: this rank's share of the target, once it is loaded.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        collectives: Collectives,
        channel: RankChannel,
        engine: Function | None = None,
        moving: Callable[[], tuple[Any, Any]] | None = None,
    ) -> None:
        """engine: makes this rank's engine of these ranks and the parts of an `Engine`; None where none is made.

        moving: rank 0's classes for moving requests, subclasses of handoff's `MovingRequests` and `Link`.
        """
        self.rank = rank
        self.size = size
        self.device = device
        self.collectives = collectives
        self.channel = channel
        self.lost = False
        self.part: Share | None = None
        self._engine = engine
        self.moving = moving
        with torch.inference_mode(False):  # now: made while a graph is captured, it would be zero again in every replay
            self._differing = torch.zeros((), dtype=torch.int64, device=device)

    def together(self) -> AbstractContextManager[None]:
        """While all ranks run the same: only then, and on this thread, forwards are allowed."""
        return exchanging(self.collectives)

    def share(self, ids: Tensor) -> None:
        """See `Group.share`.

        Ranks may round differently by a bit (kernels are chosen by timing), and a near tie then gives other ids. From
        here on all ranks have the same. With SPECDEC_CHECK=1 ids that differed are counted.
        """
        if not ids.numel():
            return
        if not CHECKS.on:
            self.collectives.from_first(ids)
            return
        own = ids.clone()
        self.collectives.from_first(ids)
        self._differing += (own != ids).sum()

    def count_differing(self) -> int:
        """How many ids of this rank differed from rank 0's, in check mode; waits for the device."""
        return int(self._differing)

    def wait(self, event: torch.cuda.Event) -> None:
        """See `Group.wait`. Polls, because the event of a round that waits for a lost rank never comes."""
        while not event.query():
            self.channel.check()

    def before_launch(self, target: TargetArrays) -> None:
        """See `Group.before_launch`: rank 0 sends the digest of its round, the others compare their own with it.

        Raises:
            RanksLostError: the ranks would launch different rounds.
        """
        own = Launching(digest_of(target))
        message = self.channel.told(own)
        if message != own:
            raise RanksLostError(
                f"the ranks disagree about a round: rank 0 says {message}, its digest here is {own.digest} (rows "
                f"{target.request_rows.tolist()}, from {target.start.tolist()}, {target.num_new.tolist()} tokens, "
                f"{target.drafts.tolist()} drafts)"
            )

    def note_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        """See `Group.note_graph`: it holds exchanges between the ranks, and is dropped before they part."""
        self.collectives.hold(graph)

    def least(self, values: Sequence[int]) -> list[int]:
        return self.collectives.least(values)

    def gather(self, rows: list[list[int]]) -> list[list[list[int]]]:
        return self.collectives.gather(torch.tensor(rows, device=self.device)).tolist()

    def copies(self, name: str) -> int:
        if self.part is None or name in self.part.divided:
            return 1
        return self.part.repeated.get(name, self.size)

    def reading(self, config: Any, found: AutoClass) -> Reading:
        """See `Group.reading`: this rank's share."""
        return _ReadingShare(self, plan_for(config, found, self.size))

    def check_target(self, probed: TargetProbe) -> None:
        """See `Group.check_target`. Raises UnsupportedModelError: the target has recurrent layers."""
        if probed.recurrent_calls:
            raise UnsupportedModelError(
                f"tensor_parallel_size={self.size}: {type(probed.model).__name__} has recurrent layers, whose states "
                "are not divided; load it without tensor_parallel_size"
            )

    def check_whole(self, call: str) -> None:
        raise InvalidInputError(
            f"{call}: with tensor_parallel_size={self.size} this process has one share of the weights; save new "
            "weights and load them again"
        )

    def engine(self, make: Function, *parts: Any) -> Any:
        """See `Group.engine`: a `LeadingEngine` on rank 0, a `FollowingEngine` on other ranks."""
        assert self._engine is not None
        return self._engine(self, *parts)

    def run(self, function: Function, engine: Any, *arguments: Any) -> Any:
        return engine.run(function, *arguments)

    def facts(self) -> Json:
        """See `Group.facts`: the other facts of `describe` (parameters, bytes, heads) describe this rank."""
        return {"size": self.size, "rank": self.rank, "collectives": self.collectives.name}

    def close(self) -> None:
        """On rank 0: let the other ranks close this model. Idempotent."""
        self.lost = self.lost or self.channel.is_lost
        self.channel.close()


class _ReadingShare(Reading):
    """The share of one rank, by a plan."""

    def __init__(self, ranks: Ranks, plan: ShardingPlan) -> None:
        self.ranks = ranks
        self.plan = plan
        self.options = told(plan, ranks.size)

    def while_reading(self) -> AbstractContextManager[None]:
        return as_rank(self.ranks.device, self.ranks.size)

    def finish(self, model: Any) -> None:
        self.ranks.part = take_share(model, self.plan, self.ranks.rank, self.ranks.size)


def digest_of(target: TargetArrays) -> int:
    """A digest of a round's schedule: its rows, what each reads from where, and how many drafts it verifies."""
    digest = 0
    for array in (target.request_rows, target.start, target.num_new, target.drafts, target.decided):
        digest = zlib.crc32(array.tobytes(), digest)
    return digest


_FOREIGN = (signal.SIG_DFL, signal.SIG_IGN, None)
"""Results of `signal.getsignal` for signals without a Python handler, which therefore raise nothing."""
_NUMBERS = tuple(int(n) for n in signal.valid_signals() if isinstance(n, signal.Signals) and "RT" not in n.name)


class HeldInterrupt:
    """A with-block inside which no signal handler that may raise runs (Ctrl-C, an alarm): it is called at the end.

    All ranks must come to the same place. A second signal of the same number strikes at once. On other threads than the
    main one, which no signal strikes, it does nothing.
    """

    def __init__(self) -> None:
        self._before: dict[int, Function] = {}
        self._held = set[int]()

    def __enter__(self) -> HeldInterrupt:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                handler: Any = signal.getsignal(number)
                if handler not in _FOREIGN:
                    self._before[number] = handler
                    signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        if number in self._held:
            self._before[number](number, frame)
        self._held.add(number)

    def __exit__(self, *error: object) -> None:
        try:
            self._put_back()
        finally:  # once more: one may have struck in the midst of it
            self._put_back()
            self._strike()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _strike(self) -> None:
        if self._held:
            try:
                signal.raise_signal(self._held.pop())
            finally:
                self._strike()
