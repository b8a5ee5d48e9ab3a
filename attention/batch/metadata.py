"""CommonAttentionMetadata: a batch's attention on host and device, the input of attention builders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from attention.batch.host import BatchExtra, E, HostBatch, extra_of
from attention.checking import CHECKS, require
from attention.staging import (
    A,
    Arrays,
    Bucket,
    Section,
    Sizes,
    Staged,
    StagingArena,
    Views,
    array,
    array_names,
    bucket_of,
    on_device,
)


@dataclass(frozen=True)
class BatchArrays(Generic[A]):
    """The arrays of a HostBatch that travel to the device; see `CommonAttentionMetadata`."""

    query_start_loc: A = array(np.int32, "rows_plus_1")
    seq_lens: A = array(np.int32, "rows")
    slot_mapping: A = array(np.int64, "tokens")
    positions: A = array(np.int64, "tokens")
    page_indices: A = array(np.int32, "entries")
    page_indptr: A = array(np.int32, "rows_plus_1")
    last_page_len: A = array(np.int32, "rows")
    block_table: A | None = array(np.int32, "rows", "pages", optional=True)


HostArrays = BatchArrays[ndarray]


@dataclass(frozen=True)
class GroupArrays(Generic[A]):
    """Arrays of each further cache group; lengths, positions and query_start_loc are sent once for all."""

    slot_mapping: A = array(np.int64, "tokens")
    page_indices: A = array(np.int32, "entries")
    page_indptr: A | None = array(np.int32, "rows_plus_1", optional=True)


ROW_FIELDS = ("query_start_loc", "seq_lens", "page_indices", "page_indptr", "last_page_len")
"""The flat ones that change with the rows; all int32."""


@dataclass(frozen=True, kw_only=True)
class CommonAttentionMetadata(BatchArrays[Tensor]):
    """A batch's attention: exact host arrays, and the device views of those that kernels read.

    It is never edited in place. Builders plan from `host`; kernels read the device side.

    Attributes:
        host: the numpy side.
        query_start_loc: [B+1] int32; seq_lens: [B] int32; block_table: [B, P] int32, None in rounds of a fixed shape
            (kernels read the flat list of pages; a table as wide as the longest possible row would be sent for
            nothing).
        slot_mapping: [T] int64; positions: [T] int64; page_indices: [sum of page counts] int32.
        page_indptr: [B+1] int32; last_page_len: [B] int32.
        staged: the transfer they came with (for the staleness check).
        other_groups: the same rows on the pages of each further cache group; () where the model has one group. On the
            device each has its slots and page lists, and shares the rest, seq_lens included, with this batch: kernels
            read the number of a row's keys from its page list.
        extras: further arrays of the batch on the device; at most one object of a class, see `extra`.
    """

    host: HostBatch
    staged: Staged
    other_groups: tuple[CommonAttentionMetadata, ...] = ()
    extras: tuple[object, ...] = ()

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

    def extra(self, kind: type[E]) -> E | None:
        """The extra of this class; None where the batch has none."""
        return extra_of(self.extras, kind)


class ExtraSection:
    """The arrays of an extra in the arena of a batch: a declared class (see `attention.staging`), of which the batch
    has an instance on the host.

    Attributes:
        fields: their places. arrays: their section.
    """

    def __init__(self, kind: type[Any], own: str, name: str, shared: Mapping[str, str]) -> None:
        """kind: the declared class; own: its name in the arena. name, shared: see `MakeSection`."""
        self._kind = kind
        self._names = array_names(kind)
        self.arrays = Section[Any](kind, f"{name}.{own}", shared=shared)
        self.fields = self.arrays.fields

    def values(self, batch: HostBatch) -> Arrays:
        """The arrays of a batch's extra, by their names in the arena; {} if it has none."""
        own = batch.extra(self._kind)
        return {} if own is None else self.arrays.values(own)

    def of(self, metadata: CommonAttentionMetadata, views: Views) -> object | None:
        """The extra of a batch on the device; None if the batch has none."""
        return None if metadata.host.extra(self._kind) is None else self.arrays.of(views)

    def buffers(self, host: Arrays) -> Any:
        """The extra over one of the arena's host buffers, whole, for rounds that are written in place."""
        return self.arrays.of(host)

    def write(self, place: BatchExtra, extras: Sequence[BatchExtra | None]) -> None:
        """Write this extra of a round, one of its `extras`, to a place from `buffers`; 0 beyond."""
        own = extra_of(extras, self._kind)
        for name in self._names:
            buffer = getattr(place, name)
            count = 0 if own is None else len(getattr(own, name))
            buffer[count:] = 0
            if own is not None:
                buffer[:count] = getattr(own, name)


MakeSection = Callable[[str, Mapping[str, str]], ExtraSection]
"""Makes the section of an extra in the arena of the batch of this name, whose dimensions "rows", "rows_plus_1" and
"tokens" have these full names."""


class BatchSection:
    """One HostBatch in an arena: its arrays, its further cache groups' and its extras' arrays.

    Attributes:
        fields: places of the arrays. extras: the sections of its extras. sizes: `batch_sizes` of this name.
    """

    def __init__(self, name: str, num_groups: int = 0, extras: Sequence[MakeSection] = (), table: bool = True) -> None:
        """extras: factories of the extras' sections. table: whether to send the block table; fixed shapes do not."""
        self.sizes = partial(batch_sizes, name)
        self._own = Section(BatchArrays, name, () if table else ("block_table",))
        shared = {dim: f"{name}.{dim}" for dim in ("rows", "rows_plus_1", "tokens")}
        self._groups = tuple(Section(GroupArrays, f"{name}.group{n}", shared=shared) for n in range(1, num_groups + 1))
        self.extras = tuple(make(name, shared) for make in extras)
        sections: tuple[Section[Any] | ExtraSection, ...] = (self._own, *self._groups, *self.extras)
        self.fields = tuple(field for section in sections for field in section.fields)

    def values(self, batch: HostBatch) -> Arrays:
        """The arrays of a batch, by their names in the arena."""
        found = self._own.values(batch)
        for extra in self.extras:
            found |= extra.values(batch)
        for section, group in zip(self._groups, batch.other_groups, strict=True):
            found |= section.values(group)
        return found

    def metadata(self, batch: HostBatch, staged: Staged) -> CommonAttentionMetadata:
        """A batch with its device views out of a transfer. Validates the batch under SPECDEC_CHECK=1."""
        if CHECKS.on:
            for each in (batch, *batch.other_groups):
                each.validate()
        views = staged.views
        own: CommonAttentionMetadata = self._own.of(views, CommonAttentionMetadata, host=batch, staged=staged)
        if batch.extras:
            arrived = (extra.of(own, views) for extra in self.extras)
            own = replace(own, extras=tuple(extra for extra in arrived if extra is not None))
        if not batch.other_groups:
            return own
        groups = zip(self._groups, batch.other_groups, strict=True)
        return replace(own, other_groups=tuple(on_pages(own, section, group, views) for section, group in groups))

    def buffers(self, host: Arrays) -> HostArrays:
        """One of the arena's host buffers as the arrays of a batch, whole, for rounds that are written in place."""
        return self._own.of(host)

    def group_buffers(self, host: Arrays) -> tuple[HostArrays, ...]:
        """The same batch with the buffers of each further cache group."""
        own = self.buffers(host)
        return tuple(replace(own, **vars(section.of(host))) for section in self._groups)


def batch_sizes(
    name: str, rows: int, tokens: int, pages: int, entries: int | None = None, groups: Sequence[int] = ()
) -> Sizes:
    """Sizes of the dimensions of a `BatchSection` of this name for at most these rows, tokens and pages per row.

    Args:
        entries: length of the list of pages; default rows · pages. groups: the same for each further cache group.
    """
    sizes = {"rows": rows, "rows_plus_1": rows + 1, "tokens": tokens, "pages": pages}
    sizes["entries"] = rows * pages if entries is None else entries
    own = {f"{name}.{dimension}": size for dimension, size in sizes.items()}
    return own | {f"{name}.group{number}.entries": most for number, most in enumerate(groups, 1)}


def on_pages(
    metadata: CommonAttentionMetadata, section: Section[Any], batch: HostBatch, views: Views
) -> CommonAttentionMetadata:
    """The rows of `metadata` on other pages, whose arrays (of GroupArrays) the section has in these views."""
    own = {name: view for name, view in vars(section.of(views)).items() if view is not None}
    return replace(metadata, host=batch, block_table=None, other_groups=(), **own)


def stage(
    batch: HostBatch, arena: StagingArena, bucket: Bucket, section: BatchSection | None = None
) -> CommonAttentionMetadata:
    """Send one HostBatch to the device in one copy and wrap it. section: default as in `single_batch_arena`."""
    own = section or _SINGLE
    return own.metadata(batch, arena.send(bucket, own.values(batch)))


def with_rows(metadata: CommonAttentionMetadata, host: HostBatch) -> CommonAttentionMetadata:
    """The same tokens, slots and positions in the rows of `host`, e.g. of `local_attention`.

    The arrays go to the device in one separate copy, as fresh as `metadata`, without a block table: kernels read the
    flat list of pages.
    """
    if CHECKS.on:
        require(host.slot_mapping is metadata.host.slot_mapping, "with_rows is given rows of other tokens")
        host.validate()
    arrays = [getattr(host, name) for name in ROW_FIELDS]
    sent = on_device(np.concatenate(arrays), metadata.seq_lens.device)
    views = dict(zip(ROW_FIELDS, sent.split([len(array) for array in arrays]), strict=True))
    return replace(metadata, host=host, block_table=None, **views)


def single_batch_arena(
    rows: int, tokens: int, pages: int, device: torch.device, section: BatchSection | None = None
) -> tuple[StagingArena, Bucket]:
    """An arena for one batch at a time (probes, self-tests, tests), and its bucket. section: default without extras."""
    own = section or _SINGLE
    bucket = bucket_of(**own.sizes(rows, tokens, pages))
    return StagingArena(own.fields, bucket, device), bucket


_SINGLE = BatchSection("batch")
