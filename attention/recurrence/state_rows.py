"""StateRows: the rows of one launch as the recurrences' kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.cached import cached_property
from attention.recurrence.index import StateArrays

_SHORT = 16
"""Inputs of a row that decodes, or of a short chunk."""


@dataclass(frozen=True, kw_only=True)
class StateRows(StateArrays[Tensor]):
    """The rows of one launch on the device: `StateArrays` and their tokens.

    Attributes:
        query_start_loc: [B+1] int32, row r's tokens are query_start_loc[r] … query_start_loc[r+1]-1.
        max_query_len, max_replay: most tokens and most replayed inputs of a row, or more: they may shape a launch.
    """

    query_start_loc: Tensor
    max_query_len: int
    max_replay: int

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """What kernels read of the rows, in the order of their arguments."""
        return self.query_start_loc, self.slots, self.start, self.replay, self.num_new

    @cached_property
    def committed(self) -> tuple[Padded, ...]:
        """The inputs that go into the stored states: replayed ones, then committed tokens. Short rows apart from long
        ones, so that those that decode are not padded to a prompt's length."""
        long = self.replay + self.num_new > _SHORT
        stored = self.num_new > 0
        groups = (members.nonzero()[:, 0] for members in (stored & ~long, stored & long))
        return tuple(padded(self, members, self.replay, self.num_new) for members in groups if len(members))

    @cached_property
    def kept(self) -> Padded:
        """The inputs after `committed`, of rows that have any: drafts, and replayed ones that are not stored."""
        counts = self.query_start_loc[1:] - self.query_start_loc[:-1] - self.num_new
        members = (counts > 0).nonzero()[:, 0]
        replay = torch.where(self.num_new > 0, 0, self.replay)
        return padded(self, members, replay, counts, self.num_new)

    @cached_property
    def fresh(self) -> Tensor:
        """[B] bool, rows that begin with zeros."""
        return self.start == self.replay


@dataclass(frozen=True)
class Padded:
    """Inputs of some rows side by side, [B', L]: for each, where it is and where it comes from. All int64.

    Attributes:
        members: [B'] which rows. length: L.
        token_row, token_column: [n] places of the inputs that are tokens of the launch; tokens: [n] which.
        ring_row, ring_column: [m] places of those that are in the ring; ring_slot: [m] its slot;
        ring_position, token_position: the positions of both.
    """

    members: Tensor
    length: int
    token_row: Tensor
    token_column: Tensor
    tokens: Tensor
    token_position: Tensor
    token_slot: Tensor
    ring_row: Tensor
    ring_column: Tensor
    ring_slot: Tensor
    ring_position: Tensor

    def gathered(self, x: Tensor, ring: Tensor | None = None) -> Tensor:
        """x [T, …] of the launch and ring [slots, R, …] -> [B', L, …] float32, zeros where a row has no more."""
        out = x.new_zeros((len(self.members), self.length, *x.shape[1:]), dtype=torch.float32)
        out[self.token_row, self.token_column] = x[self.tokens].float()
        if ring is not None and len(self.ring_row):
            kept = ring[self.ring_slot, self.ring_position % ring.shape[1]]
            out[self.ring_row, self.ring_column] = kept.float()
        return out

    def scatter(self, values: Tensor, out: Tensor) -> None:
        """values [B', L, …] of the launch's tokens into out [T, …]."""
        out[self.tokens] = values[self.token_row, self.token_column].to(out.dtype)

    def keep(self, x: Tensor, ring: Tensor) -> None:
        """Write the launch's tokens x [T, …] into the ring [slots, R, …]."""
        ring[self.token_slot, self.token_position % ring.shape[1]] = x[self.tokens].to(ring.dtype)


def padded(rows: StateRows, members: Tensor, replay: Tensor, count: Tensor, first: Tensor | None = None) -> Padded:
    """For these rows, `replay` [B] inputs before `start` from the ring, then `count` [B] tokens from `first` [B] on.

    Reads lengths on the host, which waits for a GPU, as only an oracle may.
    """
    replay = replay[members].long()
    count = count[members].long()
    start = rows.start[members].long()
    slots = rows.slots[members].long()
    begin = rows.query_start_loc[members].long()
    lens = replay + count
    most = int(lens.max()) if len(lens) else 0
    offset = -replay if first is None else first[members].long() - replay
    columns = torch.arange(most, device=replay.device)
    inside = columns < lens[:, None]
    is_ring = columns < replay[:, None]
    token_row, token_column = (inside & ~is_ring).nonzero(as_tuple=True)
    offsets = token_column + offset[token_row]
    ring_row, ring_column = (inside & is_ring).nonzero(as_tuple=True)
    return Padded(
        members=members,
        length=most,
        token_row=token_row,
        token_column=token_column,
        tokens=begin[token_row] + offsets,
        token_position=start[token_row] + offsets,
        token_slot=slots[token_row],
        ring_row=ring_row,
        ring_column=ring_column,
        ring_slot=slots[ring_row],
        ring_position=(start - replay)[ring_row] + ring_column,
    )
