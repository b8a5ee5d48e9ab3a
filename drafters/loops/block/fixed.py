"""The fixed-shape form of a block's draft loop for CUDA graphs: the context of all verified rows, then one step.

Right after the verification, before the host knows what was accepted, all its rows become context: a rejected one lies
at seq' or later, where the block writes before anything reads. Bonus tokens are taken from the result there. The
one step runs the block, and the chain over its slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from attention.hf.custom_op import Channel, LayerAttend, opaque_attend
from attention.runner import GroupRunner, PlannedBatch
from drafters.base import BlockHead
from drafters.loops.base import (
    Attend,
    Chosen,
    Compile,
    Draw,
    FixedPrefill,
    FixedShape,
    FixedSteps,
    Greedy,
    KeysAndValues,
    LoopSize,
    WritesCache,
)
from drafters.loops.block.chains import Independent, drafting_slots, go_along
from drafters.loops.block.inputs import block_tokens
from drafters.loops.head_passes import target_ids_of
from drafters.loops.steps import StepBuffers


class FixedBlock:
    """The fixed-shape form of `BlockLoop`; a `drafters.loops.base.FixedLoop`."""

    prefill_attends = False

    def __init__(
        self,
        head: BlockHead,
        runner: GroupRunner,
        aux: Tensor,
        limits: LoopSize,
        greedy: Greedy,
        compiler: Compile,
    ) -> None:
        rows = max(limits.rows, 2) + 1
        new = partial(torch.zeros, dtype=torch.int64, device=aux.device)
        self._head = head
        self._runner = runner
        self._aux = aux
        self._greedy = greedy
        self._target_ids = target_ids_of(head, aux.device)
        self._channel = Channel[LayerAttend]()
        self._context, self._block = compiler(self._context_of), compiler(self._block_of)
        self._bonus, self.drafts = new(rows), new(rows, limits.drafts)

    def num_steps(self, drafts: int) -> int:
        """See `FixedLoop.num_steps`."""
        return min(drafts, 1)

    def step_width(self, index: int) -> int:
        """See `FixedLoop.step_width`."""
        return self._head.block_size

    def steps(self, shape: FixedShape) -> FixedSteps:
        """See `FixedLoop.steps`."""
        return StepBuffers(shape, block_tokens(shape.rows, self._head.block_size), self._aux.device)

    def prefill(self, inputs: FixedPrefill, positions: Sequence[Tensor], attend: Attend, compiled: bool = True) -> None:
        """See `FixedLoop.prefill`; `attend` is `WritesCache`."""
        assert isinstance(attend, WritesCache)
        run = self._context if compiled else self._context_of
        for layer, (key, value) in enumerate(run(self._aux[: len(inputs.token_ids)], positions[0])):
            attend.write(layer, key, value)
        self._bonus[: len(inputs.last_row)].copy_(inputs.token_ids.index_select(0, inputs.last_row))

    def step(self, index: int, rows: int, planned: PlannedBatch, before: Tensor | None, draw: Draw) -> Tensor:
        """See `FixedLoop.step`; all slots' drafts."""
        head = self._head
        bonus = self._bonus[:rows]
        token_ids = bonus.new_full((rows, head.block_size), head.mask_token_id)
        token_ids[:, 0] = bonus
        attend = partial(self._runner.attend, planned)
        with self._channel.carrying(lambda layer, query, key, value, sinks: attend(layer, query, key, value)):
            x: Tensor = self._block(token_ids.view(-1).clone(), planned.metadata.positions)

        outputs = x.unflatten(0, (rows, -1))
        slots = self.drafts.shape[1]
        if isinstance(head.chain, Independent):
            logits = head.logits(drafting_slots(head, outputs, slots).flatten(0, 1))
            own = self.drafts[:rows].view(-1)
            draw(0, Chosen(self._greedy(logits, self._target_ids, own), logits, slots))
            return x

        def draft(slot: int, logits: Tensor) -> Tensor:
            own = self.drafts[:rows, slot]
            draw(slot, Chosen(self._greedy(logits, self._target_ids, own), logits))
            return own

        go_along(head, outputs, bonus, slots, draft)
        return x

    def _context_of(self, aux: Tensor, positions: Tensor) -> KeysAndValues:
        return self._head.context(self._head.fuse(aux), positions)

    def _block_of(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return self._head.block(token_ids, positions, self._attend)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return opaque_attend(query, key, value, None, self._channel.number, layer)
