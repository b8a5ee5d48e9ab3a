"""A round's arrays on their way to the device in one copy, in an arena of the sections that such rounds send."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attention.batch.staging import Bucket, StagingArena, bucket_of, layout_of
from attention.declared import Field
from drafters.loops.base import DraftInput, DraftLoop, LoopSize
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
from specdec.rounds.verification import TargetArrays

Groups = tuple[int, ...]
"""Pages on the list of each of the target's further cache groups."""


@dataclass(frozen=True)
class SentRound:
    """One round on the device.

    Attributes:
        verification: the next target forward's side.
        draft: what the loop's `views` gave; only that loop looks inside. None where no row drafts or goes on reading.
    """

    verification: DeviceRound
    draft: object | None


class RoundTransfer:
    """Sends rounds that run operator by operator: the verification, its sampling and the draft loop."""

    def __init__(self, loop: DraftLoop[Any, Any] | None, config: EngineConfig, device: torch.device) -> None:
        """loop: of the head; None without one."""
        self._loop, self._target, self._sampling = loop, _verification(config), SamplingSection(ahead=False)
        self._arena = StagingArena(*_largest(loop, config), device)

    @property
    def transfers(self) -> int:
        """Host-to-device copies so far."""
        return self._arena.generation

    def send(self, draft: DraftInput | None, target: TargetArrays, sampling: SamplingRound | None) -> SentRound:
        """Send everything of a round in one copy; `draft` is None when no draft loop starts from aux hidden states."""
        loop = None if draft is None else self._loop
        arrays = None if draft is None or loop is None else loop.arrays(draft)
        values = self._target.values(target.inputs)
        if loop is not None:
            values |= loop.section.values(arrays)
        if sampling is not None:
            values |= self._sampling.values(sampling)
        drafting = LoopSize() if arrays is None else arrays.size
        bucket = _bucket(self._loop, rounded(_size_of(target)), rounded(drafting), _groups_of(target))
        staged = self._arena.send(bucket, values)
        device = self._target.of(target.inputs.batch, staged)
        if sampling is not None:
            device = replace(device, sampling=self._sampling.of(staged.views, sampling.decided.arrays.filters))
        return SentRound(device, None if loop is None else loop.section.of(arrays, staged))


class AheadTransfer:
    """Sends rounds of any shape that run from graphs: the verification, then the draft prefill that follows it unread.

    That is a copy of its own, so that its arrays are made while the device verifies. Sampling and draft steps stand in
    fixed places, see `static.py`.
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

    def send(self, target: TargetArrays) -> SentRound:
        """Send a verification."""
        bucket = bucket_of(**_sizes(rounded(_size_of(target)), _groups_of(target)))
        staged = self._verification.send(bucket, self._target.values(target.inputs))
        return SentRound(self._target.of(target.inputs.batch, staged), None)

    def send_ahead(self, target: TargetArrays, ahead: AheadInputs, verification: DeviceRound) -> DeviceAhead:
        """Send the draft prefill after a verification that was sent."""
        assert self._ahead is not None
        bucket = _ahead_bucket(self._section, rounded(_size_of(target)))
        staged = self._ahead.send(bucket, self._section.values(ahead))
        return self._section.of(ahead, verification.metadata, staged)


def staging_bytes(loop: DraftLoop[Any, Any] | None, config: EngineConfig) -> int:
    """Bytes of the buffers that hold the largest round, run operator by operator or from graphs."""
    ahead = layout_of(*_largest_ahead(0 if loop is None else loop.num_modules, config)).nbytes
    return max(layout_of(*_largest(loop, config)).nbytes, layout_of(*_largest_verification(config)).nbytes + ahead)


def _largest(loop: DraftLoop[Any, Any] | None, config: EngineConfig) -> tuple[list[Field], Bucket]:
    """Every array that a round may send, and a bucket that every round fits in."""
    limits, groups = rounded(loop_limits(config)), _most_in_groups(config)
    fields = [*_verification(config).fields, *SamplingSection(ahead=False).fields]
    return [*fields, *(() if loop is None else loop.section.fields)], _bucket(loop, limits, limits, groups)


def _largest_verification(config: EngineConfig) -> tuple[list[Field], Bucket]:
    """The same of a verification alone."""
    bucket = bucket_of(**_sizes(rounded(loop_limits(config)), _most_in_groups(config)))
    return list(_verification(config).fields), bucket


def _verification(config: EngineConfig) -> VerificationSection:
    return VerificationSection(len(config.windowed), make_sections(config.extras, False))


def _largest_ahead(num_modules: int, config: EngineConfig) -> tuple[list[Field], Bucket]:
    """The same of a draft prefill that is launched before its verification is read."""
    section = AheadSection(num_modules)
    return list(section.fields if num_modules else ()), _ahead_bucket(section, rounded(loop_limits(config)))


def _ahead_bucket(section: AheadSection, size: LoopSize) -> Bucket:
    return bucket_of(**section.sizes(size.rows, size.tokens, size.pages))


def _size_of(target: TargetArrays) -> LoopSize:
    return LoopSize(len(target.start), target.num_tokens, target.pages.target.shape[1], target.max_drafts)


def _groups_of(target: TargetArrays) -> Groups:
    """Pages on the list of each further cache group, rounded up to powers of two."""
    return tuple(power_of_two(len(group.page_indices)) for group in target.inputs.batch.other_groups)


def _most_in_groups(config: EngineConfig) -> Groups:
    return tuple(power_of_two(entries) for entries in group_entries(config))


def _sizes(target: LoopSize, groups: Groups) -> dict[str, int]:
    return target_sizes(target.rows, target.tokens, target.pages, target.drafts, groups=groups)


def _bucket(loop: DraftLoop[Any, Any] | None, target: LoopSize, draft: LoopSize, groups: Groups) -> Bucket:
    sizes = _sizes(target, groups) | SamplingSection.sizes(target.drafts)
    return bucket_of(**(sizes if loop is None else sizes | loop.section.sizes(draft)))
