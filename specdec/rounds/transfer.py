"""A round's arrays on their way to the device: one copy for the verification, its sampling and the draft loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attention.batch.staging import Bucket, Field, StagingArena, bucket_of, layout_of
from drafters.loops.base import DraftInput, DraftLoop, LoopSize
from specdec.config import EngineConfig
from specdec.rounds.ahead import AheadInputs
from specdec.rounds.buckets import loop_limits, rounded
from specdec.rounds.fields import AheadSection, DeviceAhead, DeviceRound, SamplingSection, VerificationSection
from specdec.rounds.randomness import SamplingRound
from specdec.rounds.verification import TargetArrays


@dataclass(frozen=True)
class SentRound:
    """One round on the device.

    Attributes:
        verification: the next target forward's side.
        draft: what the loop's `views` gave; only that loop looks inside. None where no row drafts or goes on reading.
        ahead: the draft prefill after it; None where that is not launched before the read.
    """

    verification: DeviceRound
    draft: object | None
    ahead: DeviceAhead | None


class RoundTransfer:
    """Lays out rounds in one arena and sends each in one host-to-device copy."""

    def __init__(self, loop: DraftLoop[Any, Any] | None, config: EngineConfig, device: torch.device) -> None:
        """loop: of the head; None without one."""
        self._loop = loop
        self._sections = _Sections(loop)
        self._arena = StagingArena(*self._sections.largest(config), device)

    @property
    def transfers(self) -> int:
        """Host-to-device copies so far."""
        return self._arena.generation

    def send(
        self,
        draft: DraftInput | None,
        target: TargetArrays,
        sampling: SamplingRound | None,
        ahead: AheadInputs | None = None,
    ) -> SentRound:
        """Send everything of a round.

        Args:
            draft: None when no draft loop starts from aux hidden states.
            ahead: the draft prefill after the verification, where it is launched before the read.
        """
        loop, inputs = self._loop, target.inputs
        values = VerificationSection.values(inputs)
        arrays = None if draft is None or loop is None else loop.arrays(draft)
        if loop is not None and arrays is not None:
            values |= loop.values(arrays)
        if sampling is not None:
            values |= SamplingSection.values(sampling)
        if ahead is not None:
            values |= self._sections.ahead.values(ahead)
        size = LoopSize(len(target.start), target.num_tokens, target.block_table.shape[1], target.max_drafts)
        drafting = LoopSize() if arrays is None else arrays.size
        prefill = LoopSize() if ahead is None else size
        staged = self._arena.send(self._sections.bucket(rounded(size), rounded(prefill), rounded(drafting)), values)
        device = VerificationSection.views(inputs, staged)
        if sampling is not None:
            device = replace(device, sampling=SamplingSection.views(sampling, staged))
        drafted = None if loop is None or arrays is None else loop.views(arrays, staged)
        after = None if ahead is None else self._sections.ahead.views(ahead, device.metadata, staged)
        return SentRound(device, drafted, after)


class _Sections:
    """What a round may send, with this draft loop or without one."""

    def __init__(self, loop: DraftLoop[Any, Any] | None) -> None:
        self._loop = loop
        self.ahead = AheadSection(0 if loop is None else loop.num_modules)

    def largest(self, config: EngineConfig) -> tuple[list[Field], Bucket]:
        """Every array that a round may send, and a bucket that every round fits in."""
        limits = rounded(loop_limits(config))
        fields = [*VerificationSection.fields, *SamplingSection.fields, *self.ahead.fields]
        return [*fields, *(() if self._loop is None else self._loop.fields)], self.bucket(limits, limits, limits)

    def bucket(self, target: LoopSize, ahead: LoopSize, draft: LoopSize) -> Bucket:
        """A bucket for a verification, the draft prefill ahead of its read, and a draft loop of these sizes."""
        sizes = VerificationSection.dimensions(target.rows, target.tokens, target.pages, target.drafts)
        sizes |= SamplingSection.dimensions(target.drafts)
        sizes |= self.ahead.dimensions(ahead.rows, ahead.tokens, ahead.pages)
        return bucket_of(**(sizes if self._loop is None else sizes | self._loop.dimensions(draft)))


def staging_bytes(loop: DraftLoop[Any, Any] | None, config: EngineConfig) -> int:
    """Bytes of one buffer that holds the largest round."""
    return layout_of(*_Sections(loop).largest(config)).nbytes
