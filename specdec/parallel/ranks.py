"""Ranks: this process's place among those that run one target, and what it may do alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

import torch

from attention.checking import checking
from specdec.errors import SpecdecError
from specdec.parallel.collectives import Collectives
from specdec.parallel.inbox import Inbox
from specdec.parallel.workers import Workers

_ALONE = (
    "a forward of a tensor-parallel model was called on one rank alone: every rank holds a part of its weights, and "
    "only the rounds of SpeculativeModel (generate, stream, …) run on all of them; load the model without "
    "tensor_parallel_size to call hf_model itself"
)
_current: Ranks | None = None


class Ranks:
    """This process among the N that run one target.

    Attributes:
        rank: 0 is the user's process. size: N, at least 2.
        device: this rank's.
        collectives: what carries sums, gathers and broadcasts.
        channel: rank 0's to the others' processes, or another rank's from rank 0.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, collectives: Collectives, channel: Workers | Inbox
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.collectives = collectives
        self.channel = channel
        self._holder: int | None = None
        self._differing: torch.Tensor | None = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """While all ranks run the same: only then, and on this thread, forwards are allowed."""
        before, self._holder = self._holder, get_ident()
        try:
            yield
        finally:
            self._holder = before

    def check_alive(self) -> None:
        """Raises RanksLostError once a rank is lost; called while the host waits for the device."""
        if isinstance(self.channel, Workers):
            self.channel.check()

    def check_together(self) -> None:
        """Raises SpecdecError when a forward was called on this rank alone, which would wait for the others forever."""
        if self._holder != get_ident():
            raise SpecdecError(_ALONE)

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
        if self._differing is None:
            with torch.inference_mode(False):
                self._differing = torch.zeros((), dtype=torch.int64, device=ids.device)
        self._differing += (own != ids).sum()

    def count_differing(self) -> int:
        """How many ids of this rank were not those of rank 0, in check mode; waits for the device."""
        return 0 if self._differing is None else int(self._differing)


def enter(ranks: Ranks | None) -> None:
    """From now on operators of this process use these ranks; None: there are none any more."""
    global _current
    _current = ranks


def current() -> Ranks:
    """The ranks of this process, which all run the same now.

    Raises:
        SpecdecError: there are none any more, or this rank runs alone.
    """
    if _current is None:
        raise SpecdecError("a share of a tensor-parallel model was run after close()")
    _current.check_together()
    return _current
