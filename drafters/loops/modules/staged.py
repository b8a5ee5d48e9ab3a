"""The section of a staging arena for M modules: its fields, what is sent in them, and the views of what arrived."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attention.batch.metadata import CommonAttentionMetadata, batch_arrays, batch_fields, batch_sizes, from_staged
from attention.batch.staging import Field, Staged
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
