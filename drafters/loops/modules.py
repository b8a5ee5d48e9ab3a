"""The draft loop of several multi-token-prediction modules: module s mod M makes draft s+1.

One vector a request and module stays on the device between rounds, see `drafters.loops.module_arrays`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from attention.batch.metadata import CommonAttentionMetadata
from attention.runner import GroupRunner
from drafters.base import Head
from drafters.loops.base import Choose, Compile, Draft, DraftInput, Greedy, LoopSize, paged_attend
from drafters.loops.chain_arrays import DevicePass
from drafters.loops.module_arrays import ModuleArrays, ModuleInputs, ModuleSection, module_arrays
from drafters.loops.module_passes import FixedModules, ModulePasses


class ModuleStack(Protocol):
    """M modules over one target; layer m of their cache group is module m's. They have one draft vocabulary."""

    hidden_size: int

    @property
    def num_modules(self) -> int:
        """M."""

    def module(self, step: int) -> Head:
        """The module that makes draft step+1."""

    def passes(self, num_modules: int) -> Sequence[ModulePasses]:
        """The passes of the first `num_modules` modules, which take turns, as functions of tensors."""


class ModuleLoop:
    """The draft loop of a stack of modules; a `drafters.loops.base.GraphLoop`, and `CarriesVectors`."""

    name = "several multi-token-prediction modules"

    def __init__(self, stack: ModuleStack, limits: LoopSize) -> None:
        """limits: most requests and drafts, at least two drafts. Modules that make none of the drafts are not run."""
        self._stack = stack
        self.num_modules = self.num_following = min(stack.num_modules, limits.drafts)
        self.section = ModuleSection(self.num_modules, limits.drafts)
        self._max_requests = limits.rows
        self._carried: torch.Tensor | None = None

    def arrays(self, draft: DraftInput) -> ModuleArrays:
        return module_arrays(draft, self.num_modules)

    def run(self, inputs: ModuleInputs, runner: GroupRunner, aux: torch.Tensor, choose: Choose) -> Draft:
        carried = self.carried(aux)
        last = module_prefill(self._stack, runner, aux, inputs.passes, carried[:, inputs.request_rows])
        carried[:, inputs.request_rows] = last
        if not inputs.num_drafting:
            return Draft(inputs.request_rows.new_empty(0, 0), None)
        return draft_modules(self._stack, runner, last[:, : inputs.num_drafting], inputs.steps, choose)

    def fixed_form(
        self, runner: GroupRunner, aux: torch.Tensor, limits: LoopSize, greedy: Greedy, compiler: Compile
    ) -> FixedModules:
        """See `GraphLoop.fixed_form`; it keeps its own vectors: an engine runs one form or the other."""
        return FixedModules(self._stack.passes(self.num_modules), runner, aux, limits, greedy, compiler)

    @property
    def carried_shape(self) -> tuple[int, ...]:
        return (self.num_modules - 1, self._stack.hidden_size)

    def carried_by(self, request_row: int) -> torch.Tensor:
        """[M-1, H]; the last module's output is not carried."""
        assert self._carried is not None, "no round has run yet"
        return self._carried[:-1, request_row]

    def carry(self, request_row: int, vectors: torch.Tensor) -> None:
        self.carried(vectors)[:-1, request_row] = vectors

    def carried(self, like: torch.Tensor) -> torch.Tensor:
        """[M, requests, H] outputs of each request's last draft prefill, allocated at the first call."""
        if self._carried is None:
            self._carried = like.new_zeros(self.num_modules, self._max_requests, self._stack.hidden_size)
        return self._carried


def module_prefill(
    stack: ModuleStack, runner: GroupRunner, aux: torch.Tensor, passes: Sequence[DevicePass], carried: torch.Tensor
) -> torch.Tensor:
    """Run every module over its newly committed rows; overwrites the cache entries of earlier draft steps there.

    Args:
        aux: [T, H] states of the target's last forward after its final norm.
        passes: passes of modules 0 … M-1.
        carried: [M, B', H] result of the requests' previous draft prefill; unused, but finite, for new requests.

    Returns:
        [M, B', H] each module's output at each request's last committed row: the input of the draft steps, and the
        vectors to carry. Undefined where a request has no such row yet.
    """
    states, last = aux, []
    for m, each in enumerate(passes):
        module = stack.module(m)
        if m > 0:
            states = stack.module(m - 1).feedback(torch.cat([carried[m - 1], states]))
        hidden = states.index_select(0, each.sources)  # [T_m, H]
        if not len(hidden):  # every request is still too short
            states = hidden
            last.append(carried[m])
            continue
        attend = paged_attend(runner, runner.plan(each.metadata), m)
        states = module.forward(each.token_ids, hidden, each.metadata.positions, attend)
        last.append(states.index_select(0, each.last_row))
    return torch.stack(last)


def draft_modules(
    stack: ModuleStack,
    runner: GroupRunner,
    last: torch.Tensor,
    steps: Sequence[CommonAttentionMetadata],
    choose: Choose,
) -> Draft:
    """Drafts 1 … n of R requests.

    Args:
        last: [M, R, H] result of `module_prefill` for the drafting requests.
        steps: attention of drafts 2 … n, see `drafters.loops.module_arrays.module_step`.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2 (the recursion); vllm-project/vllm, module index = step mod M.
    """
    count, hidden_size = last.shape[1:]
    ids, probs = choose(0, stack.module(0).logits(last[0]))
    chosen, token_ids = [probs], [stack.module(0).to_target_ids(ids)]
    block = last.new_empty(count, 0, hidden_size)
    for step, metadata in enumerate(steps, 1):
        module, before = stack.module(step), stack.module(step - 1)
        if step <= stack.num_modules:
            block = torch.cat([last[step - 1][:, None], block], 1)
        width = block.shape[1]
        tokens = torch.stack(token_ids[step - width :], 1)  # [R, width]
        attend = paged_attend(runner, runner.plan(metadata), step % stack.num_modules)
        hidden = before.feedback(block.flatten(0, 1))
        block = module.forward(tokens.flatten(), hidden, metadata.positions, attend).view(count, width, -1)
        ids, probs = choose(step, module.logits(block[:, -1]))
        chosen.append(probs)
        token_ids.append(module.to_target_ids(ids))
    return Draft.of(token_ids, chosen)
