"""The round's device-to-host read: started after the verification, awaited when the host has no other work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specdec.acceptance.packed import Outcome, PackedResult, unpack_outcome
from specdec.errors import InvalidInputError
from specdec.wrapped.group import ALONE, Group

_RING = 2


@dataclass(frozen=True)
class Readback:
    """A result on its way to the host. `copied` is None where nothing travels (CPU).

    group: the processes that compute it together. notes: what travels with it, see `RoundExtra.notes`.
    """

    host: Tensor
    copied: torch.cuda.Event | None
    group: Group = ALONE
    notes: tuple[Tensor, ...] = ()

    def wait(self) -> np.ndarray:
        """Wait, and return a copy of the tensor. Launches after the verification continue meanwhile.

        Raises:
            RanksLostError: another process of the group is lost.
        """
        if self.copied is not None:
            self.group.wait(self.copied)
        return self.host.numpy().copy()


class HostReads:
    """Starts reads into a ring of two pinned buffers; a buffer that was read may be overwritten two reads later.

    Benchmarks and tests may watch or replace verification results by two hooks, set while no request runs.

    Attributes:
        before_read: called with every result and num_drafts [J], both on the device, before the copy is queued; may
            write into the result there, and must not wait for the device. Later launches, the draft prefill and a
            chained verification, read the written result. With several processes, only the first one's hook has effect.
        after_read: called with every result on the host and num_drafts [J]; returns the result to commit. Without
            drafts it must keep the tokens: the next verification may have read them on the device already.
    """

    def __init__(self, max_numel: int, device: torch.device, group: Group = ALONE) -> None:
        """max_numel: elements of the largest tensor, int64. group: all read the result of its first process."""
        self._group = group
        self._on_cuda = device.type == "cuda"
        count = _RING if self._on_cuda else 0
        self._pinned = [torch.empty(max_numel, dtype=torch.int64, pin_memory=True) for _ in range(count)]
        self._events = [torch.cuda.Event() for _ in range(count)]
        self._started = 0
        self.before_read: Callable[[PackedResult, Tensor], None] | None = None
        self.after_read: Callable[[Outcome, np.ndarray], Outcome] | None = None

    def start(self, result: PackedResult, num_drafts: Tensor, notes: tuple[Tensor, ...] = ()) -> Readback:
        """Queue the copy after all launches so far.

        Args:
            num_drafts: [J] int64 on the device, of the decided rows. notes: see `RoundExtra.notes`.
        """
        if self.before_read is not None:
            self.before_read(result, num_drafts)
        packed = result.packed
        if self._group.size > 1:
            self._group.share(packed)
        if not self._on_cuda:
            return Readback(packed.clone(), None, notes=notes)  # the next launch may write to the same place
        slot = self._started % _RING
        self._started += 1
        host = self._pinned[slot][: packed.numel()].view(packed.shape)
        host.copy_(packed, non_blocking=True)
        # Not from the ring: notes are rare and of any size, and torch caches pinned memory.
        own = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in notes]
        for there, each in zip(own, notes, strict=True):
            there.copy_(each, non_blocking=True)
        self._events[slot].record()
        return Readback(host, self._events[slot], self._group, tuple(own))

    def finish(self, read: Readback, num_drafts: np.ndarray) -> Outcome:
        """Wait for a read of rows with num_drafts [J] drafts.

        Raises:
            InvalidInputError: `after_read` would decide in one process of several.
            RanksLostError: another process of the group is lost.
        """
        outcome = unpack_outcome(read.wait())
        if read.notes:
            outcome = replace(outcome, notes=tuple([each.numpy() for each in read.notes]))
        if self.after_read is None:
            return outcome
        counts = self.after_read(outcome, num_drafts)
        if counts is not outcome and self._group.size > 1:
            raise InvalidInputError("HostReads.after_read gave another result than the one that all ranks have read")
        return counts
