"""What a row's next round needs from the device besides pages: read when a request leaves an engine, put back in
another.

These are the drafts for its next verification, with the distribution they were drawn from; the vectors that a draft
loop carries from round to round; and the states of recurrent layers. Where rounds run operator by operator a
distribution is probabilities ("draft_probs"); from graphs it is the head's logits and the statistics of its filters
("draft_logits", "draft_stats"): those are what the acceptance reads, and half of the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from drafters.checkpoints.tensor_files import StateDict
from drafters.loops.base import CarriesVectors, Draft
from specdec.acceptance.judge import Drafted, DraftVocab
from specdec.engine.engine import Engine
from specdec.execution.base import Round
from specdec.execution.eager import draft_vocab
from specdec.execution.sampled import SampledDrafts
from specdec.extensions.handoff.moved import Arrival, Tensors
from specdec.ops.draws import Filtered
from specdec.requests.sampling import SamplingParams

if TYPE_CHECKING:
    from attention.recurrence.runner import StateRunner


@dataclass(frozen=True)
class Arrived:
    """A request that joins a round: row, tokens read, what it brought, and how many of its drafts are verified."""

    row: int
    computed: int
    arrival: Arrival
    num_drafts: int
    params: SamplingParams


@dataclass(frozen=True)
class RowTensors(ABC):
    """What rows carry from round to round besides pages: read where a request leaves, put back where it goes on.

    States, and vectors of a draft loop, are the same in every executor; how drafts are kept depends on it.
    """

    states: StateRunner | None
    loop: Any
    device: torch.device

    def pack(self, row: int, computed: int, drafts: bool) -> StateDict:
        """What the request in a RowTable row carries from round to round, copied on the device.

        computed: its tokens that were read; none of them are drafts. drafts: whether its drafts were made.
        """
        found = {}
        if drafts and isinstance(self.loop, CarriesVectors):
            found["carried"] = self.loop.carried_by(row).clone()
        if self.states is not None:
            found |= {f"state.{i}": tensor for i, tensor in enumerate(self.states.of_row(row, computed))}
        return found

    def refuses(self, tensors: Tensors) -> str:
        """Why such tensors cannot be taken over; "" when they can."""
        expected = {}
        if isinstance(self.loop, CarriesVectors) and "drafts" in tensors:
            expected["carried"] = self.loop.carried_shape
        if self.states is not None:
            expected |= {f"state.{i}": shape for i, shape in enumerate(self.states.moved_shapes)}
        given = {name: tuple(t.shape) for name, t in tensors.items() if not name.startswith("draft")}
        return "" if given == expected else f"it brings tensors {given}, and this engine takes {expected}"

    def unpack(self, row: int, computed: int, tensors: Tensors) -> None:
        """Put the tensors that `pack` returned in another engine of the model into a row of this engine."""
        if isinstance(self.loop, CarriesVectors) and "carried" in tensors:
            self.loop.carry(row, tensors["carried"].to(self.device))
        if self.states is not None:
            given = [tensors[f"state.{i}"] for i in range(len(self.states.states))]
            self.states.put_row(row, computed, given)

    @abstractmethod
    def drafts_of(self, draft: Draft, place: int, count: int, sampled: bool) -> StateDict:
        """Copies, on the device, of one row's first drafts and, for a sampled row, of their distribution."""

    def places(self, taken: np.ndarray, count: int) -> np.ndarray | None:
        """Places of drafts for `count` arriving rows, where this engine's rows have those `taken`; None: after them."""
        return None

    def receive(self, round_: Round, draft: Drafted, arrived: Sequence[Arrived]) -> Drafted:
        """Put what requests have brought into their rows; returns the drafts of the whole round.

        round_: sent; its last drafting rows are the arrived rows with drafts. draft: drafts of the other rows.
        """
        for one in arrived:
            self.unpack(one.row, one.computed, one.arrival.tensors)
        drafting = [one for one in arrived if one.num_drafts]
        return self._with_drafts(round_, draft, drafting) if drafting else draft

    @abstractmethod
    def _with_drafts(self, round_: Round, draft: Drafted, arrived: Sequence[Arrived]) -> Drafted:
        """As `receive`, once their rows have all but the drafts; each of `arrived` has some."""


@dataclass(frozen=True)
class EagerTensors(RowTensors):
    """`RowTensors` of rounds that run operator by operator.

    vocab: the head's; draws: whether drafts of sampled rows are drawn from its distribution.
    """

    vocab: DraftVocab | None
    draws: bool

    def drafts_of(self, draft: Draft, place: int, count: int, sampled: bool) -> StateDict:
        found = {"drafts": draft.token_ids[place, :count].clone()}
        if sampled and draft.probs is not None:
            found["draft_probs"] = draft.probs[place, :count].clone()
        return found

    def _with_drafts(self, round_: Round, draft: Drafted, arrived: Sequence[Arrived]) -> Drafted:
        if self.vocab is None:
            return draft
        drawn = self.draws and round_.sent is not None and round_.sent.sampling is not None
        return joined(draft, arrived, round_.target.max_drafts, self.vocab, drawn)


@dataclass(frozen=True)
class GraphTensors(RowTensors):
    """`RowTensors` of rounds that run from CUDA graphs: drafts lie in buffers that the graphs read.

    drawn: distributions of the drafts of sampled rows; None if none are drawn.
    """

    drawn: SampledDrafts | None

    def drafts_of(self, draft: Draft, place: int, count: int, sampled: bool) -> StateDict:
        found = {"drafts": draft.token_ids[place, :count].clone()}
        return found | self.drawn.kept(place, count) if sampled and self.drawn is not None else found

    def places(self, taken: np.ndarray, count: int) -> np.ndarray | None:
        """See `RowTensors.places`: rows of the buffer of drafts that no row of the next round was drafted in."""
        return np.setdiff1d(np.arange(len(self.loop.drafts)), taken)[:count]

    def _with_drafts(self, round_: Round, draft: Drafted, arrived: Sequence[Arrived]) -> Draft:
        sources = round_.target.sources
        assert sources is not None
        for place, one in zip(sources[-len(arrived) :].tolist(), arrived, strict=True):
            tensors = {name: tensor.to(self.device) for name, tensor in one.arrival.tensors.items()}
            self.loop.drafts[place, : one.num_drafts] = tensors["drafts"][: one.num_drafts]
            if self.drawn is not None and not one.params.greedy:
                self.drawn.keep(place, tensors, one.num_drafts, one.params.temperature)
        return Draft(self.loop.drafts, None)

    def refuses(self, tensors: Tensors) -> str:
        half = self.drawn is not None and self.drawn.in_half_precision
        if half and "draft_probs" in tensors:
            return (
                "drafts drawn without CUDA graphs cannot be verified from graphs in half precision, which would round "
                "their distribution; load both models with cuda_graphs=True, or both with False"
            )
        return super().refuses(tensors)


def row_tensors(engine: Engine) -> RowTensors:
    """Access to the rows' tensors for the engine's executor."""
    target = engine.target
    drafter = engine.drafter
    buffers = engine.executor.draft_buffers
    device = target.hf_model.device
    if buffers is not None:
        return GraphTensors(target.states, buffers.loop, device, buffers.drawn)
    loop, vocab = (None, None) if drafter is None else (drafter.loop, draft_vocab(drafter, target))
    return EagerTensors(target.states, loop, device, vocab, engine.config.draws_drafts)


def joined(draft: Drafted, arrived: Sequence[Arrived], width: int, vocab: DraftVocab, drawn: bool) -> Draft:
    """The drafts of a round [R, n], in order: of the draft loop's rows, then of the arrived rows.

    draft: what the loop made; None or without rows where no row drafted here. width: n, the most drafts of a row.
    drawn: whether the round has distributions; then probs [R, n, Vd], one-hot of drafts that were not drawn.
    """
    device = vocab.target_ids.device
    own = 0 if draft is None else len(draft.token_ids)
    ids = torch.zeros(own + len(arrived), width, dtype=torch.int64, device=device)
    probs = ids.new_zeros(*ids.shape, len(vocab.target_ids), dtype=torch.float32) if drawn else None
    if draft is not None and own:
        ids[:own, : draft.token_ids.shape[1]] = draft.token_ids
        if probs is not None and draft.probs is not None:
            probs[:own, : draft.probs.shape[1]] = draft.probs
    for place, one in enumerate(arrived, own):
        tensors = {name: tensor[: one.num_drafts].to(device) for name, tensor in one.arrival.tensors.items()}
        ids[place, : one.num_drafts] = tensors["drafts"]
        if probs is not None:
            probs[place, : one.num_drafts] = _mass(tensors, one.params, vocab)
    return Draft(ids, probs)


def _mass(tensors: Tensors, params: SamplingParams, vocab: DraftVocab) -> Tensor:
    """[n, Vd] float32, what a request's drafts were drawn from."""
    if params.greedy or not {"draft_probs", "draft_logits"} & set(tensors):
        return (tensors["drafts"][:, None] == vocab.target_ids).float()
    if "draft_probs" in tensors:
        return tensors["draft_probs"]
    stats = tensors["draft_stats"]
    temperature, min_p = (stats.new_full((len(stats),), x) for x in (params.temperature, params.min_p))
    return Filtered(stats).probs(tensors["draft_logits"], temperature, min_p)
