"""Ranks: this process's place among those that run one target, and what it may do alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

import torch

from attention.checking import checking
from specdec.errors import SpecdecError
from specdec.parallel.collectives import Collectives
from specdec.parallel.inbox import Ear
from specdec.parallel.plan import Share
from specdec.parallel.workers import Link

_ALONE = (
    "a forward of a tensor-parallel model was called on one rank alone: every rank holds a part of its weights, and "
    "only the rounds of SpeculativeModel (generate, stream, …) run on all of them; load the model without "
    "tensor_parallel_size to call hf_model itself"
)
_here = local()


class Ranks:
    """This process among the N that run one target.

    Attributes:
        rank: 0 is the user's process. size: N, at least 2.
        device: this rank's.
        collectives: what carries sums, gathers and broadcasts.
        channel: rank 0's to the others' processes, or another rank's from rank 0.
        lost: whether a rank was lost before `close`. part: what of the target this rank has, once it is loaded.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, collectives: Collectives, channel: Link | Ear
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.collectives = collectives
        self.channel = channel
        self.lost = False
        self.part: Share | None = None
        with torch.inference_mode(False):  # now: made while a graph is captured, it would be zero again in every replay
            self._differing = torch.zeros((), dtype=torch.int64, device=device)

    @contextmanager
    def together(self) -> Iterator[None]:
        """While all ranks run the same: only then, and on this thread, forwards are allowed."""
        before = getattr(_here, "ranks", None)
        _here.ranks = self
        try:
            yield
        finally:
            _here.ranks = before

    def check_alive(self) -> None:
        """Raises RanksLostError once a rank is lost; called while the host waits for the device."""
        if isinstance(self.channel, Link):
            self.channel.workers.check()

    def close(self) -> None:
        """On rank 0: the other ranks let go of this model. Idempotent."""
        if isinstance(self.channel, Link):
            self.lost = self.lost or self.channel.workers.is_lost
            self.channel.close()

    def share(self, ids: torch.Tensor) -> None:
        """Overwrite ids, contiguous int64 on the device, with those of rank 0.

        Ranks may round differently by a bit (kernels are chosen by timing), and a near tie then gives other ids. From
        here on all ranks have the same. With SPECDEC_CHECK=1 ids that differed are counted.
        """
        if not ids.numel():
            return
        if not checking():
            self.collectives.from_first(ids)
            return
        own = ids.clone()
        self.collectives.from_first(ids)
        self._differing += (own != ids).sum()

    def count_differing(self) -> int:
        """How many ids of this rank were not those of rank 0, in check mode; waits for the device."""
        return int(self._differing)


def current() -> Ranks:
    """The ranks that run the same now, on this thread.

    Raises:
        SpecdecError: this rank runs alone, and would wait for the others forever.
    """
    found: Ranks | None = getattr(_here, "ranks", None)
    if found is None:
        raise SpecdecError(_ALONE)
    return found


def note_graph(graph: torch.cuda.CUDAGraph) -> None:
    """Of every graph that is captured: while all ranks run the same, it holds exchanges between them."""
    found: Ranks | None = getattr(_here, "ranks", None)
    if found is not None:
        found.collectives.hold(graph)
