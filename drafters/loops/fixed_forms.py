"""Draft loops in a fixed shape for CUDA graphs: the passes over persistent buffers, of one head and of several modules.

The draft prefill runs right after the verification, before the host knows the accepted drafts. A request's token row j
is at position start+j in the target and at start+j-m in module m: there it combines the same token, the one at
start+j+1, with module m-1's output at row j-1. For row 0 that is the vector carried over from the previous round:

    K = 3, M = 2, start 16, tokens t17 … t20 of the verification, 1 draft accepted (seq' 18)
    module 0 rows 16 17 | 18 19 with t17 t18 | t19 t20      module 1 rows 15 16 | 17 18 with t17 t18 | t19 t20
                     ^ draft 1, carried                                      ^ carried

Rows right of "|" were rejected: they are at or after the module's end seq'-m, where later rows are written before they
are read. The last row is the same in every module. If start < m, the first m - start rows of module m do not exist:
they use the null page (`drafters.loops.prefill.shifted_batch`), and no existing row reads their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from attention.runner import GroupRunner, PlannedBatch
from drafters.loops.base import (
    Attend,
    Chosen,
    Compile,
    Draw,
    FixedPrefill,
    FixedShape,
    FixedSteps,
    Greedy,
    LoopSize,
    from_layer,
)
from drafters.loops.head_passes import HeadPasses, TokenReader, target_ids_of
from drafters.loops.steps import StepBuffers, step_tokens, step_width


class _Fixed:
    """What the fixed-shape forms of draft loops share; a `drafters.loops.base.FixedLoop`.

    bonus: tokens that the draft prefill reads after the committed states, see `drafters.loops.base.ReadsBonus`.
    """

    bonus = 0
    prefill_attends = True

    def __init__(
        self,
        passes: Sequence[HeadPasses],
        runner: GroupRunner,
        aux: Tensor,
        greedy: Greedy,
        rows: int,
        num_drafts: int,
    ) -> None:
        """passes: of modules 0 … M-1. rows: R of `drafts`."""
        self._passes = passes
        self._runner = runner
        self._aux = aux
        self._greedy = greedy
        self._target_ids = target_ids_of(passes[0].head, aux.device)
        self.drafts = aux.new_zeros(rows, num_drafts, dtype=torch.int64)

    def num_steps(self, drafts: int) -> int:
        """See `FixedLoop.num_steps`: the draft prefill makes draft 1."""
        return max(drafts - 1, 0)

    def steps(self, shape: FixedShape) -> FixedSteps:
        tokens = step_tokens(shape.rows, self.num_steps(shape.query_len - 1), len(self._passes))
        return StepBuffers(shape, tokens, self._aux.device, self.bonus)

    def step_width(self, index: int) -> int:
        return step_width(index + 1, len(self._passes))

    def _choose(self, logits: Tensor, draft: int) -> Chosen:
        """Runs outside compiled code, which would rewrite the whole buffer of drafts for one of its columns."""
        return Chosen(self._greedy(logits, self._target_ids, self.drafts[: len(logits), draft]), logits)


class FixedChain(_Fixed):
    """The fixed-shape form of `ChainLoop`.

    hidden: [R, H] outputs of the draft prefill, by row of the last verification.
    """

    def __init__(
        self,
        passes: HeadPasses,
        runner: GroupRunner,
        aux: Tensor,
        limits: LoopSize,
        greedy: Greedy,
        compiler: Compile,
    ) -> None:
        rows = max(limits.rows, 2) + 1  # above any bucket: code for a whole buffer would be compiled once more
        super().__init__((passes,), runner, aux, greedy, rows, limits.drafts)
        self._plain = passes
        compiled = compiler if passes.can_compile else lambda function: function
        self._prefill = compiled(passes.prefill)
        self._step = compiled(passes.step)
        hidden = passes.head.fuse(aux[:2])
        self.hidden = hidden.new_zeros(rows, hidden.shape[1])

    def prefill(
        self, inputs: FixedPrefill, positions: Sequence[Tensor], attend: Attend, compiled: bool = True
    ) -> Chosen:
        """See `FixedLoop.prefill`; it has one pass."""
        run = self._prefill if compiled else self._plain.prefill
        last_row = inputs.last_row
        (own,) = positions
        if len(last_row) == 1:
            last_row = last_row.repeat(2)  # a single row would be compiled once more
        with self._plain.carrying(attend):
            x, logits = run(self._aux[: len(inputs.token_ids)], inputs.token_ids, own, last_row)
        self.hidden[: len(x)].copy_(x)
        return self._choose(logits, 0)

    def step(self, index: int, rows: int, planned: PlannedBatch, before: Tensor | None, draw: Draw) -> Tensor:
        """See `FixedLoop.step`: x [rows, H]. Step 0 copies its input: for a view code would be compiled once more."""
        x = self.hidden[:rows].clone() if before is None else before
        with self._plain.carrying(partial(self._runner.attend, planned)):
            x, logits = self._step(x, self.drafts[:rows, index], planned.metadata.positions)
        draw(index + 1, self._choose(logits, index + 1))
        return x


class FixedTokens(_Fixed):
    """The fixed-shape form of `drafters.loops.tokens.TokenLoop`.

    The draft prefill and the steps are one function, of tokens, their positions and the rows that drafts come from: a
    whole model takes long to compile.
    """

    bonus = 1

    def __init__(
        self, head: TokenReader, runner: GroupRunner, aux: Tensor, limits: LoopSize, greedy: Greedy, compiler: Compile
    ) -> None:
        rows = max(limits.rows, 2) + 1  # above any bucket, as in `FixedChain`
        super().__init__((HeadPasses(head),), runner, aux, greedy, rows, limits.drafts)
        self._head = head
        self._read: Callable[..., Tensor] = compiler(head.read)
        self._rows = torch.arange(rows, device=aux.device)

    def prefill(
        self, inputs: FixedPrefill, positions: Sequence[Tensor], attend: Attend, compiled: bool = True
    ) -> Chosen:
        """See `FixedLoop.prefill`; it has one pass."""
        read = self._read if compiled else self._head.read
        last_row = inputs.last_row
        if len(last_row) == 1:
            last_row = last_row.repeat(2)  # a single row would be compiled once more
        with self._head.attending(attend):
            return self._choose(read(inputs.token_ids.clone(), positions[0], last_row), 0)

    def step(self, index: int, rows: int, planned: PlannedBatch, before: Tensor | None, draw: Draw) -> Tensor:
        """See `FixedLoop.step`; its result is unused. Copies, because code for views would be compiled anew."""
        tokens = self.drafts[:rows, index].clone()
        with self._head.attending(partial(self._runner.attend, planned)):
            logits = self._read(tokens, planned.metadata.positions, self._rows[:rows].clone())
        draw(index + 1, self._choose(logits, index + 1))
        return tokens


class FixedModules(_Fixed):
    """The fixed-shape form of `ModuleLoop`; a `drafters.loops.base.CarriesVectors`.

    hidden: [M, R, H] outputs of the draft prefill at each request's last row, by row of the last verification.
    carried: [M-1, R+1, H] the same of all modules except the last, by the request's row in the row table, until its
        next draft prefill. Padding rows of a fixed shape write to the last row.
    """

    def __init__(
        self,
        passes: Sequence[HeadPasses],
        runner: GroupRunner,
        aux: Tensor,
        limits: LoopSize,
        greedy: Greedy,
        compiler: Compile,
    ) -> None:
        """passes: passes of modules 0 … M-1."""
        rows = max(limits.rows, 2)  # a single row drafts together with a padding row
        super().__init__(passes, runner, aux, greedy, rows, limits.drafts)
        self._compiled = [_Compiled(each, compiler) for each in passes]
        hidden_size = passes[0].head.hidden_size
        self.carried = aux.new_zeros(len(passes) - 1, limits.rows + 1, hidden_size)
        self.hidden = aux.new_zeros(len(passes), rows, hidden_size)

    @property
    def carried_shape(self) -> tuple[int, ...]:
        return (self.carried.shape[0], self.carried.shape[2])

    def carried_by(self, request_row: int) -> Tensor:
        """[M-1, H]."""
        return self.carried[:, request_row]

    def carry(self, request_row: int, vectors: Tensor) -> None:
        self.carried[:, request_row] = vectors

    def prefill(
        self, inputs: FixedPrefill, positions: Sequence[Tensor], attend: Attend, compiled: bool = True
    ) -> Chosen:
        assert inputs.carried is not None
        rows = len(inputs.last_row)
        tokens = inputs.token_ids
        own = inputs.carried
        carried = self.carried[:, own.request_rows]
        hidden = self.hidden[:, :rows]
        modules: Sequence[_Compiled | HeadPasses] = self._compiled if compiled else self._passes
        x = self._aux[: len(tokens)]
        for m, functions in enumerate(modules):
            run = functions.over_head if m else functions.over_target
            if m:  # each row reads the output of the row before it
                x = torch.cat([carried[m - 1], x]).index_select(0, own.sources)
            with self._passes[m].carrying(from_layer(attend, m)):
                x = run(x, tokens, positions[m])
            hidden[m].copy_(x.index_select(0, inputs.last_row))
        self.carried[:, own.request_rows] = hidden[:-1]
        # A clone: compiled code would be recompiled for a view of the buffer, see `_flat`.
        return self._choose(modules[0].logits(hidden[0].clone()), 0)

    def step(self, index: int, rows: int, planned: PlannedBatch, before: Tensor | None, draw: Draw) -> Tensor:
        """See `FixedLoop.step`: outputs [rows·w, H]."""
        step = index + 1
        num_modules = len(self._passes)
        m = step % num_modules
        width = step_width(step, num_modules)
        x = before
        if step <= num_modules:  # one row more than the step before
            first = self.hidden[step - 1, :rows]
            if before is None:
                x = first.clone()
            else:  # joined by row, in the final shape, so that the result is no view, see `_flat`
                x = first.new_empty(rows * width, first.shape[1])
                torch.cat([first[:, None], before.view(rows, width - 1, -1)], 1, out=x.view(rows, width, -1))
        assert x is not None
        token_ids = _flat(self.drafts[:rows, step - width : step], rows * width)
        with self._passes[m].carrying(from_layer(partial(self._runner.attend, planned), m)):
            x = self._compiled[m].over_head(x, token_ids, planned.metadata.positions)
        last = _flat(x.view(rows, width, -1)[:, -1], rows, x.shape[1])
        draw(step, self._choose(self._compiled[m].logits(last), step))
        return x


class _Compiled:
    """The functions of a module's passes, compiled if they can be."""

    def __init__(self, passes: HeadPasses, compiler: Compile) -> None:
        compiled = compiler if passes.can_compile else lambda function: function
        self.over_target = compiled(passes.over_target)
        self.over_head = compiled(passes.over_head)
        self.logits = compiled(passes.logits)


def _flat(values: Tensor, *shape: int) -> Tensor:
    """A contiguous copy in another shape, because compiled code would be recompiled for every kind of view."""
    copied = values.new_empty(shape)
    copied.view(values.shape).copy_(values)
    return copied
