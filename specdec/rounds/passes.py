"""The draft prefill of M > 1 modules in the arena: its passes after the first, and where they find what they carry.

Pass m stands m positions further back than the verification, so it has lengths, slots and pages of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from attention.batch.host import HostBatch
from attention.batch.metadata import (
    BatchBuffers,
    CommonAttentionMetadata,
    batch_arrays,
    batch_fields,
    batch_sizes,
    from_staged,
)
from attention.batch.staging import Field, Staged
from drafters.loops.base import CarriedRows
from specdec.rounds.ahead import AheadInputs


class LaterPassesSection:
    """Passes 1 … M-1 in the arena; nothing for a draft prefill of one pass."""

    _carried = (
        Field("passes.request_rows", np.int64, ("passes.requests",)),
        Field("passes.sources", np.int64, ("passes.tokens",)),
    )

    def __init__(self, num_passes: int) -> None:
        """num_passes: M; 0 without a head."""
        self._prefixes = tuple(f"passes.{m}" for m in range(1, num_passes))
        self._tables = {f"{prefix}.block_table" for prefix in self._prefixes}  # kernels read the flat lists of pages
        batches = (field for prefix in self._prefixes for field in batch_fields(prefix))
        own = (*self._carried, *(field for field in batches if field.name not in self._tables))
        self.fields: tuple[Field, ...] = own if self._prefixes else ()

    def dimensions(self, rows: int, tokens: int, pages: int) -> dict[str, int]:
        """Sizes of `fields` for at most so many rows, tokens and pages a row of a verification.

        A request may be two rows of a pass, see `drafters.loops.modules.index.shifted_batch`.
        """
        sizes = {"passes.requests": rows, "passes.tokens": tokens}
        for prefix in self._prefixes:
            sizes |= batch_sizes(prefix, 2 * rows, tokens, pages)
        return sizes

    def static_dimensions(self, rows: int, query_len: int, page_entries: int) -> dict[str, int]:
        """The same for rounds of one fixed shape."""
        tokens = rows * query_len
        sizes = {"passes.requests": rows, "passes.tokens": tokens}
        for prefix in self._prefixes:
            sizes |= batch_sizes(prefix, rows, tokens, 0) | {f"{prefix}.rows_times_pages": page_entries}
        return sizes

    def values(self, ahead: AheadInputs) -> dict[str, np.ndarray]:
        """What is sent of a round of any shape."""
        if ahead.sources is None:
            return {}
        found = {"passes.request_rows": ahead.request_rows, "passes.sources": ahead.sources}
        for prefix, batch in zip(self._prefixes, ahead.batches[1:], strict=True):
            found |= batch_arrays(prefix, batch)
        return {name: array for name, array in found.items() if name not in self._tables}

    def buffers(self, host: Mapping[str, np.ndarray]) -> tuple[list[BatchBuffers], np.ndarray, np.ndarray]:
        """One of the arena's host buffers, of several passes: each of them, and the arrays of `CarriedRows`."""
        passes = [BatchBuffers.of(prefix, host) for prefix in self._prefixes]
        return passes, host["passes.request_rows"], host["passes.sources"]

    def metadata(self, batches: Sequence[HostBatch], staged: Staged) -> tuple[CommonAttentionMetadata, ...]:
        """The attention of passes 1 … M-1 as it arrived."""
        passes = zip(self._prefixes, batches, strict=True)
        return tuple(from_staged(prefix, batch, staged) for prefix, batch in passes)

    def carried(self, staged: Staged) -> CarriedRows | None:
        """What the passes carry as it arrived; None of one pass."""
        return CarriedRows(staged["passes.request_rows"], staged["passes.sources"]) if self._prefixes else None
