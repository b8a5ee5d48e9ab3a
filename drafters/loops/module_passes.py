"""Passes of one of several modules as functions of tensors, and their fixed-shape form for CUDA graphs.

The draft prefill and every draft step run the same code, compiled once; it does not depend on the rows of a request.

The draft prefill runs right after the verification, before the host knows the accepted drafts. A request's token row j
is at position start+j in the target and at start+j-m in module m: there it combines the same token, the one at
start+j+1, with module m-1's output at row j-1. For row 0 that is the vector carried over from the previous round:

    K = 3, M = 2, start 16, tokens t17 … t20 of the verification, 1 draft accepted (seq' 18)
    module 0 rows 16 17 | 18 19 with t17 t18 | t19 t20      module 1 rows 15 16 | 17 18 with t17 t18 | t19 t20
                     ^ draft 1, carried                                      ^ carried

Rows right of "|" were rejected: they are at or after the module's end seq'-m, where later rows are written before they
are read. The last row is the same in every module. If start < m, the first m - start rows of module m do not exist:
they use the null page (`drafters.loops.module_arrays.shifted_batch`), and no existing row reads their results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from attention.batch.fixed import LiveBatch, covering, write_pages
from attention.batch.host import HostBatch, slots_at
from attention.batch.metadata import CommonAttentionMetadata
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
    from_layer,
    paged_attend,
)
from drafters.loops.chain_passes import BlockHead, MtpPasses, target_ids_of
from drafters.loops.module_arrays import FixedStepSection, step_width


class ModulePasses(MtpPasses):
    """The passes of one module of several; it reads the outputs of module `before` (for module 0, the last)."""

    def __init__(self, head: BlockHead, before: Head) -> None:
        super().__init__(head)
        self._before = before

    def over_target(self, aux: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Module 0: the target's states [T, H], token_ids, positions [T] -> outputs [T, H]."""
        return self._forward(token_ids, self.head.fuse(aux), positions)

    def over_module(self, x: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Outputs [T, H] of the previous module, token_ids, positions [T] -> outputs [T, H]."""
        return self._forward(token_ids, self._before.feedback(x), positions)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [R, H] -> draft logits [R, Vd]."""
        return self.head.logits(x)


class FixedModules:
    """The fixed-shape form of `ModuleLoop`; a `drafters.loops.base.FixedLoop`, and `CarriesVectors`.

    hidden: [M, R, H] outputs of the draft prefill at each request's last row, by row of the last verification.
    carried: [M-1, R+1, H] the same of all modules except the last, by the request's row in the row table, until its
        next draft prefill. Padding rows of a fixed shape write to the last row.
    """

    def __init__(
        self,
        passes: Sequence[ModulePasses],
        runner: GroupRunner,
        aux: torch.Tensor,
        limits: LoopSize,
        greedy: Greedy,
        compiler: Compile,
    ) -> None:
        """passes: passes of modules 0 … M-1."""
        self._passes = passes
        self._plain = [_Functions(each) for each in passes]
        self._compiled = [_Functions(each, compiler) for each in passes]
        self._runner = runner
        self._aux = aux
        self._greedy = greedy
        self._target_ids = target_ids_of(passes[0].head, aux.device)
        hidden_size = passes[0].head.hidden_size
        self.carried = aux.new_zeros(len(passes) - 1, limits.rows + 1, hidden_size)
        rows = max(limits.rows, 2)  # a single row drafts together with a padding row
        self.hidden = aux.new_zeros(len(passes), rows, hidden_size)
        self.drafts = torch.zeros(rows, limits.drafts, dtype=torch.int64, device=aux.device)

    @property
    def carried_shape(self) -> tuple[int, ...]:
        return (self.carried.shape[0], self.carried.shape[2])

    def carried_by(self, request_row: int) -> torch.Tensor:
        """[M-1, H]."""
        return self.carried[:, request_row]

    def carry(self, request_row: int, vectors: torch.Tensor) -> None:
        self.carried[:, request_row] = vectors

    def steps(self, shape: FixedShape) -> FixedModuleSteps:
        return FixedModuleSteps(shape, len(self._passes), self._aux.device)

    def step_width(self, index: int) -> int:
        return step_width(index + 1, len(self._passes))

    def prefill(
        self, inputs: FixedPrefill, positions: Sequence[torch.Tensor], attend: Attend, compiled: bool = True
    ) -> Chosen:
        assert inputs.carried is not None
        rows, tokens, own = len(inputs.last_row), inputs.token_ids, inputs.carried
        carried, hidden = self.carried[:, own.request_rows], self.hidden[:, :rows]
        modules = self._compiled if compiled else self._plain
        x = self._aux[: len(tokens)]
        for m, functions in enumerate(modules):
            run = functions.over_module if m else functions.over_target
            if m:  # each row reads the output of the row before it
                x = torch.cat([carried[m - 1], x]).index_select(0, own.sources)
            with self._passes[m].carrying(from_layer(attend, m)):
                x = run(x, tokens, positions[m])
            hidden[m].copy_(x.index_select(0, inputs.last_row))
        self.carried[:, own.request_rows] = hidden[:-1]
        # A clone: compiled code would be recompiled for a view of the buffer, see `_flat`.
        return self._choose(modules[0].logits(hidden[0].clone()), 0)

    def step(
        self, index: int, rows: int, planned: PlannedBatch, before: torch.Tensor | None
    ) -> tuple[torch.Tensor, Chosen]:
        """See `FixedLoop.step`: outputs [rows·w, H]."""
        step, num_modules = index + 1, len(self._passes)
        m, width = step % num_modules, step_width(step, num_modules)
        x = before
        if step <= num_modules:  # one row more than the step before
            first = self.hidden[step - 1, :rows]
            x = first.clone() if before is None else _row_by_row(first, before.view(rows, width - 1, -1))
        assert x is not None
        token_ids = _flat(self.drafts[:rows, step - width : step], rows * width)
        with self._passes[m].carrying(paged_attend(self._runner, planned, m)):
            x = self._compiled[m].over_module(x, token_ids, planned.metadata.positions)
        last = _flat(x.view(rows, width, -1)[:, -1], rows, x.shape[1])
        return x, self._choose(self._compiled[m].logits(last), step)

    def _choose(self, logits: torch.Tensor, draft: int) -> Chosen:
        """Runs outside compiled code, which would rewrite the whole buffer of drafts for one of its columns."""
        return Chosen(self._greedy(logits, self._target_ids, self.drafts[: len(logits), draft]), logits)


class _Functions:
    """The functions of a module's passes, compiled if a compiler is given and can compile them."""

    def __init__(self, passes: ModulePasses, compiler: Compile | None = None) -> None:
        compiled = compiler if compiler is not None and passes.can_compile else lambda function: function
        self.over_target = compiled(passes.over_target)
        self.over_module = compiled(passes.over_module)
        self.logits = compiled(passes.logits)


def _row_by_row(first: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Join first [R, H] and others [R, n, H] by row -> [R·(n+1), H]."""
    rows, count, size = others.shape
    joined = first.new_empty(rows * (count + 1), size)  # in the final shape, so that the result is no view, see `_flat`
    torch.cat([first[:, None], others], 1, out=joined.view(rows, count + 1, size))
    return joined


def _flat(values: torch.Tensor, *shape: int) -> torch.Tensor:
    """A contiguous copy in another shape, because compiled code would be recompiled for every kind of view."""
    copied = values.new_empty(shape)
    copied.view(values.shape).copy_(values)
    return copied


class _StepsPlace:
    """One host buffer of the draft steps, with the batches over it. first: [K-1, rows] first positions of the rows."""

    def __init__(
        self, host: Mapping[str, np.ndarray], shape: FixedShape, widths: Sequence[int], section: FixedStepSection
    ) -> None:
        self.arrays = arrays = section.buffers(host)
        arrays.query_start_loc[:] = np.arange(shape.rows + 1) * np.array(widths, np.int64)[:, None]
        self.first = np.zeros((len(widths), shape.rows), np.int64)
        self.batches = tuple(
            LiveBatch(
                query_start_loc=arrays.query_start_loc[step],
                seq_lens=arrays.seq_lens[step],
                num_computed_tokens=self.first[step],
                slot_mapping=arrays.slot_mapping[own],
                positions=arrays.positions[own],
                block_table=np.zeros((0, 0), np.int32),
                page_size=shape.page_size,
                page_indptr=arrays.page_indptr[step],
            )
            for step, own in enumerate(section.tokens)
        )


class FixedModuleSteps:
    """The `FixedSteps` of M modules; step s has min(s, M) tokens a row.

    Padding rows, and rows that do not take a step, use the null page.
    """

    def __init__(self, shape: FixedShape, num_modules: int, device: torch.device) -> None:
        self._shape = shape
        rows, steps = shape.rows, np.arange(1, shape.num_steps + 1)
        self._numbers = steps[:, None]
        self._widths = np.minimum(steps, num_modules)[:, None]
        self._reach = steps[:, None] // num_modules * num_modules - self._widths
        self._rows = np.arange(rows)
        widths = [step_width(int(s), num_modules) for s in steps]
        self._pages = -(-max(widths, default=1) // shape.page_size)
        # Of every token, step after step and row after row: its row, its index in the row, its index in [K-1, rows].
        self._owner = np.concatenate([np.repeat(self._rows, w) for w in [0, *widths]])
        self._within = np.concatenate([np.tile(np.arange(w), rows) for w in [0, *widths]])
        self._cell = self._owner + np.repeat(np.arange(len(widths)) * rows, np.array(widths, np.int64) * rows)
        self._lens = np.zeros(rows, np.int64)
        self._num_drafts = np.zeros(rows, np.int64)
        self._section = FixedStepSection(rows, widths)
        self._bucket = bucket_of(**self._section.sizes(shape.page_entries))
        self._arena = StagingArena(self._section.fields, self._bucket, device)
        self._places = [_StepsPlace(host, shape, widths, self._section) for host in self._arena.hosts(self._bucket)]

    def views(self, batches: Sequence[HostBatch], staged: Staged) -> tuple[CommonAttentionMetadata, ...]:
        return self._section.of(batches, staged)

    def send(self, rows: DraftingRows) -> tuple[tuple[HostBatch, ...], Staged]:
        """See `FixedSteps.send`; the batches are views of the arena, valid until the round after the next.

        Computes `drafters.loops.module_arrays.module_step` in place. K=4, M=2, a row of 18 positions with 4 drafts,
        pages [7, 9] of 16 tokens: positions 17 | 18 19 | 18 19, slots 145 | 146 147 | 146 147.
        """
        place = self._places[self._arena.begin()]
        arrays, first, page_size, count = place.arrays, place.first, self._shape.page_size, len(rows.num_drafts)
        if count < len(self._lens):
            self._lens[count:] = self._num_drafts[count:] = 0
        self._lens[:count], self._num_drafts[:count] = rows.committed_lens, rows.num_drafts
        active = self._num_drafts > self._numbers  # [K-1, rows]
        active &= self._lens >= self._widths
        np.add(self._lens, self._reach, out=first)
        first *= active
        np.add(first, self._widths, out=arrays.seq_lens, casting="unsafe")
        positions, slots = arrays.positions, arrays.slot_mapping
        np.add(first.reshape(-1)[self._cell], self._within, out=positions)
        pages, offsets = np.divmod(positions, page_size)
        table = covering(rows.block_table, len(self._rows), self._pages)
        slots_at(table, self._owner, pages, offsets, page_size, out=slots)
        slots *= active.reshape(-1)[self._cell]
        counts, within = np.divmod(first + (self._widths - 1), page_size)
        counts += 1
        np.add(within, 1, out=arrays.last_page_len, casting="unsafe")
        np.cumsum(counts, axis=1, out=arrays.page_indptr[:, 1:], dtype=np.int32)
        for step, own in enumerate(counts):
            write_pages(arrays.page_indices[step], table, own)
        return tuple(batch.over(table) for batch in place.batches), self._arena.end(self._bucket)
