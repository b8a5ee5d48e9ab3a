"""What of a request's round is on the device besides pages: read when it leaves an engine, put back where it goes on.

The drafts for its next verification, with the distribution that they were drawn from; the vectors that a draft loop
carries from round to round; and the states of recurrent layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from attention.recurrence.index import NULL_SLOT
from attention.recurrence.runner import StateRunner
from drafters.loops.base import CarriesVectors, Draft
from specdec.acceptance.judge import DraftVocab
from specdec.requests.moved import Arrival


@dataclass(frozen=True)
class Arrived:
    """A request that joins a round: its RowTable row, what it has brought, and how many of its drafts are verified."""

    row: int
    arrival: Arrival
    num_drafts: int


def slot_of(row: int) -> int:
    """The slot of a row's recurrent states, see `attention.recurrence.index.slots_of_rows`."""
    return row + 1 + NULL_SLOT


def packed(row: int, states: StateRunner | None, loop: object) -> dict[str, torch.Tensor]:
    """Copies, on the device, of what a row carries from round to round."""
    found: dict[str, torch.Tensor] = {}
    if isinstance(loop, CarriesVectors):
        found["carried"] = loop.carried_by(row).clone()
    if states is not None:
        found |= {f"state.{i}": tensor.clone() for i, tensor in enumerate(states.of_slot(slot_of(row)))}
    return found


def unpack(row: int, tensors: Mapping[str, torch.Tensor], states: StateRunner | None, loop: object) -> None:
    """Put back what `packed` gave in another engine of the model, for a row of this one."""
    if isinstance(loop, CarriesVectors) and "carried" in tensors:
        loop.carry(row, tensors["carried"])
    if states is not None:
        for i, own in enumerate(states.of_slot(slot_of(row))):
            own.copy_(tensors[f"state.{i}"])


def drafts_of(draft: Draft, place: int, count: int) -> dict[str, torch.Tensor]:
    """Copies, on the device, of one row's drafts and of what they were drawn from."""
    found = {"drafts": draft.token_ids[place, :count].clone()}
    if draft.probs is not None:
        found["draft_probs"] = draft.probs[place, :count].clone()
    return found


def joined(draft: Draft | None, arrived: Sequence[Arrived], width: int, vocab: DraftVocab, drawn: bool) -> Draft:
    """The drafts of a round, in order: of the draft loop's rows, then of those that have brought theirs.

    Args:
        draft: what the loop made; None or without rows where no row drafted here.
        width: n, the most drafts of a row. drawn: whether the round has distributions of its drafts.

    Returns:
        token_ids [R, n], and probs [R, n, Vd] where `drawn`; a draft that was not drawn there has all of the mass.
    """
    device, own = vocab.target_ids.device, 0 if draft is None else len(draft.token_ids)
    ids = torch.zeros(own + len(arrived), width, dtype=torch.int64, device=device)
    probs = ids.new_zeros(*ids.shape, len(vocab.target_ids), dtype=torch.float32) if drawn else None
    if draft is not None and own:
        ids[:own, : draft.token_ids.shape[1]] = draft.token_ids
        if probs is not None and draft.probs is not None:
            probs[:own, : draft.probs.shape[1]] = draft.probs
    for place, one in enumerate(arrived, own):
        tokens = one.arrival.tensors["drafts"][: one.num_drafts].to(device)
        ids[place, : one.num_drafts] = tokens
        if probs is not None:
            given = one.arrival.tensors.get("draft_probs")
            mass = (
                (tokens[:, None] == vocab.target_ids).float() if given is None else given[: one.num_drafts].to(device)
            )
            probs[place, : one.num_drafts] = mass
    return Draft(ids, probs)
