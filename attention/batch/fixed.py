"""Batches of one fixed shape, whose arrays and page lists are written in place into the buffers that are sent."""

from __future__ import annotations

from typing import Any

from numpy import ndarray

from attention.batch.host import HostBatch, HostBatches


def _fresh(name: str) -> Any:
    """A property of HostBatch that is computed at every use."""
    return property(vars(HostBatch)[name].func)


class LiveBatch(HostBatch):
    """A batch whose arrays are views of staging buffers: the owner of the buffers writes the next round into them.

    So nothing derived from them is remembered, except page_indptr, which is a buffer itself.
    """

    def __init__(self, page_indptr: ndarray, **arrays: Any) -> None:
        """page_indptr: [B+1] int32. arrays: the fields of HostBatch."""
        super().__init__(**arrays)
        # A frozen dataclass refuses attributes; this fills HostBatch's cached property, so that it is never computed.
        self.__dict__["page_indptr"] = page_indptr

    def over(self, block_table: ndarray, other_groups: HostBatches = ()) -> LiveBatch:
        """The same buffers with the rows' pages of block_table [B, P] int32 and the pages of further cache groups.

        This runs several times a round, on the way to the next launch, so the fields are not copied.
        """
        batch = object.__new__(LiveBatch)  # not __init__, which would assign every field again
        vars(batch).update(vars(self), block_table=block_table, other_groups=other_groups)
        return batch

    query_lens = _fresh("query_lens")
    page_counts = _fresh("page_counts")
    page_indices = _fresh("page_indices")
    last_page_len = _fresh("last_page_len")
