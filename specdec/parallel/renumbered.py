"""A store in which the exchanges of a group are numbered from its own first one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class RenumberedStore(dist.Store):
    """Another store, whose keys PREFIX/NUMBER/RANK have their numbers counted from the first that is set here.

    torch's symmetric memory numbers what ranks exchange by what the process has exchanged so far, in any group, and
    waits for keys with its own numbers. Rank 0 is the user's process, in which tensor-parallel models may have been
    open before; the other ranks' processes are new. Without this they would wait for each other (mended in torch's
    main branch in September 2026, where numbers are the group's and this changes nothing).

    Source: pytorch/pytorch, torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryUtils.hpp (StoreExchange), issue
    196082 and pull request 196350.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def set(self, key: str, value: Any) -> None:
        """As `torch.distributed.Store.set`, of bytes. The first call of an exchange."""
        if self._first is None:
            self._first = int(key.split("/")[-2])
        self._store.set(self._renumbered(key), value)

    def get(self, key: str) -> bytes:
        """As `torch.distributed.Store.get`: waits as long as the other store does."""
        value: bytes = self._store.get(self._renumbered(key))
        return value

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """As `torch.distributed.Store.wait`; without a timeout as long as the other store does."""
        self._store.wait([self._renumbered(key) for key in keys], *timeout)

    def _renumbered(self, key: str) -> str:
        *prefix, number, rank = key.split("/")
        return "/".join((*prefix, str(int(number) - (self._first or 0)), rank))
