"""The draft loop of a head that reads its own output, and of several modules that take turns (a chain is M = 1).

A draft prefill runs over the target's true hidden states; then steps run over drafts, module s mod M making draft s+1.
Between rounds one vector a request and module stays on the device, see `drafters.loops.prefill`; a chain needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from attention.batch.metadata import BatchSection, CommonAttentionMetadata
from attention.runner import GroupRunner
from attention.staging import A, Arrays, Section, Sizes, Staged, array
from drafters.base import ChainHead
from drafters.loops.base import (
    Attend,
    Choose,
    Compile,
    Draft,
    DraftInput,
    FixedLoop,
    Greedy,
    LoopSize,
    Passes,
    from_layer,
)
from drafters.loops.head_passes import HeadPasses, MtpPasses, PortedHead
from drafters.loops.prefill import DevicePass, HostPass, PassRows, module_passes, prefill_arrays
from drafters.loops.steps import StepArrays, StepSection, step_arrays


@dataclass(frozen=True)
class Requests(Generic[A]):
    """The requests of a draft prefill of M > 1 modules; request_rows: see `DraftInput`."""

    request_rows: A = array(np.int64, "requests")


@dataclass(frozen=True)
class DraftArrays:
    """Host arrays of a draft loop; a `drafters.loops.base.LoopArrays`.

    Attributes:
        size: see `LoopArrays`.
        request_rows: [B'] int64; the R drafting ones come first. num_drafting: R.
        passes: one per module. steps: of drafts 2 … n.
    """

    size: LoopSize
    request_rows: ndarray
    num_drafting: int
    passes: tuple[HostPass, ...]
    steps: StepArrays


@dataclass(frozen=True)
class DraftInputs:
    """`DraftArrays` on the device. request_rows: None of a chain."""

    request_rows: Tensor | None
    num_drafting: int
    passes: tuple[DevicePass, ...]
    steps: Passes


class DraftSection:
    """Places the arrays of a draft loop in the round's arena; a `drafters.loops.base.LoopSection`."""

    def __init__(self, num_modules: int) -> None:
        names = [f"prefill.{m}" for m in range(num_modules)]
        self._requests = Section(Requests, "prefill") if num_modules > 1 else None
        self._batches = [BatchSection(name) for name in names]
        self._rows = [Section(PassRows, name, shared={"requests": "prefill.requests"}) for name in names]
        self._steps = StepSection(num_modules)
        sections = (*self._batches, *self._rows, self._steps, *((self._requests,) if self._requests else ()))
        self.fields = tuple(place for section in sections for place in section.fields)

    def sizes(self, size: LoopSize) -> Sizes:
        sizes = {"prefill.requests": size.rows} | self._steps.sizes(size.rows, size.pages, size.steps)
        for batch in self._batches:
            sizes |= batch.sizes(size.rows, size.tokens, size.pages)
        return sizes

    def values(self, arrays: DraftArrays) -> Arrays:
        found = self._steps.arrays.values(arrays.steps.sent)
        for batch, rows, each in zip(self._batches, self._rows, arrays.passes, strict=True):
            found |= batch.values(each.batch) | rows.values(each)
        return found if self._requests is None else found | self._requests.values(arrays)

    def of(self, arrays: DraftArrays, staged: Staged) -> DraftInputs:
        sections = zip(self._batches, self._rows, arrays.passes, strict=True)
        passes = tuple(
            rows.of(staged.views, DevicePass, metadata=batch.metadata(each.batch, staged))
            for batch, rows, each in sections
        )
        request_rows = None if self._requests is None else self._requests.of(staged.views).request_rows
        return DraftInputs(request_rows, arrays.num_drafting, passes, self._steps.of(arrays.steps.batches, staged))


class _TurnsLoop:
    """The host arrays of a chain, and of M modules."""

    num_modules = 1
    section: DraftSection

    def arrays(self, draft: DraftInput) -> DraftArrays:
        """All arrays of a round."""
        prefill = prefill_arrays(draft)
        steps = step_arrays(draft.drafting, self.num_modules)
        passes = (prefill, *module_passes(prefill, draft, self.num_modules)) if self.num_modules > 1 else (prefill,)
        rows, pages = draft.block_table.shape
        size = LoopSize(rows, len(prefill.token_ids), pages, len(steps.batches) + 1)
        return DraftArrays(size, draft.request_rows, len(draft.num_drafts_next), passes, steps)


class ChainLoop(_TurnsLoop):
    """The draft loop of one head, each draft made from the one before; a `drafters.loops.base.GraphLoop`."""

    name = "chains of drafts"
    num_following = 1

    def __init__(self, head: ChainHead, passes: type[HeadPasses] = HeadPasses) -> None:
        """passes: the kind of the head's passes, as functions of tensors."""
        self.section = DraftSection(1)
        self._head = head
        self._passes = passes

    def run(self, inputs: DraftInputs, runner: GroupRunner, aux: Tensor, choose: Choose) -> Draft:
        """Draft 1 comes from the draft prefill, drafts 2 … n from the head's own output.

        The draft prefill rewrites the head's KV of all accepted positions from the target's true hidden states; what
        the steps write is overwritten by the next one.

        Source: EAGLE-3, arXiv 2503.01840, section 3; SafeAILab/EAGLE eagle/model/cnets.py (topK_genrate, stable_kv).
        """
        modules = (self._head,)
        last = run_prefill(modules, runner, aux, inputs.passes, ())
        return run_steps(modules, runner, last, inputs, choose)

    def fixed_form(
        self, runner: GroupRunner, aux: Tensor, limits: LoopSize, greedy: Greedy, compiler: Compile
    ) -> FixedLoop:
        """See `GraphLoop.fixed_form`."""
        from drafters.loops.fixed_forms import FixedChain  # late: only rounds from graphs need it

        return FixedChain(self._passes(self._head), runner, aux, limits, greedy, compiler)


class ModuleLoop(_TurnsLoop):
    """The draft loop of M modules; a `drafters.loops.base.GraphLoop`, and `CarriesVectors`.

    Layer m of their cache group is module m's. They have one draft vocabulary.
    """

    name = "several multi-token-prediction modules"

    def __init__(self, modules: Sequence[PortedHead], limits: LoopSize) -> None:
        """limits: most requests and drafts, at least two drafts. Modules that make none of the drafts are not run."""
        self.num_modules = self.num_following = min(len(modules), limits.drafts)
        self._modules = modules[: self.num_modules]
        self.section = DraftSection(self.num_modules)
        self._max_requests = limits.rows
        self._carried: Tensor | None = None

    def run(self, inputs: DraftInputs, runner: GroupRunner, aux: Tensor, choose: Choose) -> Draft:
        carried = self.carried(aux)
        last = run_prefill(self._modules, runner, aux, inputs.passes, carried[:, inputs.request_rows])
        carried[:, inputs.request_rows] = torch.stack(last)
        return run_steps(self._modules, runner, last, inputs, choose)

    def fixed_form(
        self, runner: GroupRunner, aux: Tensor, limits: LoopSize, greedy: Greedy, compiler: Compile
    ) -> FixedLoop:
        """See `GraphLoop.fixed_form`; it keeps its own vectors: an engine runs one form or the other."""
        from drafters.loops.fixed_forms import FixedModules

        passes = [MtpPasses(own, self._modules[m - 1]) for m, own in enumerate(self._modules)]
        return FixedModules(passes, runner, aux, limits, greedy, compiler)

    @property
    def carried_shape(self) -> tuple[int, ...]:
        return (self.num_modules - 1, self._modules[0].hidden_size)

    def carried_by(self, request_row: int) -> Tensor:
        """[M-1, H]; the last module's output is not carried."""
        assert self._carried is not None, "no round has run yet"
        return self._carried[:-1, request_row]

    def carry(self, request_row: int, vectors: Tensor) -> None:
        self.carried(vectors)[:-1, request_row] = vectors

    def carried(self, like: Tensor) -> Tensor:
        """[M, requests, H] outputs of each request's last draft prefill, allocated at the first call."""
        if self._carried is None:
            self._carried = like.new_zeros(self.num_modules, self._max_requests, self._modules[0].hidden_size)
        return self._carried


def run_prefill(
    modules: Sequence[ChainHead],
    runner: GroupRunner,
    aux: Tensor,
    passes: Sequence[DevicePass],
    carried: Sequence[Tensor] | Tensor,
) -> list[Tensor]:
    """Run every module over its newly committed rows; overwrites the cache entries of earlier draft steps there.

    Args:
        aux: [T, A·Ht] states of the target's last forward.
        passes: passes of modules 0 … M-1.
        carried: [M, B', H] result of the requests' previous draft prefill; unused, but finite, for new requests. Not
            read where M = 1.

    Returns:
        [B', H] of each module, its output at each request's last committed row: the input of the draft steps, and the
        vectors to carry. Undefined where a request has no such row yet.
    """
    states = aux
    last = []
    for m, (module, each) in enumerate(zip(modules, passes, strict=True)):
        if m > 0:
            states = modules[m - 1].feedback(torch.cat([carried[m - 1], states]))
        hidden = states.index_select(0, each.sources)  # [T_m, H]
        if not len(hidden):  # every request is still too short
            states = hidden
            last.append(carried[m])
            continue
        states = _forward(module, runner, each.metadata, m, each.token_ids, hidden if m else module.fuse(hidden))
        last.append(states.index_select(0, each.last_row))
    return last


def run_steps(
    modules: Sequence[ChainHead],
    runner: GroupRunner,
    last: Sequence[Tensor],
    inputs: DraftInputs,
    choose: Choose,
) -> Draft:
    """Drafts 1 … n of the R drafting requests.

    Args:
        last: result of `run_prefill`.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2 (the recursion); vllm-project/vllm, module index = step mod M.
    """
    count = inputs.num_drafting
    num_modules = len(modules)
    if not count:
        return Draft(inputs.passes[0].token_ids.new_empty(0, 0), None)
    block = last[0][:count, None]  # [R, width, H]
    ids, probs = choose(0, modules[0].logits(block[:, -1]))
    chosen = [probs]
    token_ids = [modules[0].to_target_ids(ids)]
    for step, metadata in enumerate(inputs.steps, 1):
        module, before = modules[step % num_modules], modules[(step - 1) % num_modules]
        if 1 < step <= num_modules:
            block = torch.cat([last[step - 1][:count, None], block], 1)
        width = block.shape[1]
        tokens = token_ids[-1] if width == 1 else torch.stack(token_ids[step - width :], 1).flatten()  # [R·width]
        hidden = before.feedback(block.flatten(0, 1))
        block = _forward(module, runner, metadata, step % num_modules, tokens, hidden).view(count, width, -1)
        ids, probs = choose(step, module.logits(block[:, -1]))
        chosen.append(probs)
        token_ids.append(module.to_target_ids(ids))
    return Draft.of(token_ids, chosen)


def _forward(
    module: ChainHead,
    runner: GroupRunner,
    metadata: CommonAttentionMetadata,
    layer: int,
    tokens: Tensor,
    hidden: Tensor,
) -> Tensor:
    """A module over its own layers in the cache group, which begin at `layer`: tokens [T], hidden [T, H] -> [T, H]."""
    attend: Attend = partial(runner.attend, runner.plan(metadata))
    return module.forward(tokens, hidden, metadata.positions, from_layer(attend, layer) if layer else attend)
