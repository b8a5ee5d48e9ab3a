"""CommonAttentionMetadata: what an attention builder gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from attention.batch.host import HostBatch
from attention.batch.staging import Bucket, Field, Staged, StagingArena, bucket_of
from attention.checking import checking, require
from attention.recurrence.rows import StateRows

BATCH_FIELDS: tuple[tuple[str, type[np.generic], tuple[str, ...]], ...] = (
    ("query_start_loc", np.int32, ("rows_plus_1",)),
    ("seq_lens", np.int32, ("rows",)),
    ("block_table", np.int32, ("rows", "pages")),
    ("slot_mapping", np.int64, ("tokens",)),
    ("positions", np.int64, ("tokens",)),
    ("page_indices", np.int32, ("rows_times_pages",)),
    ("page_indptr", np.int32, ("rows_plus_1",)),
    ("last_page_len", np.int32, ("rows",)),
)
"""Arrays of a HostBatch that travel to the device: name, dtype, symbolic dimensions."""

_GROUP_FIELDS = tuple(field for field in BATCH_FIELDS if field[0] in ("slot_mapping", "page_indices", "page_indptr"))
"""What each further cache group has of its own; lengths, positions and query_start_loc travel once."""

STATE_FIELDS = ("slots", "start", "replay", "num_new")
"""Arrays of a StateIndex, [B] int32."""

ROW_FIELDS = ("query_start_loc", "seq_lens", "page_indices", "page_indptr", "last_page_len")
"""The flat ones that change with the rows; all int32."""


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """A batch's attention: exact host arrays, and the device views of those that kernels read.

    It is never edited in place. Builders plan from `host`; kernels read the device side.

    Attributes:
        host: the numpy side.
        query_start_loc: [B+1] int32; seq_lens: [B] int32; block_table: [B, P] int32, None in rounds of a fixed shape
            (kernels read the flat list of pages; tables as wide as the longest row there can be would only be sent).
        slot_mapping: [T] int64; positions: [T] int64; page_indices: [sum of page counts] int32.
        page_indptr: [B+1] int32; last_page_len: [B] int32.
        staged: the transfer they came with (for the staleness check).
        other_groups: the same rows on the pages of each further cache group; () where the model has one. On the device
            they have slots and page lists of their own, and all else, seq_lens included, is this batch's: kernels read
            the number of a row's keys from its page list.
        states: the rows as recurrences read them; None where the model has none.
    """

    host: HostBatch
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    page_indices: torch.Tensor
    page_indptr: torch.Tensor
    last_page_len: torch.Tensor
    staged: Staged
    other_groups: tuple[CommonAttentionMetadata, ...] = ()
    states: StateRows | None = None

    @property
    def num_reqs(self) -> int:
        """B."""
        return self.host.num_reqs

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.host.num_tokens

    @property
    def max_query_len(self) -> int:
        """Longest query of the batch."""
        return int(self.host.query_lens.max(initial=0))


def batch_fields(prefix: str) -> list[Field]:
    """Arena fields of one HostBatch; names and dimensions carry `prefix`, so that several batches share an arena."""
    return [
        Field(f"{prefix}.{name}", dtype, tuple(f"{prefix}.{d}" for d in dims)) for name, dtype, dims in BATCH_FIELDS
    ]


def batch_sizes(prefix: str, rows: int, tokens: int, pages: int) -> dict[str, int]:
    """Dimension sizes of one HostBatch's fields for a bucket: `pages` is P."""
    sizes = {"rows": rows, "rows_plus_1": rows + 1, "tokens": tokens, "pages": pages, "rows_times_pages": rows * pages}
    return {f"{prefix}.{name}": size for name, size in sizes.items()}


def state_fields(prefix: str) -> list[Field]:
    """Arena fields of a HostBatch's recurrent states, beside `batch_fields(prefix)`."""
    return [Field(f"{prefix}.states.{name}", np.int32, (f"{prefix}.rows",)) for name in STATE_FIELDS]


def group_fields(prefix: str, num_groups: int) -> list[Field]:
    """Arena fields of the further cache groups of one HostBatch, beside `batch_fields(prefix)`."""
    return [
        Field(
            f"{own}.{name}",
            dtype,
            tuple(f"{own}.entries" if d == "rows_times_pages" else f"{prefix}.{d}" for d in dims),
        )
        for own in _group_prefixes(prefix, num_groups)
        for name, dtype, dims in _GROUP_FIELDS
    ]


def group_sizes(prefix: str, entries: Sequence[int]) -> dict[str, int]:
    """Dimension sizes of `group_fields` beside `batch_sizes(prefix)`: entries of each group's page list."""
    return {f"{own}.entries": most for own, most in zip(_group_prefixes(prefix, len(entries)), entries, strict=True)}


def _group_prefixes(prefix: str, num_groups: int) -> tuple[str, ...]:
    return tuple(f"{prefix}.group{number}" for number in range(1, num_groups + 1))


def batch_arrays(prefix: str, batch: HostBatch) -> dict[str, np.ndarray]:
    """The arrays of a HostBatch under their arena names, those of its further cache groups included."""
    arrays = {f"{prefix}.{name}": getattr(batch, name) for name, _, _ in BATCH_FIELDS}
    if batch.states is not None:
        arrays |= {f"{prefix}.states.{name}": getattr(batch.states, name) for name in STATE_FIELDS}
    if not batch.other_groups:
        return arrays
    for own, group in zip(_group_prefixes(prefix, len(batch.other_groups)), batch.other_groups, strict=True):
        arrays |= {f"{own}.{name}": getattr(group, name) for name, _, _ in _GROUP_FIELDS}
    return arrays


@dataclass(frozen=True)
class BatchBuffers:
    """One host buffer of an arena as the arrays of a HostBatch, whole, for rounds that are written in place."""

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    slot_mapping: np.ndarray
    positions: np.ndarray
    page_indices: np.ndarray
    page_indptr: np.ndarray
    last_page_len: np.ndarray

    @classmethod
    def of(cls, prefix: str, host: Mapping[str, np.ndarray]) -> BatchBuffers:
        """The fields of `batch_fields(prefix)` in `host`, see `StagingArena.hosts`."""
        return cls(**{field.name: host[f"{prefix}.{field.name}"] for field in fields(cls)})

    def groups(self, prefix: str, num_groups: int, host: Mapping[str, np.ndarray]) -> tuple[BatchBuffers, ...]:
        """The same batch with the buffers of each further cache group, see `group_fields(prefix, num_groups)`."""
        return tuple(
            replace(self, **{name: host[f"{own}.{name}"] for name, _, _ in _GROUP_FIELDS})
            for own in _group_prefixes(prefix, num_groups)
        )


def from_staged(prefix: str, batch: HostBatch, staged: Staged) -> CommonAttentionMetadata:
    """Join a HostBatch with its device views out of a transfer. Validates the batch under SPECDEC_CHECK=1."""
    if checking():
        for each in (batch, *batch.other_groups):
            each.validate()
    views = {name: staged[f"{prefix}.{name}"] for name, _, _ in BATCH_FIELDS if name != "block_table"}
    table = staged.views.get(f"{prefix}.block_table")
    states = _staged_states(prefix, batch, staged)
    own = CommonAttentionMetadata(host=batch, staged=staged, block_table=table, other_groups=(), states=states, **views)
    if not batch.other_groups:
        return own
    groups = zip(_group_prefixes(prefix, len(batch.other_groups)), batch.other_groups, strict=True)
    return replace(own, other_groups=tuple(_of_group(own, group, staged, batch) for group, batch in groups))


def _staged_states(prefix: str, batch: HostBatch, staged: Staged) -> StateRows | None:
    if batch.states is None:
        return None
    return StateRows(
        query_start_loc=staged[f"{prefix}.query_start_loc"],
        **{name: staged[f"{prefix}.states.{name}"] for name in STATE_FIELDS},
        max_query_len=int(batch.query_lens.max(initial=0)),
        max_replay=batch.states.max_replay,
    )


def _of_group(own: CommonAttentionMetadata, prefix: str, staged: Staged, batch: HostBatch) -> CommonAttentionMetadata:
    """The rows of `own` on another group's pages."""
    return replace(
        own,
        host=batch,
        block_table=None,
        slot_mapping=staged[f"{prefix}.slot_mapping"],
        page_indices=staged[f"{prefix}.page_indices"],
        page_indptr=staged[f"{prefix}.page_indptr"],
    )


def stage(batch: HostBatch, arena: StagingArena, bucket: Bucket, prefix: str = "batch") -> CommonAttentionMetadata:
    """Send one HostBatch to the device in one copy and wrap it."""
    return from_staged(prefix, batch, arena.send(bucket, batch_arrays(prefix, batch)))


def with_rows(metadata: CommonAttentionMetadata, host: HostBatch) -> CommonAttentionMetadata:
    """The same tokens in the rows of `host`, whose arrays go to the device in one copy of their own.

    Args:
        host: a batch of the same tokens with the same slots and positions, e.g. of `local_attention`.

    Returns:
        Metadata without a block table: kernels read the flat list of pages. It is as fresh as `metadata`.
    """
    if checking():
        require(host.slot_mapping is metadata.host.slot_mapping, "with_rows is given rows of other tokens")
        host.validate()
    arrays = [getattr(host, name) for name in ROW_FIELDS]
    sent = torch.from_numpy(np.concatenate(arrays))
    if metadata.seq_lens.is_cuda:
        sent = sent.pin_memory().to(metadata.seq_lens.device, non_blocking=True)
    views = dict(zip(ROW_FIELDS, sent.split([len(array) for array in arrays]), strict=True))
    return replace(metadata, host=host, block_table=None, **views)


def single_batch_arena(rows: int, tokens: int, pages: int, device: torch.device) -> tuple[StagingArena, Bucket]:
    """An arena for one batch at a time (probes, self-tests, tests), and its bucket."""
    bucket = bucket_of(**batch_sizes("batch", rows, tokens, pages))
    return StagingArena([*batch_fields("batch"), *state_fields("batch")], bucket, device), bucket
