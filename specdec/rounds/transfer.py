"""RoundTransfer, AheadTransfer: send a round's arrays to the device in one copy, by way of a staging arena."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from attention.batch.staging import Bucket, StagingArena, bucket_of, layout_of
from attention.declared import Field
from drafters.loops.base import DraftLoop, LoopArrays, LoopSection, LoopSize
from specdec.config import EngineConfig
from specdec.rounds.buckets import group_entries, loop_limits, power_of_two, rounded
from specdec.rounds.drafting import AheadInputs
from specdec.rounds.extras import make_sections
from specdec.rounds.fields import (
    AheadSection,
    DeviceAhead,
    DeviceRound,
    SamplingSection,
    VerificationSection,
    target_sizes,
)
from specdec.rounds.randomness import SamplingRound
from specdec.rounds.verification import TargetInputs

Groups = tuple[int, ...]
"""Pages on the list of each of the target's further cache groups."""
_BUCKETS = 256
"""Sizes of rounds whose bucket a transfer keeps."""


@dataclass(frozen=True)
class SentRound:
    """One round on the device.

    Attributes:
        verification: the next target forward's side.
        draft: the draft loop's arrays, for that loop alone; None when no row drafts or continues its prompt.
    """

    verification: DeviceRound
    draft: object | None


class RoundTransfer:
    """Sends rounds that run operator by operator: the verification, its sampling and the draft loop."""

    def __init__(self, loop: DraftLoop[Any, Any] | None, config: EngineConfig, device: torch.device) -> None:
        """loop: of the head; None without one."""
        self._section = section = None if loop is None else loop.section
        self._target, self._sampling = _verification(config), SamplingSection(ahead=False)
        self._arena = StagingArena(*_largest(section, config), device)
        self._bucket = lru_cache(_BUCKETS)(partial(_bucket, section))

    @property
    def transfers(self) -> int:
        """Host-to-device copies so far."""
        return self._arena.generation

    def send(self, target: TargetInputs, drafting: LoopArrays | None, sampling: SamplingRound | None) -> SentRound:
        """Send a round in one copy.

        Args:
            drafting: of the draft loop that starts from aux hidden states; None without one.
            sampling: None when all rows are greedy.
        """
        section, size, values = self._section, LoopSize(), self._target.values(target)
        if section is not None and drafting is not None:
            values |= section.values(drafting)
            size = drafting.size
        if sampling is not None:
            values |= self._sampling.values(sampling)
        staged = self._arena.send(self._bucket(*_sizes_of(target), size), values)
        device = self._target.of(target.batch, staged)
        if sampling is not None:
            device = replace(device, sampling=self._sampling.of(staged.views, sampling.decided.arrays.filters))
        if section is None or drafting is None:
            return SentRound(device, None)
        return SentRound(device, section.of(drafting, staged))


class AheadTransfer:
    """Sends rounds of any shape that run from graphs: the verification, then a draft prefill launched before its read.

    The draft prefill is a second copy, because its arrays are made while the device verifies. Sampling and draft steps
    have fixed places, see `static.py`.
    """

    def __init__(self, num_modules: int, config: EngineConfig, device: torch.device) -> None:
        """num_modules: M of the loop whose draft prefills follow; 0 where none do."""
        self._target, self._section = _verification(config), AheadSection(num_modules)
        self._verification = StagingArena(*_largest_verification(config), device)
        self._ahead = StagingArena(*_largest_ahead(num_modules, config), device) if num_modules else None

    @property
    def transfers(self) -> int:
        """Host-to-device copies so far."""
        return self._verification.generation + (0 if self._ahead is None else self._ahead.generation)

    def send(self, target: TargetInputs) -> SentRound:
        """Send a verification."""
        staged = self._verification.send(_verification_bucket(*_sizes_of(target)), self._target.values(target))
        return SentRound(self._target.of(target.batch, staged), None)

    def send_ahead(self, target: TargetInputs, ahead: AheadInputs, verification: DeviceRound) -> DeviceAhead:
        """Send the draft prefill after a verification that was sent."""
        assert self._ahead is not None
        bucket = _ahead_bucket(self._section, _sizes_of(target)[0])
        staged = self._ahead.send(bucket, self._section.values(ahead))
        return self._section.of(ahead, verification.metadata, staged)


def staging_bytes(loop: DraftLoop[Any, Any] | None, config: EngineConfig) -> int:
    """Bytes of the buffers that hold the largest round, run operator by operator or from graphs."""
    ahead = layout_of(*_largest_ahead(0 if loop is None else loop.num_modules, config)).nbytes
    largest = layout_of(*_largest(None if loop is None else loop.section, config)).nbytes
    return max(largest, layout_of(*_largest_verification(config)).nbytes + ahead)


def _largest(section: LoopSection[Any, Any] | None, config: EngineConfig) -> tuple[list[Field], Bucket]:
    """Every array that a round may send, and a bucket that every round fits in. section: of the draft loop."""
    limits, groups = loop_limits(config), group_entries(config)
    fields = [*_verification(config).fields, *SamplingSection(ahead=False).fields]
    return [*fields, *(() if section is None else section.fields)], _bucket(section, limits, groups, limits)


def _largest_verification(config: EngineConfig) -> tuple[list[Field], Bucket]:
    """The same of a verification alone."""
    bucket = _verification_bucket(loop_limits(config), group_entries(config))
    return list(_verification(config).fields), bucket


def _verification(config: EngineConfig) -> VerificationSection:
    return VerificationSection(len(config.windowed), make_sections(config.extras, False))


def _largest_ahead(num_modules: int, config: EngineConfig) -> tuple[list[Field], Bucket]:
    """The same of a draft prefill that is launched before its verification is read."""
    section = AheadSection(num_modules)
    return list(section.fields if num_modules else ()), _ahead_bucket(section, loop_limits(config))


def _sizes_of(target: TargetInputs) -> tuple[LoopSize, Groups]:
    batch = target.batch
    size = LoopSize.of(batch, target.logit_index.shape[1] - 1)
    return size, tuple([len(group.page_indices) for group in batch.other_groups])


@lru_cache(_BUCKETS)
def _verification_bucket(target: LoopSize, groups: Groups) -> Bucket:
    """Capacities for a verification of these sizes. Like all buckets, rounded up to powers of two."""
    return bucket_of(**_sizes(target, groups))


def _ahead_bucket(section: AheadSection, target: LoopSize) -> Bucket:
    size = rounded(target)
    return bucket_of(**section.sizes(size.rows, size.tokens, size.pages))


def _bucket(section: LoopSection[Any, Any] | None, target: LoopSize, groups: Groups, drafting: LoopSize) -> Bucket:
    sizes = _sizes(target, groups) | SamplingSection.sizes(target.drafts)
    return bucket_of(**(sizes if section is None else sizes | section.sizes(rounded(drafting))))


def _sizes(target: LoopSize, groups: Groups) -> dict[str, int]:
    size = rounded(target)
    most = tuple(map(power_of_two, groups))
    return target_sizes(size.rows, size.tokens, size.pages, size.drafts, groups=most)
