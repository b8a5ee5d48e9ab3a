"""A chain's section of a staging arena: its fields, what is sent in them, and the views of what arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from attention.batch.host import HostBatch, flat_pages, last_page_lens, page_counts_of
from attention.batch.metadata import CommonAttentionMetadata, batch_arrays, batch_fields, batch_sizes, from_staged
from attention.batch.staging import Field, Staged
from attention.checking import checking
from drafters.loops.base import LoopSize
from drafters.loops.chain.arrays import ChainArrays, PrefillArrays, StepArrays


@dataclass(frozen=True)
class DraftPrefill:
    """Inputs of the draft prefill over T' rows.

    Attributes:
        token_ids: [T'] int64, shifted: the token at position p+1.
        token_indices: [T'] int64, rows of the target's aux hidden states.
        last_row: [R] int64, rows whose output gives draft 1; R may be 0 (prompt chunks only).
        metadata: attention of the pass; its rows 0 … R-1 are the drafting rows.
    """

    token_ids: torch.Tensor
    token_indices: torch.Tensor
    last_row: torch.Tensor
    metadata: CommonAttentionMetadata


@dataclass(frozen=True)
class ChainInputs:
    """A chain on the device. steps: attention of drafts 2 … n, one token a row, the same R rows."""

    prefill: DraftPrefill
    steps: tuple[CommonAttentionMetadata, ...]


class PrefillSection:
    """A draft prefill in the arena."""

    fields = (
        *batch_fields("prefill"),
        Field("prefill.token_ids", np.int64, ("prefill.tokens",)),
        Field("prefill.token_indices", np.int64, ("prefill.tokens",)),
        Field("prefill.last_row", np.int64, ("prefill.rows",)),
    )

    @staticmethod
    def dimensions(size: LoopSize) -> dict[str, int]:
        """See `DraftLoop.dimensions`."""
        return batch_sizes("prefill", size.rows, size.tokens, size.pages)

    @staticmethod
    def values(prefill: PrefillArrays, num_last: int) -> dict[str, np.ndarray]:
        """What is sent; num_last: rows whose last row is wanted."""
        return batch_arrays("prefill", prefill.batch) | {
            "prefill.token_ids": prefill.token_ids,
            "prefill.token_indices": prefill.accepted.token_indices,
            "prefill.last_row": prefill.accepted.last_row[:num_last],
        }

    @staticmethod
    def views(prefill: PrefillArrays, staged: Staged) -> DraftPrefill:
        """What arrived."""
        return DraftPrefill(
            token_ids=staged["prefill.token_ids"],
            token_indices=staged["prefill.token_indices"],
            last_row=staged["prefill.last_row"],
            metadata=from_staged("prefill", prefill.batch, staged),
        )


@dataclass(frozen=True)
class StepBuffers:
    """One host buffer of the steps, whole: every array [K-1, …] but the first."""

    query_start_loc: np.ndarray
    page_indices: np.ndarray
    page_indptr: np.ndarray
    last_page_len: np.ndarray
    seq_lens: np.ndarray
    slot_mapping: np.ndarray
    positions: np.ndarray


class StepSection:
    """All steps of a chain in the arena, each array with the step as its first dimension."""

    _table = Field("step.block_table", np.int32, ("step.rows", "step.pages"))
    _buffers = (
        Field("step.query_start_loc", np.int32, ("step.rows_plus_1",)),
        Field("step.page_indices", np.int32, ("steps", "step.rows_times_pages")),
        Field("step.page_indptr", np.int32, ("steps", "step.rows_plus_1")),
        Field("step.last_page_len", np.int32, ("steps", "step.rows")),
        Field("step.seq_lens", np.int32, ("steps", "step.rows")),
        Field("step.slot_mapping", np.int64, ("steps", "step.rows")),
        Field("step.positions", np.int64, ("steps", "step.rows")),
    )
    _per_step = ("seq_lens", "slot_mapping", "positions", "page_indices", "page_indptr", "last_page_len")
    fields = (_table, *_buffers)
    static_fields = _buffers
    """Without the block table: what a fixed shape sends."""

    @staticmethod
    def dimensions(rows: int, pages: int, steps: int) -> dict[str, int]:
        """Sizes for at most so many rows, pages a row and steps."""
        sizes = {"rows": rows, "rows_plus_1": rows + 1, "pages": pages, "rows_times_pages": rows * pages}
        return {f"step.{name}": size for name, size in sizes.items()} | {"steps": steps}

    @staticmethod
    def static_dimensions(rows: int, page_entries: int, steps: int) -> dict[str, int]:
        """Sizes of `static_fields`."""
        return {
            "steps": steps,
            "step.rows": rows,
            "step.rows_plus_1": rows + 1,
            "step.rows_times_pages": page_entries,
        }

    @staticmethod
    def buffers(host: Mapping[str, np.ndarray]) -> StepBuffers:
        """The fields in one of the arena's host buffers."""
        return StepBuffers(**{field.name: host[f"step.{field.name}"] for field in fields(StepBuffers)})

    @staticmethod
    def values(arrays: StepArrays) -> dict[str, np.ndarray]:
        """What is sent, all steps at once."""
        rows = arrays.rows
        if not rows.num_steps:
            return {}
        steps, page_size = arrays.steps, rows.page_size
        counts = page_counts_of(steps.seq_lens, page_size)  # [K-1, R]
        indptr = np.zeros((len(counts), counts.shape[1] + 1), np.int32)
        np.cumsum(counts, axis=1, out=indptr[:, 1:])
        return {
            "step.query_start_loc": np.arange(counts.shape[1] + 1, dtype=np.int32),
            "step.block_table": rows.block_table,
            "step.page_indices": _step_pages(steps.active, rows.block_table, counts, int(indptr[:, -1].max())),
            "step.page_indptr": indptr,
            "step.last_page_len": last_page_lens(steps.seq_lens, page_size),
            "step.seq_lens": steps.seq_lens,
            "step.slot_mapping": steps.slots,
            "step.positions": steps.positions,
        }

    @classmethod
    def views(cls, batches: Sequence[HostBatch], staged: Staged) -> tuple[CommonAttentionMetadata, ...]:
        """Metadata of every step; what does not change from step to step is one view."""
        if not batches:
            return ()
        per_step = zip(*(staged[f"step.{name}"].unbind(0) for name in cls._per_step), strict=True)
        shared = (staged["step.query_start_loc"], staged.views.get("step.block_table"))
        return tuple(_step(host, staged, shared, views) for host, views in zip(batches, per_step, strict=True))


class ChainSection:
    """A whole chain in the arena."""

    fields = (*PrefillSection.fields, *StepSection.fields)

    @staticmethod
    def dimensions(size: LoopSize) -> dict[str, int]:
        """See `DraftLoop.dimensions`."""
        return PrefillSection.dimensions(size) | StepSection.dimensions(size.rows, size.pages, size.steps)

    @staticmethod
    def values(arrays: ChainArrays) -> dict[str, np.ndarray]:
        """What is sent."""
        return PrefillSection.values(arrays.prefill, arrays.num_drafting) | StepSection.values(arrays.steps)

    @staticmethod
    def views(arrays: ChainArrays, staged: Staged) -> ChainInputs:
        """What arrived."""
        steps = StepSection.views(arrays.steps.batches, staged)
        return ChainInputs(PrefillSection.views(arrays.prefill, staged), steps)


def _step_pages(active: np.ndarray, table: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
    """[K-1, width] int32: every step's pages, row after row; active, counts: [K-1, R]; table: [R, P]."""
    pages = np.zeros((len(counts), width), np.int32)
    before: bytes | None = None
    for step, own in enumerate(counts):
        now = own.tobytes() + active[step].tobytes()
        if now == before:  # no row has entered a page since the step before
            pages[step] = pages[step - 1]
            continue
        flat = flat_pages(table if active[step].all() else np.where(active[step][:, None], table, 0), own)
        pages[step, : len(flat)] = flat
        before = now
    return pages


def _step(
    host: HostBatch, staged: Staged, shared: tuple[torch.Tensor, torch.Tensor | None], views: tuple[torch.Tensor, ...]
) -> CommonAttentionMetadata:
    if checking():
        host.validate()
    seq_lens, slot_mapping, positions, page_indices, page_indptr, last_page_len = views
    return CommonAttentionMetadata(
        host=host,
        query_start_loc=shared[0],
        block_table=shared[1],
        seq_lens=seq_lens,
        slot_mapping=slot_mapping,
        positions=positions,
        page_indices=page_indices[: int(host.page_counts.sum())],
        page_indptr=page_indptr,
        last_page_len=last_page_len,
        staged=staged,
    )
