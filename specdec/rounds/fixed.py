"""Verifications of one fixed shape, written straight into the buffers that captured CUDA graphs read.

Every row gets exactly `query_len` tokens (K+1) and the batch exactly `rows` rows. Attention is causal, so the tokens
after a row's own do not affect it: they have position 0 and write to slot 0 of the null page.

    a row at position 20 with 1 of K=3 drafts, page size 16: tokens bonus, draft, -, - ; slots s(20), s(21), 0, 0 ;
    seq_len 24 (what the kernel masks by), two pages

The host has little time between the read of a verification and the end of the draft prefill. So nothing is allocated
that can be kept, what never changes is written once, and every array is computed where it is sent from. (The draft
steps of the same shape belong to the loop: `drafters/loops/steps.py`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from attention.batch.fixed import LiveBatch
from attention.batch.host import BatchExtra, HostBatch, covering, page_counts_of, slots_at, write_pages
from attention.batch.metadata import BatchArrays, MakeSection
from attention.batch.transforms.windowed import WindowedBatch, first_listed, listed_pages
from attention.spec import Reach
from attention.staging import Arrays, Staged, StagingArena, bucket_of
from drafters.loops.base import CarriedRows, FixedShape, Passes, PrefillPasses
from specdec.config import EngineConfig
from specdec.rounds.buckets import fixed_entries, fixed_shape
from specdec.rounds.randomness import SamplingRound
from specdec.rounds.transfer import (
    DeviceRound,
    PassesSection,
    SamplingSection,
    VerificationSection,
    make_sections,
    target_sizes,
)
from specdec.rounds.verification import TargetArrays, WindowedTable

Carried = CarriedRows[Tensor] | None


class _Pages:
    """Buffers of one cache group: slots [rows, query_len], the flat list of pages, and the batch over them."""

    def __init__(
        self,
        buffers: BatchArrays[ndarray],
        start: ndarray,
        shape: FixedShape,
        extras: tuple[BatchExtra, ...] = (),
    ) -> None:
        self.slots = buffers.slot_mapping.reshape(shape.rows, shape.query_len)
        self.indices = buffers.page_indices
        buffers.query_start_loc[:] = np.arange(0, self.slots.size + 1, shape.query_len)
        self.batch = LiveBatch(
            query_start_loc=buffers.query_start_loc,
            seq_lens=buffers.seq_lens,
            num_computed_tokens=start,
            slot_mapping=buffers.slot_mapping,
            positions=buffers.positions,
            block_table=np.zeros((0, 0), np.int32),
            page_size=shape.page_size,
            page_indptr=buffers.page_indptr,
            extras=extras,
        )


class _WindowedPages:
    """Buffers of one of the target's windowed cache groups, whose page lists begin near its window."""

    def __init__(self, buffers: BatchArrays[ndarray], reach: Reach, shape: FixedShape) -> None:
        self._reach = reach
        self._start = np.zeros(shape.rows, np.int32)
        self._seq_lens = np.zeros(shape.rows, np.int32)
        self._buffers = buffers
        self.rows = np.zeros(shape.rows, np.int64)
        self.slots = buffers.slot_mapping.reshape(shape.rows, shape.query_len)

    def write(self, start: ndarray, table: WindowedTable, shape: FixedShape) -> WindowedBatch:
        """Lengths and the page list of verifications from `start` [rows] on."""
        buffers = self._buffers
        size = shape.page_size
        count = len(table.rows)
        self.rows[:count] = table.rows
        self.rows[count:] = len(table.block_table) - 1
        first = first_listed(start, self._reach, size)
        np.subtract(start, first, out=self._start, casting="unsafe")
        np.add(self._start, shape.query_len, out=self._seq_lens)
        counts = page_counts_of(self._seq_lens, size)
        np.cumsum(counts, out=buffers.page_indptr[1:])
        pages = listed_pages(table.block_table, self.rows, first // size, counts)
        indices = buffers.page_indices[: len(pages)]
        indices[:] = pages
        return WindowedBatch(
            query_start_loc=buffers.query_start_loc,
            seq_lens=self._seq_lens,
            num_computed_tokens=self._start,
            slot_mapping=buffers.slot_mapping,
            positions=buffers.positions,
            page_size=size,
            page_counts=counts,
            page_indptr=buffers.page_indptr,
            page_indices=indices,
        )


class _OwnPass:
    """A pass of the draft prefill with lengths of its own, on the head's pages: the verification, for module m > 0 m
    positions further back, or with the bonus token after it."""

    def __init__(self, buffers: BatchArrays[ndarray], m: int, shape: FixedShape) -> None:
        """shape: the pass's."""
        self._m = m
        self._shape = shape
        self._offsets = np.arange(shape.query_len)
        self._start = np.zeros(shape.rows, np.int64)
        self._buffers = buffers
        self.positions = buffers.positions.reshape(shape.rows, shape.query_len)
        self.pages = _Pages(buffers, self._start, shape)

    def write(self, start: ndarray) -> ndarray:
        """Lengths and the positions of all tokens for verifications from `start` [rows] on; returns the page counts."""
        np.subtract(start, self._m, out=self._start)
        np.maximum(self._start, 0, out=self._start)  # rows that are added
        np.add(self._start[:, None], self._offsets, out=self.positions)
        return _write_lengths(self._buffers, self._start, self._shape)


def _write_lengths(buffers: BatchArrays[ndarray], start: ndarray, shape: FixedShape) -> ndarray:
    """Lengths as the kernels see them, padding tokens included; returns the page counts [rows]."""
    last = start + (shape.query_len - 1)
    counts, within = np.divmod(last, shape.page_size)
    counts += 1
    np.add(last, 1, out=buffers.seq_lens, casting="unsafe")
    np.add(within, 1, out=buffers.last_page_len, casting="unsafe")
    np.cumsum(counts, out=buffers.page_indptr[1:], dtype=np.int32)
    return counts


class _TargetPlace:
    """One host buffer of a verification, as views in the shapes in which they are computed."""

    def __init__(
        self,
        host: Arrays,
        shape: FixedShape,
        section: VerificationSection,
        passes: PassesSection,
        longer: FixedShape,
        reaches: Sequence[Reach],
    ) -> None:
        rows = shape.rows
        query_len = shape.query_len
        batch = section.batch.buffers(host)
        arrays = section.own.of(host)
        self.start = np.zeros(rows, np.int64)
        self.positions = batch.positions.reshape(rows, query_len)
        self.token_ids = arrays.token_ids.reshape(rows, query_len)
        self.num_drafts = arrays.num_drafts
        self.sources = arrays.sources
        self.batch = batch
        self.extras = tuple(extra.buffers(host) for extra in section.batch.extras)
        self.groups = [_Pages(batch, self.start, shape, self.extras)]
        windowed = zip(section.batch.group_buffers(host), reaches, strict=True)
        self.windowed = [_WindowedPages(each, reach, shape) for each, reach in windowed]
        found, self.carried = passes.buffers(host, batch)
        if passes.num_shared:
            self.groups.append(_Pages(found[0], self.start, shape))
        own = enumerate(found[passes.num_shared :], passes.num_shared)
        self.own_passes = [_OwnPass(each, m, longer) for m, each in own]
        if self.carried is not None:
            from drafters.loops.prefill import rows_before

            self.carried.sources[:] = rows_before(batch.query_start_loc, rows)
        places = np.arange(rows * query_len).reshape(rows, query_len)
        arrays.logits_indices[:] = places.reshape(-1)
        arrays.logit_index[:] = places
        num_drafts = rows * (query_len - 1)
        arrays.draft_places[:num_drafts] = places[:, 1:].reshape(-1)
        arrays.draft_sources[:num_drafts] = np.arange(num_drafts)


class FixedTarget:
    """Verifications of bonus tokens in a fixed shape, and the draft prefill after them."""

    def __init__(
        self,
        shape: FixedShape,
        passes: PrefillPasses,
        device: torch.device,
        reaches: Sequence[Reach] = (),
        entries: Sequence[int] = (),
        extras: Sequence[MakeSection] = (),
    ) -> None:
        """reaches, entries: of the target's further cache groups, and the most pages on the list of each. extras:
        make their sections.
        """
        self._shape = shape
        self._section = VerificationSection(len(reaches), extras, table=False)
        self._passes = PassesSection(passes)
        self._offsets = np.arange(shape.query_len)
        self._rows = np.arange(shape.rows)
        self._lens = np.zeros(shape.rows, np.int64)
        tokens = shape.rows * shape.query_len
        sizes = target_sizes(shape.rows, tokens, 0, shape.query_len - 1, shape.page_entries, entries)
        fields = self._section.fields + self._passes.fields
        sizes = sizes | self._passes.sizes(shape.rows, tokens, 0, shape.page_entries)
        longer = replace(shape, query_len=shape.query_len + passes.bonus)
        self._bucket = bucket_of(**sizes)
        self._arena = StagingArena(fields, self._bucket, device)
        hosts = self._arena.hosts(self._bucket)
        sections = (self._section, self._passes)
        self._places = [_TargetPlace(host, shape, *sections, longer, reaches) for host in hosts]

    def device(self, target: TargetArrays) -> tuple[DeviceRound, Passes, Carried]:
        """Send a verification and return its device views, at the same addresses every round.

        Returns:
            The verification; the attention of each pass of the draft prefill after it; and its carried rows.
        """
        batch, passes, staged = self.send(target)
        places = self._shape.rows * (self._shape.query_len - 1)
        whole = self._section.of(batch, staged)
        round_ = replace(whole, draft_places=whole.draft_places[:places], draft_sources=whole.draft_sources[:places])
        return round_, self._passes.metadata(round_.metadata, passes, staged), self._passes.carried(staged)

    def send(self, target: TargetArrays) -> tuple[HostBatch, tuple[HostBatch, ...], Staged]:
        """Lay out and send; the attention on the target's pages, and on the head's in each pass of the draft prefill.

        The batches are the arena's memory: they are good until the round after the next.
        """
        place = self._places[self._arena.begin()]
        own = self._write_tokens(place, target)
        for section, extra in zip(self._section.batch.extras, place.extras, strict=True):
            section.write(extra, target.extras)
        pages, within = np.divmod(place.positions, self._shape.page_size)
        counts = _write_lengths(place.batch, place.start, self._shape)
        width = int(counts.max())
        batches: list[HostBatch] = []
        others: list[HostBatch] = []
        for windowed, given in zip(place.windowed, target.pages.windowed, strict=True):
            others.append(windowed.write(place.start, given, self._shape))
            self._write_slots(windowed.slots, given.block_table, windowed.rows, pages, within, own)
        for group, own_table in zip(place.groups, (target.pages.target, target.pages.head), strict=False):
            assert own_table is not None
            table = covering(own_table, len(counts), width)
            self._write_slots(group.slots, table, self._rows, pages, within, own)
            write_pages(group.indices, table, counts)
            batches.append(group.batch.over(table, () if batches else tuple(others)))
        if place.own_passes:
            batches += self._write_own(place, target, width + 1, own)
        return batches[0], tuple(batches[1:]), self._arena.end(self._bucket)

    def _write_slots(
        self,
        slots: ndarray,
        table: ndarray,
        rows: ndarray,
        pages: ndarray,
        within: ndarray,
        own: ndarray | None,
    ) -> None:
        """Slots [rows, query_len] of all tokens on a group's pages, in these rows of `table`; own: `_write_tokens`."""
        slots_at(table, rows[:, None], pages, within, self._shape.page_size, out=slots)
        if own is not None:
            slots *= own

    def _write_own(self, place: _TargetPlace, target: TargetArrays, width: int, own: ndarray | None) -> list[HostBatch]:
        """The passes with lengths of their own; width: most pages of a row; own: see `_write_tokens`."""
        assert target.pages.head is not None
        if place.carried is not None:
            request_rows = place.carried.request_rows
            count = len(target.request_rows)
            request_rows[:count] = target.request_rows
            request_rows[count:] = -1
        elif own is not None:  # the token at the first position, then as many as the verification has
            own = np.concatenate([own[:, :1], own], 1)
        table = covering(target.pages.head, self._shape.rows, width)
        batches: list[HostBatch] = []
        for each in place.own_passes:
            counts = each.write(place.start)
            pages, within = np.divmod(each.positions, self._shape.page_size)
            self._write_slots(each.pages.slots, table, self._rows, pages, within, own)
            if own is not None:
                each.positions *= own
            write_pages(each.pages.indices, table, counts)
            batches.append(each.pages.batch.over(table))
        return batches

    def _write_tokens(self, place: _TargetPlace, target: TargetArrays) -> ndarray | None:
        """Token ids, positions and drafts; returns [rows, query_len] bool, the rows' own tokens; None where all are."""
        count = len(target.start)
        start = place.start
        lens = self._lens
        if count < len(start):
            start[count:] = lens[count:] = 0
        start[:count] = target.start
        lens[:count] = target.drafts
        place.num_drafts[:] = lens
        lens[:count] += 1
        own = None if lens.min() == len(self._offsets) else self._offsets < lens[:, None]
        np.add(start[:, None], self._offsets, out=place.positions)
        if own is not None:
            place.positions *= own
        place.token_ids[:count, 0] = target.tokens[:, 0]
        place.sources[:] = self._rows
        if target.sources is not None:
            place.sources[: len(target.sources)] = target.sources
        return own


def fixed_target(config: EngineConfig, rows: int, passes: PrefillPasses, device: torch.device) -> FixedTarget:
    """The verifications of so many rows of an engine, and the draft prefill after them."""
    shape = fixed_shape(config, rows)
    reaches = [pool.reach for pool in config.windowed]
    extras = make_sections(config.extras, True)
    return FixedTarget(shape, passes, device, reaches, fixed_entries(config, shape), extras)


class FixedSampling:
    """The sampling parameters of rounds that run from graphs, at addresses that do not change."""

    def __init__(self, rows: int, num_drafts: int, device: torch.device, keyed: bool = False) -> None:
        """rows: the most there can be; num_drafts: K. keyed: see `EngineConfig.sampling`."""
        self._section = SamplingSection(True, keyed)
        sizes = target_sizes(rows, 0, 0, num_drafts)
        self._bucket = bucket_of(**sizes, **self._section.sizes(max(num_drafts, 1)))
        self._arena = StagingArena(self._section.fields, self._bucket, device)
        self._hosts = self._arena.hosts(self._bucket)
        # An empty round is sent at once, because `device` is views of the arena's memory on the device.
        self._arena.begin()
        self.device = self._section.of(self._arena.end(self._bucket).views, filters=True)

    def send(self, sampling: SamplingRound) -> None:
        """Lay out and send."""
        self._section.write(sampling, self._hosts[self._arena.begin()])
        self._arena.end(self._bucket)
