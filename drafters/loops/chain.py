"""The chain of drafts: a draft prefill over the target's true hidden states, then steps of one token a row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from attention.runner import GroupRunner
from drafters.base import Head
from drafters.loops.base import Choose, Compile, Draft, Greedy, LoopSize
from drafters.loops.chain_arrays import ChainInputs, ChainSection, chain_arrays
from drafters.loops.chain_passes import FixedChain, HeadPasses


class ChainLoop:
    """The draft loop of one head, each draft made from the one before; a `drafters.loops.base.GraphLoop`."""

    name = "chains of drafts"
    num_modules = 1
    num_following = 1
    arrays = staticmethod(chain_arrays)

    def __init__(self, head: Head, passes: Callable[[], HeadPasses] | None = None) -> None:
        """passes: makes the head's passes, as functions of tensors; default `HeadPasses`."""
        self.section = ChainSection()
        self._head = head
        self._passes = passes or (lambda: HeadPasses(head))

    def run(self, inputs: ChainInputs, runner: GroupRunner, aux: torch.Tensor, choose: Choose) -> Draft:
        """Draft 1 comes from the draft prefill, drafts 2 … n from the head's own output.

        The draft prefill rewrites the head's KV of all accepted positions from the target's true hidden states; what
        the steps write is overwritten by the next one.

        Source: EAGLE-3, arXiv 2503.01840, section 3; SafeAILab/EAGLE eagle/model/cnets.py (topK_genrate, stable_kv).
        """
        head, prefill = self._head, inputs.prefill
        hidden = head.fuse(aux.index_select(0, prefill.sources))  # [T', H]
        attend = partial(runner.attend, runner.plan(prefill.metadata))
        x = head.forward(prefill.token_ids, hidden, prefill.metadata.positions, attend)
        if not len(prefill.last_row):  # no row drafts
            return Draft(prefill.token_ids.new_empty(0, 0), None)
        x = x.index_select(0, prefill.last_row)
        ids, probs = choose(0, head.logits(x))
        chosen, token_ids = [probs], [head.to_target_ids(ids)]
        for step, metadata in enumerate(inputs.steps, 1):
            attend = partial(runner.attend, runner.plan(metadata))
            x = head.forward(token_ids[-1], head.feedback(x), metadata.positions, attend)
            ids, probs = choose(step, head.logits(x))
            chosen.append(probs)
            token_ids.append(head.to_target_ids(ids))
        return Draft.of(token_ids, chosen)

    def fixed_form(
        self, runner: GroupRunner, aux: torch.Tensor, limits: LoopSize, greedy: Greedy, compiler: Compile
    ) -> FixedChain:
        return FixedChain(self._passes(), runner, aux, limits, greedy, compiler)
