"""BlockLoop: the draft loop of a head that drafts a whole block in one pass.

A round writes keys and values of the accepted positions, of all layers, from the target's states: the context. Then one
pass over the block gives the logits of all slots, and a chain chooses from them, slot by slot. The block's own keys and
values are at seq' and later, where the next round's context and block overwrite them before anything reads them. So the
cache keeps context alone, and a context entry depends on no token after its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from attention.batch.metadata import BatchSection, CommonAttentionMetadata
from attention.cache.pages import NULL_PAGE
from attention.checking import CHECKS, require
from attention.runner import GroupRunner
from attention.staging import Arrays, Section, Sizes, Staged
from drafters.base import BlockHead
from drafters.loops.base import Choose, Compile, Draft, DraftInput, FixedLoop, Greedy, LoopSize
from drafters.loops.block.chains import drafts_along
from drafters.loops.block.inputs import BlockRows, HostBlock, block_arrays


@dataclass(frozen=True, kw_only=True)
class DeviceBlock(BlockRows[Tensor]):
    """`HostBlock` on the device. metadata: the block's attention. num_drafts: n, the most of a row."""

    metadata: CommonAttentionMetadata
    num_drafts: int


class BlockSection:
    """Places the arrays in the round's arena; a `drafters.loops.base.LoopSection`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._batch, self._rows = BatchSection("block"), Section(BlockRows, "context", shared={"block": "block.tokens"})
        self.fields = (*self._batch.fields, *self._rows.fields)

    def sizes(self, size: LoopSize) -> Sizes:
        block = self._batch.sizes(size.rows, size.rows * self._block_size, size.pages)
        return block | {"context.tokens": size.tokens}

    def values(self, arrays: HostBlock) -> Arrays:
        return self._batch.values(arrays.batch) | self._rows.values(arrays)

    def of(self, arrays: HostBlock, staged: Staged) -> DeviceBlock:
        metadata = self._batch.metadata(arrays.batch, staged)
        return self._rows.of(staged.views, DeviceBlock, metadata=metadata, num_drafts=arrays.size.drafts)


class BlockLoop:
    """The draft loop of one head; a `drafters.loops.base.GraphLoop` that `SharesPages`."""

    name = "blocks of drafts"
    num_modules = 1
    num_following = 1
    """Context depends on no following token; the least that the prefix cache knows is 1."""

    def __init__(self, head: BlockHead, keep: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None) -> None:
        """keep: makes `Draft.kept` from the outputs [R, Q, H], the bonus tokens [R] and the drafts [R, n]."""
        self._keep = keep
        self.section = BlockSection(head.block_size)
        self._head = head

    def arrays(self, draft: DraftInput) -> HostBlock:
        """All arrays of a round. Raises InvariantError, in check mode, where a block has no pages."""
        arrays = block_arrays(draft, self._head.block_size, self._head.mask_token_id)
        if CHECKS.on:
            pages = arrays.batch.slot_mapping // draft.page_size
            require(bool((pages != NULL_PAGE).all()), "a block lies on pages that its row does not own")
        return arrays

    def run(self, inputs: DeviceBlock, runner: GroupRunner, aux: Tensor, choose: Choose) -> Draft:
        """Write the context, then draft.

        Source: z-lab/dflash, dflash/model.py (DFlashDraftModel).
        """
        head = self._head
        hidden = head.fuse(aux.index_select(0, inputs.sources))
        for layer, (key, value) in enumerate(head.context(hidden, inputs.positions)):
            runner.write(layer, key, value, inputs.slots)
        if not inputs.num_drafts:
            return Draft(inputs.token_ids.new_empty(0, 0), None)
        attend = partial(runner.attend, runner.plan(inputs.metadata))
        x = head.block(inputs.token_ids, inputs.metadata.positions, attend).unflatten(0, (-1, head.block_size))
        bonus = inputs.token_ids[:: head.block_size]
        draft = drafts_along(head, x, bonus, inputs.num_drafts, choose)
        return draft if self._keep is None else replace(draft, kept=self._keep(x, bonus, draft.token_ids))

    def fixed_form(
        self, runner: GroupRunner, aux: Tensor, limits: LoopSize, greedy: Greedy, compiler: Compile
    ) -> FixedLoop:
        """See `GraphLoop.fixed_form`."""
        from drafters.loops.block.fixed import FixedBlock  # late: only rounds from graphs need it

        return FixedBlock(self._head, runner, aux, limits, greedy, compiler)
