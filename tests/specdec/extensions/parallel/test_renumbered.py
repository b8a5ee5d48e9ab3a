"""Ranks whose processes count their exchanges from different numbers meet in a renumbered store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from specdec.extensions.parallel.symmetric import RenumberedStore

VALUES = [bytes([rank, 0, 255, 128]) for rank in range(3)]
Made = Callable[[dist.Store], dist.Store]


def exchanged(file: Path, counts: list[int], made: Made) -> list[list[bytes]]:
    """What every rank has of all after each of two exchanges, as torch's symmetric memory exchanges.

    From C++, through a store with a prefix: so these are the methods that torch finds. counts: of exchanges that the
    process of each rank has made before.
    """
    size = len(counts)

    def of(rank: int) -> list[bytes]:
        shared = dist.FileStore(str(file), size)
        shared.set_timeout(timedelta(seconds=2))
        own = made(dist.PrefixStore("sums", shared))
        store, found = dist.PrefixStore("0", own), []
        for number in (counts[rank], counts[rank] + 1):
            keys = [f"CUDASymmetricMemory/{number}/{other}" for other in range(size)]
            store.set(keys[rank], VALUES[rank])  # type: ignore[arg-type]
            store.wait(keys[:1])
            store.wait(keys[1:], timedelta(seconds=2))
            found += [store.get(key) for key in keys]
        return found

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(of, range(size)))


@pytest.mark.parametrize("counts", [[0, 0], [2, 0], [0, 6], [4, 0, 0]])
def test_ranks_meet_whatever_their_processes_exchanged_before(tmp_path: Path, counts: list[int]) -> None:
    expected = [VALUES[: len(counts)] * 2] * len(counts)
    assert exchanged(tmp_path / "meeting", counts, RenumberedStore) == expected


@pytest.mark.thorough
def test_with_torchs_own_numbers_they_do_not(tmp_path: Path) -> None:
    """Negative control."""
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        exchanged(tmp_path / "meeting", [2, 0], lambda store: store)
