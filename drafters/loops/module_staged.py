"""ModuleSection: where the arrays of a loop of M modules lie in a staging arena, and their device views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
import torch

from attention.batch.host import HostBatch
from attention.batch.metadata import BatchArrays, BatchSection, CommonAttentionMetadata
from attention.batch.staging import Staged
from attention.checking import checking
from attention.declared import A, Section, array
from drafters.loops.base import LoopSize
from drafters.loops.module_arrays import ModuleArrays, PassRows, step_width


@dataclass(frozen=True)
class ModulePass(PassRows[torch.Tensor]):
    """`ModulePassArrays` on the device. metadata: attention of the pass."""

    metadata: CommonAttentionMetadata = field(kw_only=True)


@dataclass(frozen=True)
class _Requests(Generic[A]):
    request_rows: A = array(np.int64, "requests")


@dataclass(frozen=True)
class ModuleInputs:
    """`ModuleArrays` on the device."""

    request_rows: torch.Tensor
    num_drafting: int
    passes: tuple[ModulePass, ...]
    steps: tuple[CommonAttentionMetadata, ...]


class ModuleSection:
    """The loop of M modules in the arena, for up to K drafts; a `drafters.loops.base.LoopSection`."""

    def __init__(self, num_modules: int, num_drafts: int) -> None:
        self._num_modules, requests = num_modules, {"requests": "modules.requests"}
        names = [f"modules.prefill{m}" for m in range(num_modules)]
        self._requests = Section(_Requests, "modules")
        self._batches = [BatchSection(name) for name in names]
        self._rows = [Section(PassRows, name, shared=requests) for name in names]
        self._steps = [BatchSection(f"modules.step{s}") for s in range(1, num_drafts)]
        sections: list[Any] = [self._requests, *self._batches, *self._rows, *self._steps]
        self.fields = tuple(place for section in sections for place in section.fields)

    def sizes(self, size: LoopSize) -> dict[str, int]:
        """See `LoopSection.sizes`."""
        sizes = {"modules.requests": size.rows}
        for batch in self._batches:
            sizes |= batch.sizes(size.rows, size.tokens, size.pages)
        for s, step in enumerate(self._steps, 1):
            rows = size.rows if s <= size.steps else 0
            sizes |= step.sizes(rows, rows * step_width(s, self._num_modules), size.pages)
        return sizes

    def values(self, arrays: ModuleArrays) -> dict[str, np.ndarray]:
        """See `LoopSection.values`."""
        found = self._requests.values(arrays)
        for batch, rows, each in zip(self._batches, self._rows, arrays.passes, strict=True):
            found |= batch.values(each.batch) | rows.values(each)
        for step, own in zip(self._steps, arrays.steps, strict=False):
            found |= step.values(own)
        return found

    def of(self, arrays: ModuleArrays, staged: Staged) -> ModuleInputs:
        """See `LoopSection.of`."""
        sections = zip(self._batches, self._rows, arrays.passes, strict=True)
        passes = tuple(
            rows.of(staged.views, ModulePass, metadata=batch.metadata(each.batch, staged))
            for batch, rows, each in sections
        )
        steps = tuple(step.metadata(own, staged) for step, own in zip(self._steps, arrays.steps, strict=False))
        return ModuleInputs(self._requests.of(staged.views).request_rows, arrays.num_drafting, passes, steps)


class FixedStepSection:
    """All steps of M modules in an arena of their own, for rounds of one fixed shape.

    Their arrays are one batch, with the step as the first dimension, but slots and positions: those of all tokens, step
    after step.
    """

    def __init__(self, rows: int, widths: Sequence[int]) -> None:
        """widths: tokens a row of every step."""
        self._rows = rows
        self.tokens = token_slices(rows, widths)
        per_step = ("query_start_loc", "seq_lens", "page_indices", "page_indptr", "last_page_len")
        leading = dict.fromkeys(per_step, "modules.steps")
        self._own = Section(BatchArrays, "modules.steps", ("block_table",), leading=leading)
        self.fields = self._own.fields

    def sizes(self, page_entries: int) -> dict[str, int]:
        """Sizes of the dimensions of `fields`."""
        return {
            "modules.steps": len(self.tokens),
            "modules.steps.rows": self._rows,
            "modules.steps.rows_plus_1": self._rows + 1,
            "modules.steps.entries": page_entries,
            "modules.steps.tokens": self.tokens[-1].stop if self.tokens else 0,
        }

    def buffers(self, host: Mapping[str, np.ndarray]) -> BatchArrays[np.ndarray]:
        """One of the arena's host buffers, whole."""
        return self._own.of(host)

    def of(self, batches: Sequence[HostBatch], staged: Staged) -> tuple[CommonAttentionMetadata, ...]:
        """Metadata of every step."""
        whole: BatchArrays[torch.Tensor] = self._own.of(staged.views)
        return tuple(self._step(step, host, whole, staged) for step, host in enumerate(batches))

    def _step(
        self, step: int, host: HostBatch, whole: BatchArrays[torch.Tensor], staged: Staged
    ) -> CommonAttentionMetadata:
        if checking():
            host.validate()
        tokens = self.tokens[step]
        return CommonAttentionMetadata(
            host=host,
            query_start_loc=whole.query_start_loc[step],
            seq_lens=whole.seq_lens[step],
            slot_mapping=whole.slot_mapping[tokens],
            positions=whole.positions[tokens],
            page_indices=whole.page_indices[step],
            page_indptr=whole.page_indptr[step],
            last_page_len=whole.last_page_len[step],
            staged=staged,
        )


def token_slices(rows: int, widths: Sequence[int]) -> tuple[slice, ...]:
    """Places of each step's tokens among the tokens of all steps; widths: tokens a row of every step.

    >>> token_slices(4, [1, 2])
    (slice(0, 4, None), slice(4, 12, None))
    """
    stops = [rows * sum(widths[: i + 1]) for i in range(len(widths))]
    return tuple(slice(stop - rows * width, stop) for stop, width in zip(stops, widths, strict=True))
