"""Passes of one of several modules as functions of tensors, and their fixed shape for CUDA graphs.

They know nothing of rows of a request: the draft prefill and every draft step run the same code, compiled once.

The draft prefill runs right after the verification, before the host knows what was accepted. A request's token row j
stands at position start+j in the target, and at start+j-m in module m: so it pairs the same token, the one at
start+j+1, with another state, module m-1's output at row j-1. Row 0 takes it from what the round before left:

    K = 3, M = 2, start 16, tokens t17 … t20 of the verification, 1 draft accepted (seq' 18)
    module 0 rows 16 17 | 18 19 with t17 t18 | t19 t20      module 1 rows 15 16 | 17 18 with t17 t18 | t19 t20
                     ^ draft 1, carried                                      ^ carried

What lies right of "|" was rejected: it stands at or after the module's end seq'-m, where every module's later rows are
written before they are read. The last row is the same in every module. Of a request with start < m the first m - start
rows of module m do not exist: attention has them on the null page (`drafters.loops.module_arrays.shifted_batch`), and
what they give reaches no row that does exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from attention.batch.host import HostBatch, slots_at
from attention.batch.live import LiveBatch
from attention.batch.metadata import CommonAttentionMetadata
from attention.batch.static import covering, write_pages
from attention.runner import GroupRunner, PlannedBatch
from attention.staging import Staged, StagingArena, bucket_of
from drafters.attend import Attend
from drafters.base import Head
from drafters.loops.base import (
    Chosen,
    Compile,
    DraftingRows,
    Greedy,
    LoopSize,
    StaticPrefill,
    StaticShape,
    paged_attend,
)
from drafters.loops.chain_passes import BlockHead, MtpPasses, target_ids_of
from drafters.loops.module_arrays import FixedStepSection, step_width


class ModulePasses(MtpPasses):
    """One module of several, fed by the module before it in their turn: module 0 by the last one."""

    def __init__(self, head: BlockHead, before: Head) -> None:
        """before: the module whose outputs this one reads."""
        super().__init__(head)
        self._before = before

    def over_target(self, aux: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Module 0 over the target's states [T, H], token_ids, positions [T] -> outputs [T, H]."""
        return self._forward(token_ids, self.head.fuse(aux), positions)

    def over_module(self, x: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Over outputs [T, H] of the module before, token_ids, positions [T] -> outputs [T, H]."""
        return self._forward(token_ids, self._before.feedback(x), positions)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [R, H] -> draft logits [R, Vd]."""
        return self.head.logits(x)


class StaticModules:
    """The static form of `ModuleLoop`; a `drafters.loops.base.StaticLoop`.

    hidden: [M, R, H] output of the draft prefill at each request's last row, by row of the last verification.
    carried: [M-1, R+1, H] the same of all modules but the last, by the request's row of the row table, until the
        request's next draft prefill. The last row has no request: padding rows of a fixed shape write to it.
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
        """passes: of modules 0 … M-1. Others: see `GraphLoop.static_form`."""
        self._passes = passes
        self._plain = [_Functions(each) for each in passes]
        self._compiled = [_Functions(each, compiler) for each in passes]
        self._runner = runner
        self._aux = aux
        self._greedy = greedy
        self._target_ids = target_ids_of(passes[0].head, aux.device)
        hidden_size = passes[0].head.hidden_size
        self.carried = aux.new_zeros(len(passes) - 1, limits.rows + 1, hidden_size)
        rows = max(limits.rows, 2)  # a single row drafts beside a padding row
        self.hidden = aux.new_zeros(len(passes), rows, hidden_size)
        self.drafts = torch.zeros(rows, limits.drafts, dtype=torch.int64, device=aux.device)

    @property
    def carried_shape(self) -> tuple[int, ...]:
        """See `drafters.loops.base.CarriesVectors`."""
        return (self.carried.shape[0], self.carried.shape[2])

    def carried_by(self, request_row: int) -> torch.Tensor:
        """See `drafters.loops.base.CarriesVectors`: [M-1, H]."""
        return self.carried[:, request_row]

    def carry(self, request_row: int, vectors: torch.Tensor) -> None:
        """See `drafters.loops.base.CarriesVectors`."""
        self.carried[:, request_row] = vectors

    def steps(self, shape: StaticShape) -> FixedModuleSteps:
        """See `StaticLoop.steps`."""
        return FixedModuleSteps(shape, len(self._passes), self._aux.device)

    def step_width(self, index: int) -> int:
        """See `StaticLoop.step_width`."""
        return step_width(index + 1, len(self._passes))

    def prefill(
        self, inputs: StaticPrefill, positions: Sequence[torch.Tensor], attend: Attend, compiled: bool = True
    ) -> Chosen:
        """See `StaticLoop.prefill`."""
        assert inputs.carried is not None
        rows, tokens, own = len(inputs.last_row), inputs.token_ids, inputs.carried
        carried, hidden = self.carried[:, own.request_rows], self.hidden[:, :rows]
        modules = self._compiled if compiled else self._plain
        x = self._aux[: len(tokens)]
        for m, functions in enumerate(modules):
            run = functions.over_module if m else functions.over_target
            if m:  # each row takes the output one row before it
                x = torch.cat([carried[m - 1], x]).index_select(0, own.sources)
            with self._passes[m].carrying(_from_layer(attend, m)):
                x = run(x, tokens, positions[m])
            hidden[m].copy_(x.index_select(0, inputs.last_row))
        self.carried[:, own.request_rows] = hidden[:-1]
        return self._choose(modules[0].logits(hidden[0].clone()), 0)

    def step(
        self, index: int, rows: int, planned: PlannedBatch, before: torch.Tensor | None
    ) -> tuple[torch.Tensor, Chosen]:
        """See `StaticLoop.step`: outputs [rows·w, H]."""
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
        """Not in compiled code, which would write the whole buffer of drafts for one of its columns."""
        return Chosen(self._greedy(logits, self._target_ids, self.drafts[: len(logits), draft]), logits)


class _Functions:
    """The functions of a module's passes, compiled where a compiler is given and the module can be."""

    def __init__(self, passes: ModulePasses, compiler: Compile | None = None) -> None:
        compiled = compiler if compiler is not None and passes.can_compile else lambda function: function
        self.over_target = compiled(passes.over_target)
        self.over_module = compiled(passes.over_module)
        self.logits = compiled(passes.logits)


def _from_layer(attend: Attend, first_layer: int) -> Attend:
    """The attention of a module whose layer 0 is the group's `first_layer`."""

    def own(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(first_layer + layer, query, key, value)

    return own


def _row_by_row(first: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """first [R, H] before others [R, n, H] of each row -> [R·(n+1), H]."""
    rows, count, size = others.shape
    joined = first.new_empty(rows * (count + 1), size)
    torch.cat([first[:, None], others], 1, out=joined.view(rows, count + 1, size))
    return joined


def _flat(values: torch.Tensor, *shape: int) -> torch.Tensor:
    """A copy in another shape that is no view: compiled code is compiled anew for every kind of view."""
    copied = values.new_empty(shape)
    copied.view(values.shape).copy_(values)
    return copied


class _StepsPlace:
    """One host buffer of the steps, and the batches over it. first: [K-1, rows] each request's first position."""

    def __init__(
        self, host: Mapping[str, np.ndarray], shape: StaticShape, widths: Sequence[int], section: FixedStepSection
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
    """The steps of a fixed number of rows; step s of M modules has min(s, M) tokens a row.

    A row that takes no step, or is added, writes to the null page.
    """

    def __init__(self, shape: StaticShape, num_modules: int, device: torch.device) -> None:
        self._shape = shape
        rows, steps = shape.rows, np.arange(1, shape.num_steps + 1)
        self._numbers = steps[:, None]
        self._widths = np.minimum(steps, num_modules)[:, None]
        self._reach = steps[:, None] // num_modules * num_modules - self._widths
        self._rows = np.arange(rows)
        widths = [step_width(int(s), num_modules) for s in steps]
        self._pages = -(-max(widths, default=1) // shape.page_size)
        # Of every token, step after step and row after row: its row, its place in it, and its place in [K-1, rows].
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
        """See `StaticSteps.views`."""
        return self._section.of(batches, staged)

    def send(self, rows: DraftingRows) -> tuple[tuple[HostBatch, ...], Staged]:
        """See `StaticSteps.send`; the batches are the arena's memory, good until the round after the next.

        `drafters.loops.module_arrays.module_step` in place: K=4, M=2, a row of 18 positions with 4 drafts, pages [7, 9]
        of 16 tokens: positions 17 | 18 19 | 18 19, slots 145 | 146 147 | 146 147.
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
