"""The section of a staging arena for M modules: its fields, what is sent in them, and the views of what arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata, batch_arrays, batch_fields, batch_sizes, from_staged
from attention.batch.staging import Field, Staged
from attention.checking import checking
from drafters.loops.base import LoopSize
from drafters.loops.modules.arrays import ModuleArrays, ModulePassArrays
from drafters.loops.modules.index import step_width


@dataclass(frozen=True)
class ModulePass:
    """One module's part of a draft prefill over B' requests.

    Attributes:
        token_ids: [T_m] int64.
        sources: [T_m] int64; for module 0 rows of the target's aux hidden states, for others see `ModuleRows.sources`.
        last_row: [B'] int64, each request's last row.
        metadata: attention of the pass; requests without rows are not in it.
    """

    token_ids: torch.Tensor
    sources: torch.Tensor
    last_row: torch.Tensor
    metadata: CommonAttentionMetadata


@dataclass(frozen=True)
class ModuleInputs:
    """`ModuleArrays` on the device."""

    request_rows: torch.Tensor
    num_drafting: int
    passes: tuple[ModulePass, ...]
    steps: tuple[CommonAttentionMetadata, ...]


class ModuleSection:
    """The loop of M modules in the arena, for up to K drafts."""

    def __init__(self, num_modules: int, num_drafts: int) -> None:
        self._num_modules = num_modules
        self._steps = range(1, num_drafts)
        requests = Field("modules.request_rows", np.int64, ("modules.requests",))
        passes = (field for m in range(num_modules) for field in _pass_fields(_pass(m)))
        steps = (field for s in self._steps for field in batch_fields(_step(s)))
        self.fields = (requests, *passes, *steps)

    def dimensions(self, size: LoopSize) -> dict[str, int]:
        """See `DraftLoop.dimensions`."""
        sizes = {"modules.requests": size.rows}
        for m in range(self._num_modules):
            sizes |= batch_sizes(_pass(m), size.rows, size.tokens, size.pages)
        for s in self._steps:
            rows = size.rows if s <= size.steps else 0
            sizes |= batch_sizes(_step(s), rows, rows * step_width(s, self._num_modules), size.pages)
        return sizes

    def values(self, arrays: ModuleArrays) -> dict[str, np.ndarray]:
        """What is sent."""
        found = {"modules.request_rows": arrays.request_rows}
        for m, each in enumerate(arrays.passes):
            found |= _pass_values(_pass(m), each)
        for s, batch in enumerate(arrays.steps, 1):
            found |= batch_arrays(_step(s), batch)
        return found

    def views(self, arrays: ModuleArrays, staged: Staged) -> ModuleInputs:
        """What arrived."""
        passes = (_pass_views(_pass(m), each, staged) for m, each in enumerate(arrays.passes))
        steps = (from_staged(_step(s), batch, staged) for s, batch in enumerate(arrays.steps, 1))
        return ModuleInputs(staged["modules.request_rows"], arrays.num_drafting, tuple(passes), tuple(steps))


def _pass(module: int) -> str:
    return f"modules.prefill{module}"


def _step(step: int) -> str:
    return f"modules.step{step}"


def _pass_fields(prefix: str) -> list[Field]:
    return [
        *batch_fields(prefix),
        Field(f"{prefix}.token_ids", np.int64, (f"{prefix}.tokens",)),
        Field(f"{prefix}.sources", np.int64, (f"{prefix}.tokens",)),
        Field(f"{prefix}.last_row", np.int64, ("modules.requests",)),
    ]


def _pass_values(prefix: str, arrays: ModulePassArrays) -> dict[str, np.ndarray]:
    return batch_arrays(prefix, arrays.batch) | {
        f"{prefix}.token_ids": arrays.token_ids,
        f"{prefix}.sources": arrays.sources,
        f"{prefix}.last_row": arrays.last_row,
    }


def _pass_views(prefix: str, arrays: ModulePassArrays, staged: Staged) -> ModulePass:
    return ModulePass(
        token_ids=staged[f"{prefix}.token_ids"],
        sources=staged[f"{prefix}.sources"],
        last_row=staged[f"{prefix}.last_row"],
        metadata=from_staged(prefix, arrays.batch, staged),
    )


@dataclass(frozen=True)
class FixedStepBuffers:
    """One host buffer of the steps in a fixed shape, whole: [K-1, …], the last two [tokens of all steps]."""

    query_start_loc: np.ndarray
    page_indices: np.ndarray
    page_indptr: np.ndarray
    last_page_len: np.ndarray
    seq_lens: np.ndarray
    slot_mapping: np.ndarray
    positions: np.ndarray


class FixedStepSection:
    """All steps of M modules in an arena of their own, for rounds of one fixed shape."""

    fields = (
        Field("modules.steps.query_start_loc", np.int32, ("modules.steps", "modules.steps.rows_plus_1")),
        Field("modules.steps.page_indices", np.int32, ("modules.steps", "modules.steps.page_entries")),
        Field("modules.steps.page_indptr", np.int32, ("modules.steps", "modules.steps.rows_plus_1")),
        Field("modules.steps.last_page_len", np.int32, ("modules.steps", "modules.steps.rows")),
        Field("modules.steps.seq_lens", np.int32, ("modules.steps", "modules.steps.rows")),
        Field("modules.steps.slot_mapping", np.int64, ("modules.steps.tokens",)),
        Field("modules.steps.positions", np.int64, ("modules.steps.tokens",)),
    )

    def __init__(self, rows: int, widths: Sequence[int]) -> None:
        """widths: tokens a row of every step."""
        self._rows = rows
        self._tokens = self.token_slices(rows, widths)

    @staticmethod
    def token_slices(rows: int, widths: Sequence[int]) -> tuple[slice, ...]:
        """Where each step's tokens stand among those of all steps.

        >>> FixedStepSection.token_slices(4, [1, 2])
        (slice(0, 4, None), slice(4, 12, None))
        """
        stops = [rows * sum(widths[: i + 1]) for i in range(len(widths))]
        return tuple(slice(stop - rows * width, stop) for stop, width in zip(stops, widths, strict=True))

    def dimensions(self, page_entries: int) -> dict[str, int]:
        """Sizes of `fields`."""
        return {
            "modules.steps": len(self._tokens),
            "modules.steps.rows": self._rows,
            "modules.steps.rows_plus_1": self._rows + 1,
            "modules.steps.page_entries": page_entries,
            "modules.steps.tokens": self._tokens[-1].stop if self._tokens else 0,
        }

    @staticmethod
    def buffers(host: Mapping[str, np.ndarray]) -> FixedStepBuffers:
        """The fields in one of the arena's host buffers."""
        names = [field.name for field in fields(FixedStepBuffers)]
        return FixedStepBuffers(**{name: host[f"modules.steps.{name}"] for name in names})

    def views(self, batches: Sequence[HostBatch], staged: Staged) -> tuple[CommonAttentionMetadata, ...]:
        """Metadata of every step."""
        return tuple(self._view(step, host, staged) for step, host in enumerate(batches))

    def _view(self, step: int, host: HostBatch, staged: Staged) -> CommonAttentionMetadata:
        if checking():
            host.validate()
        tokens = self._tokens[step]
        return CommonAttentionMetadata(
            host=host,
            query_start_loc=staged["modules.steps.query_start_loc"][step],
            seq_lens=staged["modules.steps.seq_lens"][step],
            block_table=None,
            slot_mapping=staged["modules.steps.slot_mapping"][tokens],
            positions=staged["modules.steps.positions"][tokens],
            page_indices=staged["modules.steps.page_indices"][step],
            page_indptr=staged["modules.steps.page_indptr"][step],
            last_page_len=staged["modules.steps.last_page_len"][step],
            staged=staged,
        )
