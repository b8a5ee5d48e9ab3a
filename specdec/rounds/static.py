"""Rounds of one fixed shape, written straight into the buffers that captured CUDA graphs read.

Every row gets exactly `query_len` tokens (K+1) and the batch exactly `rows` rows. Attention is causal, so the tokens
behind a row's own change nothing for it: they stand at position 0 and write to slot 0 of the null page.

    a row at position 20 with 1 of K=3 drafts, page size 16: tokens root, draft, -, - ; slots s(20), s(21), 0, 0 ;
    seq_len 24 (what the kernel masks by), two pages

The host has little time between the read of a verdict and the end of the head's first pass. So nothing is allocated
that can be kept, what never changes is written once, and every array is computed where it is sent from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from attention.batch.host import HostBatch, flat_pages
from attention.batch.live import LiveBatch
from attention.batch.staging import Bucket, Staged, StagingArena
from specdec.config import EngineConfig
from specdec.rounds.fields import graph_bucket, head_fields, step_fields, target_fields
from specdec.rounds.verification import StepArrays, TargetArrays, Verified

Host = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class FixedShape:
    """rows of query_len tokens each, over pages of page_size tokens. `bucket`: the capacity of every field."""

    rows: int
    query_len: int
    page_size: int
    bucket: Bucket


def fixed_shape(config: EngineConfig, rows: int) -> FixedShape:
    """The shape of the graphs of so many rows."""
    return FixedShape(rows, config.num_speculative_tokens + 1, config.page_size, graph_bucket(config, rows))


class FixedRound:
    """What the graphs of one number of rows read."""

    def __init__(self, shape: FixedShape, with_head: bool, device: torch.device) -> None:
        self.target = FixedTarget(shape, with_head, device)
        self.steps = FixedSteps(shape, device)

    @property
    def transfers(self) -> int:
        """Host-to-device copies so far."""
        return self.target.arena.generation + self.steps.arena.generation


class _Pages:
    """Where the pages of one group stand: slots [rows, query_len], and the flat list of pages."""

    def __init__(self, host: Host, prefix: str, shape: FixedShape) -> None:
        self.slots = host[f"{prefix}.slot_mapping"].reshape(shape.rows, shape.query_len)
        self.indices = host[f"{prefix}.page_indices"]


class _TargetPlace:
    """One host buffer of a verification, as views in the shapes in which they are computed."""

    def __init__(self, host: Host, shape: FixedShape, with_head: bool) -> None:
        rows, query_len = shape.rows, shape.query_len
        self.start = np.zeros(rows, np.int64)
        self.positions, self.token_ids = (
            host[f"target.{name}"].reshape(rows, query_len) for name in ("positions", "token_ids")
        )
        self.num_drafts, self.sources = host["target.num_drafts"], host["target.sources"]
        self.seq_lens, self.last_page_len = host["target.seq_lens"], host["target.last_page_len"]
        self.page_indptr = host["target.page_indptr"]
        self.groups = [_Pages(host, prefix, shape) for prefix in (("target", "head") if with_head else ("target",))]
        places = np.arange(rows * query_len).reshape(rows, query_len)
        host["target.query_start_loc"][:] = np.arange(0, rows * query_len + 1, query_len)
        host["target.judged_rows"][:] = places.reshape(-1)
        host["target.logit_index"][:] = places
        host["target.draft_places"][: rows * (query_len - 1)] = places[:, 1:].reshape(-1)
        host["target.draft_sources"][: rows * (query_len - 1)] = np.arange(rows * (query_len - 1))
        self.batches = [
            LiveBatch(
                query_start_loc=host["target.query_start_loc"],
                seq_lens=self.seq_lens,
                num_computed_tokens=self.start,
                slot_mapping=group.slots.reshape(-1),
                positions=host["target.positions"],
                block_table=np.zeros((0, 0), np.int32),
                page_size=shape.page_size,
                page_indptr=self.page_indptr,
            )
            for group in self.groups
        ]


class FixedTarget:
    """Verifications of roots in a fixed shape, and the head's first pass behind them."""

    def __init__(self, shape: FixedShape, with_head: bool, device: torch.device) -> None:
        self._shape = shape
        self._with_head = with_head
        self._offsets = np.arange(shape.query_len)
        self._rows = np.arange(shape.rows)
        self._lens = np.zeros(shape.rows, np.int64)
        fields = [field for field in target_fields() if field.name != "target.block_table"]
        self.arena = StagingArena(fields + (head_fields() if with_head else []), shape.bucket, device)
        self._places = [_TargetPlace(host, shape, with_head) for host in self.arena.hosts(shape.bucket)]

    def send(self, target: TargetArrays) -> tuple[HostBatch, HostBatch | None, Staged]:
        """Lay out and send; the attention on the target's pages and on the head's.

        Both batches are the arena's memory: they are good until the round after the next.
        """
        place = self._places[self.arena.begin(self._shape.bucket)]
        own = self._write_tokens(place, target)
        pages, within = np.divmod(place.positions, self._shape.page_size)
        counts = self._write_lengths(place)
        width = int(counts.max())
        batches: list[HostBatch] = []
        for group, batch, own_table in zip(
            place.groups, place.batches, (target.block_table, target.head_table), strict=False
        ):
            assert own_table is not None
            table = _covering(own_table, len(counts), width)
            np.multiply(table[self._rows[:, None], pages], self._shape.page_size, out=group.slots, dtype=np.int64)
            group.slots += within
            if own is not None:
                group.slots *= own
            _write_pages(group.indices, table, counts)
            batches.append(batch.over(table))
        head = batches[1] if self._with_head else None
        return batches[0], head, self.arena.end(self._shape.bucket)

    def _write_tokens(self, place: _TargetPlace, target: TargetArrays) -> np.ndarray | None:
        """Token ids, positions and drafts; returns [rows, query_len] bool, the rows' own tokens; None where all are."""
        count, start, lens = len(target.start), place.start, self._lens
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

    def _write_lengths(self, place: _TargetPlace) -> np.ndarray:
        """Lengths as the kernels see them, padding tokens included; returns the page counts [rows]."""
        last = place.start + (self._shape.query_len - 1)
        counts, within = np.divmod(last, self._shape.page_size)
        counts += 1
        np.add(last, 1, out=place.seq_lens, casting="unsafe")
        np.add(within, 1, out=place.last_page_len, casting="unsafe")
        np.cumsum(counts, out=place.page_indptr[1:], dtype=np.int32)
        return counts


class _StepsPlace:
    """One host buffer of the draft steps."""

    def __init__(self, host: Host, shape: FixedShape) -> None:
        names = ("positions", "seq_lens", "slot_mapping", "page_indptr", "last_page_len", "page_indices")
        arrays = {name: host[f"step.{name}"] for name in names}
        self.positions, self.seq_lens, self.slots = (arrays[name] for name in names[:3])
        self.page_indptr, self.last_page_len, self.page_indices = (arrays[name] for name in names[3:])
        host["step.query_start_loc"][:] = np.arange(shape.rows + 1)
        self.batches = tuple(
            LiveBatch(
                query_start_loc=host["step.query_start_loc"],
                seq_lens=self.seq_lens[step],
                num_computed_tokens=self.positions[step],
                slot_mapping=self.slots[step],
                positions=self.positions[step],
                block_table=np.zeros((0, 0), np.int32),
                page_size=shape.page_size,
                page_indptr=self.page_indptr[step],
            )
            for step in range(len(self.positions))
        )


class FixedSteps:
    """The draft steps of a fixed number of rows. A row that takes no step, or is added, stands on the null page."""

    def __init__(self, shape: FixedShape, device: torch.device) -> None:
        self._shape = shape
        self._numbers = np.arange(2, shape.query_len)[:, None]  # step j of K
        self._rows = np.arange(shape.rows)
        self._lens = np.zeros(shape.rows, np.int64)
        self._num_drafts = np.zeros(shape.rows, np.int64)
        self.arena = StagingArena(step_fields(), shape.bucket, device)
        self._places = [_StepsPlace(host, shape) for host in self.arena.hosts(shape.bucket)]

    def send(self, draft: StepArrays) -> tuple[tuple[HostBatch, ...], Staged]:
        """Lay out and send all steps; the attention of each, in the arena's memory as those of `FixedTarget.send`."""
        place = self._places[self.arena.begin(self._shape.bucket)]
        count = len(draft.num_drafts)
        if count < len(self._lens):
            self._lens[count:] = self._num_drafts[count:] = 0
        self._lens[:count], self._num_drafts[:count] = draft.committed_lens, draft.num_drafts
        active = self._num_drafts >= self._numbers  # [K-1, rows]
        np.add(self._lens, self._numbers - 2, out=place.positions)
        place.positions *= active
        np.add(place.positions, 1, out=place.seq_lens, casting="unsafe")
        counts, within = np.divmod(place.positions, self._shape.page_size)
        table = _covering(draft.block_table, len(self._rows), 1)
        np.multiply(table[self._rows, counts], self._shape.page_size, out=place.slots, dtype=np.int64)
        place.slots += within
        place.slots *= active
        np.add(within, 1, out=place.last_page_len, casting="unsafe")
        counts += 1
        np.cumsum(counts, axis=1, out=place.page_indptr[:, 1:], dtype=np.int32)
        _write_step_pages(place.page_indices, table, counts)
        return tuple(batch.over(table) for batch in place.batches), self.arena.end(self._shape.bucket)


def _write_step_pages(page_indices: np.ndarray, table: np.ndarray, counts: np.ndarray) -> None:
    """page_indices [K-1, …]: every step's pages; counts [K-1, rows]. Most steps of few rows enter no page."""
    used = 0
    for step, own in enumerate(counts):
        if step and (own == counts[step - 1]).all():
            page_indices[step, :used] = page_indices[step - 1, :used]
        else:
            used = _write_pages(page_indices[step], table, own)


def _covering(table: np.ndarray, rows: int, pages: int) -> np.ndarray:
    """A block table of `rows` rows and at least `pages` columns: this one, or with the null page around it."""
    if table.shape[0] == rows and table.shape[1] >= pages:
        return table
    larger = np.zeros((rows, max(pages, table.shape[1])), np.int32)
    larger[: len(table), : table.shape[1]] = table
    return larger


def _write_pages(place: np.ndarray, table: np.ndarray, counts: np.ndarray) -> int:
    """The first counts[i] pages of every row of `table`, one row after the other; returns how many."""
    if len(counts) == 1:
        used = int(counts[0])
        place[:used] = table[0, :used]
        return used
    flat = flat_pages(table, counts)
    place[: len(flat)] = flat
    return len(flat)


def uniform_verified(verified: Verified, query_len: int) -> Verified:
    """A verification that ran in the fixed shape, as the draft loop must read its token rows."""
    num_rows = len(verified.rows)
    return replace(
        verified,
        query_start_loc=np.arange(0, num_rows * query_len + 1, query_len),
        num_drafts=np.full(num_rows, query_len - 1),
    )


def empty_round(page_size: int) -> tuple[StepArrays, TargetArrays]:
    """A round without rows: padded, it is what graphs are captured on."""
    none, table = np.zeros(0, np.int64), np.zeros((0, 1), np.int32)
    tokens = np.zeros((0, 1), np.int32)
    target = TargetArrays(none, none, none, 0, tokens, none, table, table, none, none, page_size)
    return StepArrays(none, none, 0, table, page_size), target
