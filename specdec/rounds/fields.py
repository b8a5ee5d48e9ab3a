"""The sections of the round's staging arena: each holds its fields, what is sent, and the views of what arrived.

(A draft loop's section is the loop's own: `drafters/loops/chain/staged.py`, `drafters/loops/modules/staged.py`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from attention.batch.host import HostBatch
from attention.batch.metadata import (
    STATE_FIELDS,
    BatchBuffers,
    CommonAttentionMetadata,
    batch_arrays,
    batch_fields,
    batch_sizes,
    from_staged,
)
from attention.batch.staging import Field, Staged
from attention.recurrence.index import StateIndex
from drafters.loops.base import CarriedRows
from specdec.requests.sampling import SamplingTensors
from specdec.rounds.ahead import AheadInputs
from specdec.rounds.passes import LaterPassesSection
from specdec.rounds.randomness import SamplingRound
from specdec.rounds.verification import TargetInputs


@dataclass(frozen=True)
class DeviceSampling:
    """SamplingRound on the device."""

    tensors: SamplingTensors
    draft_uniform: torch.Tensor
    accept_uniform: torch.Tensor
    next_uniform: torch.Tensor


@dataclass(frozen=True)
class StaticSampling:
    """The sampling parameters of a round's rows in fixed places, R the most rows there can be; greedy beyond its own.

    Attributes:
        tensors: [R]. accept_uniform: [R, K]; next_uniform: [R, K+1]. ahead_uniform: [R, 2K], of the drafts after it.
    """

    tensors: SamplingTensors
    accept_uniform: torch.Tensor
    next_uniform: torch.Tensor
    ahead_uniform: torch.Tensor

    def first(self, rows: int) -> StaticSampling:
        """Views of the first rows."""
        tensors = self.tensors.first(rows)
        return StaticSampling(tensors, self.accept_uniform[:rows], self.next_uniform[:rows], self.ahead_uniform[:rows])


@dataclass(frozen=True)
class DeviceRound:
    """One verification on the device.

    Attributes:
        metadata, token_ids, draft_places, draft_sources, logits_indices, logit_index, num_drafts: see TargetInputs.
        sources: [R] int64 rows of the drafts, see TargetArrays; None where they are in order.
        sampling: None when all rows are greedy, and in rounds from graphs.
        rope_positions: see TargetInputs; None where they are the batch's.
    """

    metadata: CommonAttentionMetadata
    token_ids: torch.Tensor
    draft_places: torch.Tensor
    draft_sources: torch.Tensor
    logits_indices: torch.Tensor
    logit_index: torch.Tensor
    num_drafts: torch.Tensor
    sources: torch.Tensor | None
    sampling: DeviceSampling | None
    rope_positions: torch.Tensor | None = None


@dataclass(frozen=True)
class VerificationBuffers:
    """One host buffer of a verification beside its batch, whole; see TargetInputs."""

    token_ids: np.ndarray
    draft_places: np.ndarray
    draft_sources: np.ndarray
    logits_indices: np.ndarray
    logit_index: np.ndarray
    num_drafts: np.ndarray
    sources: np.ndarray


class VerificationSection:
    """A verification in the arena."""

    _batch = tuple(batch_fields("target"))
    _own = (
        Field("target.token_ids", np.int64, ("target.tokens",)),
        Field("target.draft_places", np.int64, ("target.tokens",)),
        Field("target.draft_sources", np.int64, ("target.tokens",)),
        Field("target.logits_indices", np.int64, ("target.tokens",)),
        Field("target.logit_index", np.int64, ("target.rows", "target.drafts_plus_1")),
        Field("target.num_drafts", np.int64, ("target.rows",)),
        Field("target.sources", np.int64, ("target.rows",)),
    )
    _names = ("token_ids", "draft_places", "draft_sources", "logits_indices", "logit_index", "num_drafts")
    fields = (*_batch, *_own)
    static_fields = (*(field for field in _batch if field.name != "target.block_table"), *_own)
    """Without the block table: what a fixed shape sends."""
    rope_field = Field("target.rope_positions", np.int64, ("target.tokens",))
    """Beside `fields`, for a longrope target."""

    @staticmethod
    def dimensions(rows: int, tokens: int, pages: int, drafts: int) -> dict[str, int]:
        """Sizes for at most so many rows, tokens, pages a row and drafts a row."""
        return batch_sizes("target", rows, tokens, pages) | {"target.drafts_plus_1": drafts + 1}

    @staticmethod
    def static_dimensions(rows: int, query_len: int, page_entries: int) -> dict[str, int]:
        """Sizes of `static_fields`."""
        sizes = VerificationSection.dimensions(rows, rows * query_len, 0, query_len - 1)
        return sizes | {"target.rows_times_pages": page_entries}

    @classmethod
    def values(cls, target: TargetInputs) -> dict[str, np.ndarray]:
        """What is sent."""
        arrays = batch_arrays("target", target.batch)
        arrays |= {f"target.{name}": getattr(target, name) for name in cls._names}
        if target.rope_positions is not None:
            arrays[cls.rope_field.name] = target.rope_positions
        return arrays if target.sources is None else arrays | {"target.sources": target.sources}

    @classmethod
    def views(cls, target: TargetInputs, staged: Staged) -> DeviceRound:
        """What arrived; greedy."""
        own = {name: staged[f"target.{name}"] for name in cls._names}
        sources = None if target.sources is None else staged["target.sources"]
        rope = None if target.rope_positions is None else staged[cls.rope_field.name]
        return DeviceRound(
            from_staged("target", target.batch, staged), **own, sources=sources, sampling=None, rope_positions=rope
        )

    @classmethod
    def static_views(cls, batch: HostBatch, staged: Staged, num_drafts: int) -> DeviceRound:
        """What arrived where the fields have the very shape; num_drafts: places for drafts in all rows."""
        own = {name: staged[f"target.{name}"] for name in cls._names}
        for name in ("draft_places", "draft_sources"):
            own[name] = own[name][:num_drafts]
        metadata = from_staged("target", batch, staged)
        return DeviceRound(metadata, **own, sources=staged["target.sources"], sampling=None)

    @staticmethod
    def buffers(host: Mapping[str, np.ndarray]) -> tuple[BatchBuffers, VerificationBuffers]:
        """The fields in one of the arena's host buffers."""
        own = VerificationBuffers(**{f.name: host[f"target.{f.name}"] for f in fields(VerificationBuffers)})
        return BatchBuffers.of("target", host), own

    @staticmethod
    def states(host: Mapping[str, np.ndarray], most_replayed: int) -> StateIndex:
        """Those of `state_fields` in one of the arena's host buffers."""
        views = {name: host[f"target.states.{name}"] for name in STATE_FIELDS}
        return StateIndex(**views, most_replayed=most_replayed)


class HeadPagesSection:
    """What a verification needs of the head's pages, so that the draft prefill can run right after it."""

    fields = (
        Field("head.slot_mapping", np.int64, ("target.tokens",)),
        Field("head.page_indices", np.int32, ("target.rows_times_pages",)),
    )

    @staticmethod
    def buffers(host: Mapping[str, np.ndarray], target: BatchBuffers) -> BatchBuffers:
        """The verification's buffers with the head's slots and pages."""
        return replace(target, slot_mapping=host["head.slot_mapping"], page_indices=host["head.page_indices"])

    @staticmethod
    def metadata(target: CommonAttentionMetadata, staged: Staged, host: HostBatch) -> CommonAttentionMetadata:
        """A verification's attention on the head's pages: same rows and lengths, other slots."""
        return replace(
            target,
            host=host,
            block_table=None,
            slot_mapping=staged["head.slot_mapping"],
            page_indices=staged["head.page_indices"],
            other_groups=(),
        )


@dataclass(frozen=True)
class DeviceAhead:
    """AheadInputs on the device; passes: the attention on the head's pages in each. carried: None of one pass."""

    passes: tuple[CommonAttentionMetadata, ...]
    token_ids: torch.Tensor
    token_sources: torch.Tensor
    last_row: torch.Tensor
    decided_place: torch.Tensor
    carried: CarriedRows | None


class AheadSection:
    """A draft prefill that is launched before its verification is read, in the arena."""

    _own = (
        Field("ahead.token_ids", np.int64, ("target.tokens",)),
        Field("ahead.token_sources", np.int64, ("target.tokens",)),
        Field("ahead.last_row", np.int64, ("target.rows",)),
        Field("ahead.decided_place", np.int64, ("target.rows",)),
    )
    _names = ("token_ids", "token_sources", "last_row", "decided_place")

    def __init__(self, num_passes: int) -> None:
        """num_passes: M of the head's loop; 0 without one."""
        self._later = LaterPassesSection(num_passes)
        self.fields = (*HeadPagesSection.fields, *self._own, *self._later.fields) if num_passes else ()

    def dimensions(self, rows: int, tokens: int, pages: int) -> dict[str, int]:
        """Sizes beside those of the verification, for at most so many rows, tokens and pages a row."""
        return self._later.dimensions(rows, tokens, pages)

    def values(self, ahead: AheadInputs) -> dict[str, np.ndarray]:
        """What is sent."""
        first = ahead.batches[0]
        pages = {"head.slot_mapping": first.slot_mapping, "head.page_indices": first.page_indices}
        own = {f"ahead.{name}": getattr(ahead, name) for name in self._names}
        return pages | own | self._later.values(ahead)

    def views(self, ahead: AheadInputs, target: CommonAttentionMetadata, staged: Staged) -> DeviceAhead:
        """What arrived; target: the attention of the verification."""
        first, *later = ahead.batches
        return DeviceAhead(
            passes=(HeadPagesSection.metadata(target, staged, first), *self._later.metadata(later, staged)),
            carried=self._later.carried(staged),
            **{name: staged[f"ahead.{name}"] for name in self._names},
        )


_PARAMS = tuple(
    Field(f"sampling.{name}", dtype, ("target.rows",))
    for name, dtype in (("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32), ("min_p", np.float32))
)
_DECIDED = (
    Field("sampling.accept_uniform", np.float32, ("target.rows", "sampling.drafts")),
    Field("sampling.next_uniform", np.float32, ("target.rows", "target.drafts_plus_1")),
)


class SamplingSection:
    """Sampling parameters and uniforms of the decided rows, with those of the drafts that they verify, in the arena."""

    fields = (*_PARAMS, *_DECIDED, Field("sampling.draft_uniform", np.float32, ("target.rows", "sampling.drafts")))

    @staticmethod
    def dimensions(drafts: int) -> dict[str, int]:
        """Sizes beside those of the verification."""
        return {"sampling.drafts": drafts}

    @staticmethod
    def values(sampling: SamplingRound) -> dict[str, np.ndarray]:
        """What is sent."""
        drafts, params = sampling.max_drafts, sampling.decided
        return {field.name: getattr(params.arrays, field.name.removeprefix("sampling.")) for field in _PARAMS} | {
            "sampling.draft_uniform": sampling.draft_uniforms(),
            "sampling.accept_uniform": params.accept_uniforms(drafts),
            "sampling.next_uniform": params.next_uniforms(drafts + 1),
        }

    @staticmethod
    def views(sampling: SamplingRound, staged: Staged) -> DeviceSampling:
        """What arrived."""
        return DeviceSampling(
            tensors=SamplingTensors(sampling.decided.arrays.filters, *(staged[field.name] for field in _PARAMS)),
            draft_uniform=staged["sampling.draft_uniform"],
            accept_uniform=staged["sampling.accept_uniform"],
            next_uniform=staged["sampling.next_uniform"],
        )


class StaticSamplingSection:
    """The same of all rows of a round, in fixed places, with the uniforms of the drafts *after* that round."""

    fields = (*_PARAMS, *_DECIDED, Field("sampling.ahead_uniform", np.float32, ("target.rows", "sampling.twice")))

    @staticmethod
    def dimensions(rows: int, drafts: int) -> dict[str, int]:
        """Sizes for so many rows and K."""
        return {
            "target.rows": rows,
            "target.drafts_plus_1": drafts + 1,
            "sampling.drafts": max(drafts, 1),
            "sampling.twice": max(2 * drafts, 1),
        }

    @staticmethod
    def write(sampling: SamplingRound, host: Mapping[str, np.ndarray]) -> None:
        """Into one of the arena's host buffers; rows that are not there are greedy."""
        count = len(sampling.first)
        for field in _PARAMS:
            host[field.name][:count] = getattr(sampling.arrays, field.name.removeprefix("sampling."))
        host["sampling.temperature"][count:] = 0
        accept, following, ahead = (host[f"sampling.{name}_uniform"] for name in ("accept", "next", "ahead"))
        accept[:count] = sampling.accept_uniforms(accept.shape[1])
        following[:count] = sampling.next_uniforms(following.shape[1])
        ahead[:count] = sampling.ahead_uniforms(ahead.shape[1])

    @staticmethod
    def views(staged: Staged) -> StaticSampling:
        """What arrived."""
        return StaticSampling(
            tensors=SamplingTensors(True, *(staged[field.name] for field in _PARAMS)),
            accept_uniform=staged["sampling.accept_uniform"],
            next_uniform=staged["sampling.next_uniform"],
            ahead_uniform=staged["sampling.ahead_uniform"],
        )
