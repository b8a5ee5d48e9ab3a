"""EagerExecutor: runs a round operator by operator: the transfer, the draft loop, the verification."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.loops.base import Choose, DraftInput
from specdec.acceptance.judge import (
    Drafted,
    DraftVocab,
    choose_greedy,
    choose_keyed,
    choose_sampled,
    fill_drafts,
    filled_drafts,
    in_order,
    judge,
)
from specdec.acceptance.packed import PackedResult
from specdec.config import EngineConfig
from specdec.execution.base import Drafter, Round, Verification
from specdec.execution.readback import HostReads
from specdec.rounds.extras import Decision, RoundExtra, adjusted, limited, noted, read_early, rewritten
from specdec.rounds.randomness import SamplingRound
from specdec.rounds.transfer import RoundTransfer
from specdec.rounds.verification import TargetArrays
from specdec.wrapped.target import Target


class EagerExecutor:
    """`Executor` that launches one operator after the other, with any draft loop."""

    draft_buffers = None
    """See `Executor.draft_buffers`."""

    def __init__(self, target: Target, drafter: Drafter | None, config: EngineConfig) -> None:
        self.target = target
        self._draws = config.draws_drafts
        self._keys = config.keys_drafts
        self._extras = config.extras
        self._adjusting = [extra for extra in self._extras if type(extra).adjust is not RoundExtra.adjust]
        self.drafter = drafter
        device = target.hf_model.device
        self.transfers = 0
        self._transfer = RoundTransfer(None if drafter is None else drafter.loop, config, device)
        most = PackedResult.numel(config.max_num_seqs, config.num_speculative_tokens)
        self.reads = HostReads(most, device, target.group)
        self._vocab = None if drafter is None else draft_vocab(drafter, target)

    def send(self, draft: DraftInput | None, target: TargetArrays, sampling: SamplingRound | None) -> Round:
        """Make a round's arrays and send them in one copy; sampling parameters only if a sampled row is decided."""
        if sampling is not None and not sampling.decided.arrays.any_sampled:
            sampling = None
        drafting = None if draft is None or self.drafter is None else self.drafter.loop.arrays(draft)
        sent, drafting = self._transfer.send(target.inputs, drafting, sampling)
        self.transfers += 1
        return Round(target, sent, None, drafting)

    def draft(self, round_: Round, aux_hidden_states: Tensor) -> Drafted:
        sent = round_.sent
        drafter = self.drafter
        if sent is None or round_.drafting is None or drafter is None:
            return None
        sampling = sent.sampling
        vocab = self._vocab
        rows = round_.target.num_drafting - round_.target.num_arrived
        choose: Choose = choose_greedy
        if sampling is not None and self._draws:
            choose = choose_sampled(sampling, rows)
        elif sampling is not None and self._keys and vocab is not None:
            choose = choose_keyed(sampling, rows, vocab.target_ids)
        if vocab is not None and any(round_.target.extras):
            choose = limited(self._extras, round_.target.extras, choose, vocab.target_ids, vocab.size)
        return drafter.loop.run(round_.drafting, drafter.runner, aux_hidden_states, choose)

    def verify(self, round_: Round, draft: Drafted) -> Verification:
        device = round_.sent
        assert device is not None
        planned = self.target.runner.plan(device.metadata)
        if device.sources is not None:
            draft = in_order(draft, device)
        if draft is not None and self.target.group.size > 1:
            self.target.group.share(draft.token_ids)
        token_ids = fill_drafts(device, draft)
        if round_.target.given is not None:
            draft = filled_drafts(device, token_ids, draft)
        extras = round_.target.extras
        early = read_early(self._extras, extras, lambda: draft) if any(extras) else None
        output = self.target.forward(token_ids, planned, device.logits_indices)
        logits = output.logits
        notes: tuple[Tensor, ...] = ()
        if self._adjusting:
            logits = adjusted(self._adjusting, logits, device)
        if any(extras):
            logits = rewritten(self._extras, extras, logits, device, early)
        result = judge(logits, device, draft, self._vocab)
        if any(extras):
            notes = noted(self._extras, extras, Decision(output.logits, logits, device.logit_index, result.tokens))
        read = self.reads.start(result, device.num_drafts, notes)
        return Verification(read, output.aux_hidden_states)


def draft_vocab(drafter: Drafter, target: Target) -> DraftVocab:
    """The head's vocabulary, on the target's device."""
    ids = torch.arange(drafter.head.draft_vocab_size, device=target.hf_model.device)
    return DraftVocab(drafter.head.to_target_ids(ids), target.vocab_size)
