"""How a round gets to the device: the sections of its arrays in a staging arena, their device views, and the one copy.

`RoundTransfer` sends rounds that run operator by operator, `AheadTransfer` rounds of any shape that run from graphs.
(Sections of draft loops are in `drafters/loops/chain.py` and `drafters/loops/steps.py`.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Generic

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from attention.batch.host import HostBatch
from attention.batch.metadata import (
    BatchArrays,
    BatchSection,
    CommonAttentionMetadata,
    GroupArrays,
    MakeSection,
    batch_sizes,
    on_pages,
)
from attention.staging import (
    A,
    Arrays,
    Bucket,
    Field,
    Section,
    Sizes,
    Staged,
    StagingArena,
    array,
    array_names,
    bucket_of,
    layout_of,
)
from drafters.loops.base import (
    AnyLoop,
    CarriedRows,
    LoopArrays,
    LoopSection,
    LoopSize,
    Passes,
    PrefillPasses,
)
from specdec.config import EngineConfig
from specdec.ops.draws import SamplingParameters
from specdec.requests.sampling import SamplingTensors
from specdec.rounds.buckets import group_entries, loop_limits, power_of_two, rounded
from specdec.rounds.drafting import AheadArrays, AheadInputs
from specdec.rounds.randomness import SamplingRound
from specdec.rounds.verification import TargetInputs, VerificationArrays

TARGET = "target"
"""A verification's name in the arena."""
OF_TARGET = {name: f"target.{name}" for name in ("rows", "tokens", "entries", "drafts_plus_1")}
"""Dimensions of a verification by their names in the arena."""


def target_sizes(
    rows: int, tokens: int, pages: int, drafts: int, entries: int | None = None, groups: Sequence[int] = ()
) -> Sizes:
    """Sizes of a verification of at most so many rows, tokens, pages and drafts a row; others: see `batch_sizes`."""
    return batch_sizes(TARGET, rows, tokens, pages, entries, groups) | {OF_TARGET["drafts_plus_1"]: drafts + 1}


class PassesSection:
    """All M passes of a draft prefill.

    Attributes:
        fields: their places; () without a head. num_shared: 1 where the first pass has the verification's lengths.
        bonus: see `PrefillPasses`.
    """

    def __init__(self, passes: PrefillPasses) -> None:
        """The first pass has the verification's lengths, without a bonus token; the others have their own."""
        self.bonus = passes.bonus
        self.num_shared = min(passes.count, 1 - passes.bonus)
        self._first = Section(GroupArrays, "head", ("page_indptr",), OF_TARGET) if self.num_shared else None
        self._own = tuple(BatchSection(f"passes.{m}", table=False) for m in range(self.num_shared, passes.count))
        self._carried = Section(CarriedRows, "passes") if passes.count > 1 else None
        sections = (self._first, *self._own, self._carried)
        self.fields = tuple(field for section in sections if section is not None for field in section.fields)

    def sizes(self, rows: int, tokens: int, pages: int, entries: int | None = None) -> Sizes:
        """Sizes to add to the verification's, for at most so many of its rows, tokens and pages a row.

        A request may be two rows of a pass, see `drafters.loops.prefill.shifted_batch`; but not in a fixed shape,
        which is given by its `entries` on the lists of pages.
        """
        found = {"passes.requests": rows, "passes.tokens": tokens}
        for section in self._own:
            more = tokens + self.bonus * rows
            found |= section.sizes(2 * rows if entries is None else rows, more, pages, entries)
        return found

    def values(self, batches: Sequence[HostBatch], carried: CarriedRows[ndarray] | None) -> Arrays:
        """The arrays of a round of any shape, by their names in the arena."""
        found = {} if self._first is None else self._first.values(batches[0])
        for section, batch in zip(self._own, batches[self.num_shared :], strict=True):
            found |= section.values(batch)
        return found if carried is None or self._carried is None else found | self._carried.values(carried)

    def buffers(
        self, host: Arrays, target: BatchArrays[ndarray]
    ) -> tuple[list[BatchArrays[ndarray]], CarriedRows[ndarray] | None]:
        """Host buffers of every pass, and of the carried rows. target: the verification's."""
        found = [section.buffers(host) for section in self._own]
        if self._first is not None:
            first = self._first.of(host)
            found.insert(0, replace(target, slot_mapping=first.slot_mapping, page_indices=first.page_indices))
        return found, None if self._carried is None else self._carried.of(host)

    def metadata(self, target: CommonAttentionMetadata, batches: Sequence[HostBatch], staged: Staged) -> Passes:
        """The attention of every pass on the device. target: the verification's."""
        own = zip(self._own, batches[self.num_shared :], strict=True)
        passes = tuple(section.metadata(batch, staged) for section, batch in own)
        return passes if self._first is None else (on_pages(target, self._first, batches[0], staged.views), *passes)

    def carried(self, staged: Staged) -> CarriedRows[Tensor] | None:
        """The carried rows on the device; None for one pass."""
        return None if self._carried is None else self._carried.of(staged.views)


@dataclass(frozen=True)
class Uniforms(Generic[A]):
    """Random numbers in [0, 1) of R rows; or, where draws are keyed by position, seeds of their noise alone.

    Attributes:
        accept_uniform: [R, n] of acceptance; next_uniform: [R, n+1] of the token after the accepted drafts.
        draft_uniform: [R, n] of the drafts that the round verifies; ahead_uniform: [R, 2K] of the drafts after it. One
            of the two, see `SamplingRound`.
        seed: [R, n+1] of the drafts and of the token after them; [R, 2K+1] with those of the drafts after the round.
    """

    accept_uniform: A = array(np.float32, "rows", "drafts", optional=True)
    next_uniform: A = array(np.float32, "rows", "drafts_plus_1", optional=True)
    draft_uniform: A = array(np.float32, "rows", "drafts", optional=True)
    ahead_uniform: A = array(np.float32, "rows", "twice", optional=True)
    seed: A = array(np.int64, "rows", "places", optional=True)


@dataclass(frozen=True, kw_only=True)
class DeviceSampling(Uniforms[Tensor]):
    """Sampling parameters and uniforms of a round's rows on the device; tensors: [R]."""

    tensors: SamplingTensors

    def first(self, rows: int) -> DeviceSampling:
        """Views of the first rows."""
        own = {name: x[:rows] for name in array_names(Uniforms) if (x := getattr(self, name)) is not None}
        return DeviceSampling(**own, tensors=self.tensors.first(rows))


@dataclass(frozen=True, kw_only=True)
class DeviceRound(VerificationArrays[Tensor]):
    """One verification on the device.

    Attributes:
        metadata: its attention.
        sampling: None when all rows are greedy, and in rounds from graphs.
    """

    metadata: CommonAttentionMetadata
    sampling: DeviceSampling | None = None


def make_sections(extras: Sequence[Any], fixed: bool) -> list[MakeSection]:
    """See `specdec.rounds.extras.RoundExtra.section`."""
    return [make for extra in extras if (make := extra.section(fixed)) is not None]


class VerificationSection:
    """A verification in the arena: its attention, and the other arrays of its forward and acceptance.

    Attributes:
        batch: its attention's part. own: the other arrays. fields: the places of all.
    """

    def __init__(self, num_groups: int, extras: Sequence[MakeSection], table: bool = True) -> None:
        """num_groups: further cache groups; extras: make their sections; table: with block tables, which a fixed shape
        does not send."""
        self.batch = BatchSection(TARGET, num_groups, extras, table)
        self.own = Section(VerificationArrays, TARGET)
        self.fields = self.batch.fields + self.own.fields

    def values(self, target: TargetInputs) -> Arrays:
        """Its arrays by their names in the arena."""
        return self.batch.values(target.batch) | self.own.values(target)

    def of(self, batch: HostBatch, staged: Staged) -> DeviceRound:
        """A verification with this attention on the device; without sampling."""
        return self.own.of(staged.views, DeviceRound, metadata=self.batch.metadata(batch, staged))


@dataclass(frozen=True, kw_only=True)
class DeviceAhead(AheadArrays[Tensor]):
    """AheadInputs on the device; passes: the attention on the head's pages in each. carried: None of one pass."""

    passes: Passes
    carried: CarriedRows[Tensor] | None


class AheadSection:
    """A draft prefill that is launched before its verification is read; it has a separate arena."""

    def __init__(self, passes: PrefillPasses) -> None:
        self._passes = PassesSection(passes)
        self._own = Section(AheadArrays, "ahead", shared=OF_TARGET)
        self.fields = self._passes.fields + self._own.fields

    def sizes(self, rows: int, tokens: int, pages: int) -> Sizes:
        """Sizes for a verification of at most so many rows, tokens and pages a row."""
        return target_sizes(rows, tokens + self._passes.bonus * rows, pages, 0) | self._passes.sizes(
            rows, tokens, pages
        )

    def values(self, ahead: AheadInputs) -> Arrays:
        """Its arrays by their names in the arena."""
        return self._own.values(ahead) | self._passes.values(ahead.batches, ahead.carried)

    def of(self, ahead: AheadInputs, target: CommonAttentionMetadata, staged: Staged) -> DeviceAhead:
        """The device side; target: the attention of the verification."""
        passes = self._passes.metadata(target, ahead.batches, staged)
        return self._own.of(staged.views, DeviceAhead, passes=passes, carried=self._passes.carried(staged))


class SamplingSection:
    """Sampling parameters and uniforms in the arena."""

    def __init__(self, ahead: bool, keyed: bool = False) -> None:
        """ahead: True for graphs, which need uniforms for the drafts after the round instead of its own drafts. keyed:
        see `EngineConfig.sampling`."""
        self._keyed = keyed
        without = {"draft_uniform" if ahead else "ahead_uniform", "seed"}
        if keyed:
            without = {*array_names(Uniforms)} - {"seed"}
        self._uniforms = Section(Uniforms, "sampling", without, {**OF_TARGET, "drafts": "sampling.drafts"})
        self._parameters = Section(SamplingParameters, "sampling", shared=OF_TARGET)
        self.fields = self._parameters.fields + self._uniforms.fields

    @staticmethod
    def sizes(drafts: int) -> Sizes:
        """Sizes to add to the verification's; drafts: n, or K."""
        return {"sampling.drafts": drafts, "sampling.twice": 2 * drafts, "sampling.places": 2 * drafts + 1}

    def values(self, sampling: SamplingRound) -> Arrays:
        """The arrays of the decided rows and of the drafts that they verify."""
        drafts = sampling.max_drafts
        own = sampling.decided
        if self._keyed:
            uniforms = Uniforms[ndarray](seed=own.seeds(drafts + 1))
        else:
            accept = own.accept_uniforms(drafts)
            following = own.next_uniforms(drafts + 1)
            uniforms = Uniforms(accept, following, sampling.draft_uniforms())
        return self._parameters.values(own.arrays) | self._uniforms.values(uniforms)

    def write(self, sampling: SamplingRound, host: Arrays) -> None:
        """Write all rows into one of the arena's host buffers; padding rows are greedy."""
        count = len(sampling.first)
        places = self._parameters.of(host)
        uniforms = self._uniforms.of(host)
        for name, place in vars(places).items():
            place[:count] = getattr(sampling.arrays, name)
        places.temperature[count:] = 0
        if self._keyed:
            uniforms.seed[:count] = sampling.seeds(uniforms.seed.shape[1])
            return
        uniforms.accept_uniform[:count] = sampling.accept_uniforms(uniforms.accept_uniform.shape[1])
        uniforms.next_uniform[:count] = sampling.next_uniforms(uniforms.next_uniform.shape[1])
        uniforms.ahead_uniform[:count] = sampling.ahead_uniforms(uniforms.ahead_uniform.shape[1])

    def of(self, views: Mapping[str, Tensor], filters: bool) -> DeviceSampling:
        """The device side; filters: whether any row restricts its support."""
        tensors = self._parameters.of(views, SamplingTensors, filters=filters)
        return self._uniforms.of(views, DeviceSampling, tensors=tensors)


Groups = tuple[int, ...]
"""Pages on the list of each of the target's further cache groups."""
_Largest = tuple[list[Field], Bucket]
_BUCKETS = 256
"""Sizes of rounds whose bucket a transfer keeps."""


class RoundTransfer:
    """Sends rounds that run operator by operator: the verification, its sampling and the draft loop.

    Attributes:
        arena: has sent every round, in one copy each.
    """

    def __init__(self, loop: AnyLoop | None, config: EngineConfig, device: torch.device) -> None:
        """loop: the head's draft loop; None without a head."""
        self._section = section = None if loop is None else loop.section
        self._target = _verification(config)
        self._sampling = SamplingSection(False, config.keyed)
        self.arena = StagingArena(*_largest(section, config), device)
        self._bucket = lru_cache(_BUCKETS)(partial(_bucket, section))

    def send(
        self, target: TargetInputs, drafting: LoopArrays | None, sampling: SamplingRound | None
    ) -> tuple[DeviceRound, object | None]:
        """Send a round in one copy.

        Args:
            drafting: arrays of the draft loop that starts from aux hidden states; None without such a loop.
            sampling: None when all rows are greedy.

        Returns:
            The verification, and the arrays of the draft loop, for that loop alone; None without one.
        """
        section = self._section
        size = LoopSize()
        values = self._target.values(target)
        if section is not None and drafting is not None:
            values |= section.values(drafting)
            size = drafting.size
        if sampling is not None:
            values |= self._sampling.values(sampling)
        staged = self.arena.send(self._bucket(*_sizes_of(target.batch, target), size), values)
        device = self._target.of(target.batch, staged)
        if sampling is not None:
            device = replace(device, sampling=self._sampling.of(staged.views, sampling.decided.arrays.filters))
        if section is None or drafting is None:
            return device, None
        return device, section.of(drafting, staged)


class AheadTransfer:
    """Sends rounds of any shape that run from graphs: the verification, then a draft prefill launched before its read.

    The draft prefill is a second copy, because its arrays are made while the device verifies. Sampling and draft steps
    have fixed places, see `fixed.py`.
    """

    def __init__(self, passes: PrefillPasses, config: EngineConfig, device: torch.device) -> None:
        """passes: of the draft prefills that follow."""
        self._target = _verification(config)
        self._section = AheadSection(passes)
        self._verification = StagingArena(*_largest_verification(config), device)
        self._ahead = StagingArena(*_largest_ahead(passes, config), device) if passes.count else None

    @property
    def transfers(self) -> int:
        """Host-to-device copies so far."""
        return self._verification.generation + (0 if self._ahead is None else self._ahead.generation)

    def send(self, target: TargetInputs) -> DeviceRound:
        """Send a verification."""
        bucket = _verification_bucket(*_sizes_of(target.batch, target))
        staged = self._verification.send(bucket, self._target.values(target))
        return self._target.of(target.batch, staged)

    def send_ahead(self, ahead: AheadInputs, verification: DeviceRound) -> DeviceAhead:
        """Send the draft prefill after a verification that was sent."""
        assert self._ahead is not None
        bucket = _ahead_bucket(self._section, _sizes_of(verification.metadata.host, verification)[0])
        staged = self._ahead.send(bucket, self._section.values(ahead))
        return self._section.of(ahead, verification.metadata, staged)


def staging_bytes(loop: AnyLoop | None, config: EngineConfig) -> int:
    """Bytes of the buffers that hold the largest round, run operator by operator or from graphs."""
    ahead = layout_of(*_largest_ahead(PrefillPasses.of(loop), config)).nbytes
    largest = layout_of(*_largest(None if loop is None else loop.section, config)).nbytes
    return max(largest, layout_of(*_largest_verification(config)).nbytes + ahead)


def _largest(section: LoopSection[Any, Any] | None, config: EngineConfig) -> _Largest:
    """Every array that a round may send, and a bucket that every round fits in. section: the draft loop's."""
    limits = loop_limits(config)
    groups = group_entries(config)
    fields = [*_verification(config).fields, *SamplingSection(False, config.keyed).fields]
    return [*fields, *(() if section is None else section.fields)], _bucket(section, limits, groups, limits)


def _largest_verification(config: EngineConfig) -> _Largest:
    """The same for a verification alone."""
    bucket = _verification_bucket(loop_limits(config), group_entries(config))
    return list(_verification(config).fields), bucket


def _verification(config: EngineConfig) -> VerificationSection:
    return VerificationSection(len(config.windowed), make_sections(config.extras, False))


def _largest_ahead(passes: PrefillPasses, config: EngineConfig) -> _Largest:
    """The same for a draft prefill that is launched before its verification is read."""
    section = AheadSection(passes)
    return list(section.fields if passes.count else ()), _ahead_bucket(section, loop_limits(config))


def _sizes_of(batch: HostBatch, target: VerificationArrays[Any]) -> tuple[LoopSize, Groups]:
    """Sizes of a verification; batch: its attention."""
    pages = batch.block_table.shape[1]
    drafts = target.logit_index.shape[1] - 1
    groups = tuple([len(group.page_indices) for group in batch.other_groups])
    return LoopSize(len(batch.seq_lens), len(batch.positions), pages, drafts), groups


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


def _sizes(target: LoopSize, groups: Groups) -> Sizes:
    size = rounded(target)
    most = tuple(map(power_of_two, groups))
    return target_sizes(size.rows, size.tokens, size.pages, size.drafts, groups=most)
