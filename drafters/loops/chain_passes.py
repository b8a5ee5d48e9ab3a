"""Passes of a head as compilable functions of tensors, and their fixed-shape form for CUDA graphs.

The draft prefill of fixed shape is launched right after the verification, before the host knows the accepted drafts: it
reads every token row of the verification, and takes the output at each row's last accepted token. Cache entries of
rejected tokens lie past the row's end and are overwritten. The arrays of the steps are written in place into the pinned
buffers from which they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from attention.batch.fixed import LiveBatch, covering, write_pages
from attention.batch.host import HostBatch, slots_at
from attention.batch.metadata import CommonAttentionMetadata
from attention.hf.custom_op import Channel, LayerAttend, opaque_attend
from attention.runner import GroupRunner, PlannedBatch
from attention.staging import Staged, StagingArena, bucket_of
from drafters.attend import Attend
from drafters.base import Head
from drafters.loops.base import (
    Chosen,
    Compile,
    DraftingRows,
    FixedPrefill,
    FixedShape,
    Greedy,
    LoopSize,
    paged_attend,
)
from drafters.loops.chain_arrays import StepSection

Passed = tuple[torch.Tensor, torch.Tensor]
"""Block outputs [R, H], draft logits [R, Vd]."""


class HeadPasses:
    """The passes of any head, with attention through `channel`."""

    can_compile = False
    """Whether the compiler is known to trace the head's code into one graph."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.channel = Channel[LayerAttend]()

    def carrying(self, attend: Attend) -> AbstractContextManager[None]:
        """A context in which `attend` computes the passes' attention."""
        return self.channel.carrying(lambda layer, query, key, value, sinks: attend(layer, query, key, value))

    def prefill(
        self, aux: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, last_row: torch.Tensor
    ) -> Passed:
        """aux [T', A·Ht], token_ids, positions [T'], last_row [R] -> outputs and logits of the last rows."""
        x = self._forward(token_ids, self.head.fuse(aux), positions)
        return self._with_logits(x.index_select(0, last_row))

    def step(self, x: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor) -> Passed:
        """x [R, H] of the previous step, token_ids, positions [R] -> outputs and logits."""
        return self._with_logits(self._forward(token_ids, self.head.feedback(x), positions))

    def _forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head.forward(token_ids, hidden, positions, self._attend)

    def _with_logits(self, x: torch.Tensor) -> Passed:
        return x, self.head.logits(x)

    def _attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return opaque_attend(query, key, value, None, self.channel.number, layer)


class RowSelecting(Head, Protocol):
    """A head whose forward can compute the outputs of some rows only."""

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Head.forward`; rows: [R] int64, the rows to compute outputs for -> [R, H]."""


class EaglePasses(HeadPasses):
    """The passes of a `RowSelecting` head."""

    can_compile = True

    def __init__(self, head: RowSelecting) -> None:
        super().__init__(head)
        self._eagle = head

    def prefill(
        self, aux: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, last_row: torch.Tensor
    ) -> Passed:
        """See `HeadPasses.prefill`; of rows other than the last ones only keys and values are computed."""
        return self._with_logits(
            self._eagle.forward(token_ids, self._eagle.fuse(aux), positions, self._attend, rows=last_row)
        )


class BlockHead(Head, Protocol):
    """A head whose block is a transformers layer, which calls attention through a port."""

    def attending(self, attend: Attend) -> AbstractContextManager[None]:
        """A context in which `attend` computes the block's attention."""

    def run_block(self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`forward` inside `attending`; can be compiled."""


class MtpPasses(HeadPasses):
    """The passes of a `BlockHead`."""

    can_compile = True

    def __init__(self, head: BlockHead) -> None:
        super().__init__(head)
        self._module = head

    def carrying(self, attend: Attend) -> AbstractContextManager[None]:
        return self._module.attending(attend)

    def _forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._module.run_block(token_ids, hidden, positions)


def target_ids_of(head: Head, device: torch.device) -> torch.Tensor | None:
    """Target ids of all of a head's draft ids [Vd] int64; None where both are the same."""
    ids = torch.arange(head.draft_vocab_size, device=device)
    target_ids = head.to_target_ids(ids)
    return None if torch.equal(ids, target_ids) else target_ids.contiguous()


class FixedChain:
    """The fixed-shape form of `ChainLoop`; a `drafters.loops.base.FixedLoop`.

    hidden: [R, H] outputs of the draft prefill, by row of the last verification.
    """

    def __init__(
        self,
        passes: HeadPasses,
        runner: GroupRunner,
        aux: torch.Tensor,
        limits: LoopSize,
        greedy: Greedy,
        compiler: Compile,
    ) -> None:
        self._plain = passes
        self._prefill: Callable[..., Any] = compiler(passes.prefill) if passes.can_compile else passes.prefill
        self._step: Callable[..., Any] = compiler(passes.step) if passes.can_compile else passes.step
        self._runner = runner
        self._aux = aux
        self._greedy = greedy
        self._target_ids = target_ids_of(passes.head, aux.device)
        hidden = passes.head.fuse(aux[:2])
        rows = max(limits.rows, 2) + 1  # above any bucket: code for a whole buffer would be compiled once more
        self.hidden = hidden.new_zeros(rows, hidden.shape[1])
        self.drafts = torch.zeros(rows, limits.drafts, dtype=torch.int64, device=aux.device)

    def steps(self, shape: FixedShape) -> FixedChainSteps:
        return FixedChainSteps(shape, self._aux.device)

    def step_width(self, index: int) -> int:
        """One token."""
        return 1

    def prefill(
        self, inputs: FixedPrefill, positions: Sequence[torch.Tensor], attend: Attend, compiled: bool = True
    ) -> Chosen:
        """See `FixedLoop.prefill`; it has one pass."""
        run, last_row, (own,) = self._prefill if compiled else self._plain.prefill, inputs.last_row, positions
        if len(last_row) == 1:
            last_row = last_row.repeat(2)  # a single row would be compiled once more
        with self._plain.carrying(attend):
            x, logits = run(self._aux[: len(inputs.token_ids)], inputs.token_ids, own, last_row)
        self.hidden[: len(x)].copy_(x)
        return self._choose(logits, 0)

    def step(
        self, index: int, rows: int, planned: PlannedBatch, before: torch.Tensor | None
    ) -> tuple[torch.Tensor, Chosen]:
        """See `FixedLoop.step`: x [rows, H]. Step 0 copies its input: for a view code would be compiled once more."""
        x = self.hidden[:rows].clone() if before is None else before
        with self._plain.carrying(paged_attend(self._runner, planned)):
            x, logits = self._step(x, self.drafts[:rows, index], planned.metadata.positions)
        return x, self._choose(logits, index + 1)

    def _choose(self, logits: torch.Tensor, draft: int) -> Chosen:
        """Runs outside compiled code, which would rewrite the whole buffer of drafts for one of its columns."""
        return Chosen(self._greedy(logits, self._target_ids, self.drafts[: len(logits), draft]), logits)


_STEPS = StepSection(table=False)


class _StepsPlace:
    """One host buffer of the draft steps, with the batches over it."""

    def __init__(self, host: Mapping[str, np.ndarray], shape: FixedShape) -> None:
        self.arrays = _STEPS.buffers(host)
        self.arrays.query_start_loc[:] = np.arange(shape.rows + 1)
        self.batches = tuple(
            LiveBatch(
                query_start_loc=self.arrays.query_start_loc,
                seq_lens=self.arrays.seq_lens[step],
                num_computed_tokens=self.arrays.positions[step],
                slot_mapping=self.arrays.slot_mapping[step],
                positions=self.arrays.positions[step],
                block_table=np.zeros((0, 0), np.int32),
                page_size=shape.page_size,
                page_indptr=self.arrays.page_indptr[step],
            )
            for step in range(shape.num_steps)
        )


class FixedChainSteps:
    """A chain's `FixedSteps`. Padding rows, and rows that do not take a step, use the null page."""

    def __init__(self, shape: FixedShape, device: torch.device) -> None:
        self._shape = shape
        self._numbers = np.arange(2, shape.query_len)[:, None]  # step j of K
        self._offsets = self._numbers - 2
        self._rows = np.arange(shape.rows)
        self._lens = np.zeros(shape.rows, np.int64)
        self._num_drafts = np.zeros(shape.rows, np.int64)
        self._bucket = bucket_of(**_STEPS.sizes(shape.rows, 0, shape.num_steps, shape.page_entries))
        self._arena = StagingArena(_STEPS.fields, self._bucket, device)
        self._places = [_StepsPlace(host, shape) for host in self._arena.hosts(self._bucket)]

    def views(self, batches: Sequence[HostBatch], staged: Staged) -> tuple[CommonAttentionMetadata, ...]:
        return _STEPS.of(batches, staged)

    def send(self, rows: DraftingRows) -> tuple[tuple[HostBatch, ...], Staged]:
        """See `FixedSteps.send`; the batches are views of the arena, valid until the round after the next.

        Computes `drafters.loops.chain_arrays.draft_steps` in place. K=3, a row at 18 with 3 drafts, pages [7, 9] of 16
        tokens: positions 18, 19, seq_lens 19, 20, slots 146, 147.
        """
        place = self._places[self._arena.begin()]
        arrays, page_size, count = place.arrays, self._shape.page_size, len(rows.num_drafts)
        if count < len(self._lens):
            self._lens[count:] = self._num_drafts[count:] = 0
        self._lens[:count], self._num_drafts[:count] = rows.committed_lens, rows.num_drafts
        active = self._num_drafts >= self._numbers  # [K-1, rows]
        positions, slots = arrays.positions, arrays.slot_mapping
        np.add(self._lens, self._offsets, out=positions)  # seq' + j - 2
        positions *= active
        np.add(positions, 1, out=arrays.seq_lens, casting="unsafe")
        counts, within = np.divmod(positions, page_size)
        table = covering(rows.block_table, len(self._rows), 1)
        slots_at(table, self._rows, counts, within, page_size, out=slots)
        slots *= active
        np.add(within, 1, out=arrays.last_page_len, casting="unsafe")
        counts += 1
        np.cumsum(counts, axis=1, out=arrays.page_indptr[:, 1:], dtype=np.int32)
        _write_step_pages(arrays.page_indices, table, counts)
        staged = self._arena.end(self._bucket)
        return tuple([batch.over(table) for batch in place.batches]), staged


def _write_step_pages(page_indices: np.ndarray, table: np.ndarray, counts: np.ndarray) -> None:
    """Write each step's pages into page_indices [K-1, …]; counts: [K-1, rows]. Steps that enter no new page copy."""
    used, same = 0, (counts[1:] == counts[:-1]).all(1).tolist()
    for step, own in enumerate(counts):
        if step and same[step - 1]:
            page_indices[step, :used] = page_indices[step - 1, :used]
        else:
            used = write_pages(page_indices[step], table, own)
