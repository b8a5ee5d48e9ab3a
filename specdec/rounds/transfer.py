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
        self._arena = StagingArena(*_largest(loop, config), device)

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
            values |= AheadSection.values(ahead)
        size = LoopSize(len(target.start), target.num_tokens, target.block_table.shape[1], target.max_drafts)
        drafting = LoopSize() if arrays is None else arrays.size
        staged = self._arena.send(_bucket(loop, rounded(size), rounded(drafting)), values)
        device = VerificationSection.views(inputs, staged)
        if sampling is not None:
            device = replace(device, sampling=SamplingSection.views(sampling, staged))
        drafted = None if loop is None or arrays is None else loop.views(arrays, staged)
        return SentRound(device, drafted, None if ahead is None else AheadSection.views(ahead, device.metadata, staged))


def staging_bytes(loop: DraftLoop[Any, Any] | None, config: EngineConfig) -> int:
    """Bytes of one buffer that holds the largest round."""
    return layout_of(*_largest(loop, config)).nbytes


def _largest(loop: DraftLoop[Any, Any] | None, config: EngineConfig) -> tuple[list[Field], Bucket]:
    """Every array that a round may send, and a bucket that every round fits in."""
    limits = rounded(loop_limits(config))
    fields = [*VerificationSection.fields, *SamplingSection.fields]
    fields += [] if loop is None else [*AheadSection.fields, *loop.fields]
    return fields, _bucket(loop, limits, limits)


def _bucket(loop: DraftLoop[Any, Any] | None, target: LoopSize, draft: LoopSize) -> Bucket:
    sizes = VerificationSection.dimensions(target.rows, target.tokens, target.pages, target.drafts)
    sizes |= SamplingSection.dimensions(target.drafts)
    return bucket_of(**(sizes if loop is None else sizes | loop.dimensions(draft)))
