"""What runs on the device in a round, launch by launch: the transfer, the draft loop, and the verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from attention.batch.staging import StagingArena
from attention.runner import GroupRunner
from drafters.base import Head
from drafters.loops.chain.run import Draft, draft_chain
from drafters.mtp.stack import MtpStack
from specdec.acceptance.judge import DraftVocab, choose_greedy, choose_sampled, fill_drafts, in_order, judge
from specdec.config import EngineConfig
from specdec.execution.readback import HostReads
from specdec.execution.verification import Verification
from specdec.rounds.fields import largest_bucket, round_bucket, round_fields
from specdec.rounds.transfer import DeviceRound, send_round
from specdec.rounds.verification import DraftArrays, SamplingRound, TargetArrays, Verified
from specdec.target.target import Target


@dataclass(frozen=True)
class Drafter:
    """A head and the cache group it drafts on."""

    head: Head
    runner: GroupRunner

    @property
    def num_modules(self) -> int:
        """M: modules that take turns, see `drafters.mtp.stack`; 1 for any other head."""
        return self.head.num_modules if isinstance(self.head, MtpStack) else 1


class Executor(Protocol):
    """The device's part of a round. `round_` is whatever `send` returned; only the executor looks inside."""

    @property
    def transfers(self) -> int:
        """Host-to-device copies of ours so far."""

    @property
    def reads(self) -> HostReads:
        """What starts and finishes the rounds' device-to-host reads."""

    def verified(self, verified: Verified, round_: Any) -> Verified:
        """A verification after its commit, with the token rows where the executor put them."""

    def send(self, draft: DraftArrays | None, target: TargetArrays, sampling: SamplingRound | None) -> Any:
        """Lay out a round and send it; `draft` is None when no draft loop starts from tapped states."""

    def draft(self, round_: Any, tapped: torch.Tensor) -> Draft | None:
        """Launch the draft loop that was sent; None when the round has none."""

    def verify(self, round_: Any, draft: Draft | None) -> Verification:
        """Launch the target forward and the judgement of its logits, and start reading the result."""


class EagerExecutor:
    """Launches one operator after the other."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: EngineConfig,
        model: Callable[..., Any] | None = None,
    ) -> None:
        """model: the target in another form, see `Target.forward`."""
        self.target = target
        self.model = model
        self.drafter = drafter
        self.arena = StagingArena(round_fields(), largest_bucket(config), target.hf_model.device)
        self.reads = HostReads(config.max_num_seqs * 2 * (config.num_speculative_tokens + 1), target.hf_model.device)
        self._vocab = self._draft_vocab()

    @property
    def transfers(self) -> int:
        """See `Executor.transfers`."""
        return self.arena.generation

    def verified(self, verified: Verified, round_: DeviceRound) -> Verified:
        """As it is."""
        return verified

    def send(self, draft: DraftArrays | None, target: TargetArrays, sampling: SamplingRound | None) -> DeviceRound:
        """Everything of a round in one host-to-device copy."""
        return send_round(draft, target, sampling, self.arena, round_bucket(draft, target))

    def draft(self, round_: DeviceRound, tapped: torch.Tensor) -> Draft | None:
        """See `Executor.draft`."""
        if round_.first is None or self.drafter is None:
            return None
        sampling = round_.sampling
        choose = choose_greedy if sampling is None else choose_sampled(sampling, len(sampling.draft_uniform))
        return draft_chain(self.drafter.head, self.drafter.runner, tapped, round_.first, round_.steps, choose)

    def verify(self, round_: DeviceRound, draft: Draft | None) -> Verification:
        """See `Executor.verify`."""
        planned = self.target.runner.plan(round_.metadata)
        draft = in_order(draft, round_)
        output = self.target.forward(fill_drafts(round_, draft), planned, round_.judged_rows, self.model)
        return Verification(self.reads.start(self.judge(output.logits, round_, draft)), output.tapped)

    def judge(self, logits: torch.Tensor, round_: DeviceRound, draft: Draft | None) -> torch.Tensor:
        """logits [R', V] of the judged rows -> the packed verdict."""
        return judge(logits, round_, draft, self._vocab)

    def _draft_vocab(self) -> DraftVocab | None:
        if self.drafter is None:
            return None
        ids = torch.arange(self.drafter.head.draft_vocab_size, device=self.target.hf_model.device)
        return DraftVocab(self.drafter.head.to_target_ids(ids), self.target.vocab_size)
