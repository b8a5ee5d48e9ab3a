"""The memory of recurrent states: one slot for each row of the row table, and the null slot.

Not pages: a state has one size however long the row is. A row's slot is its own while it runs; who takes the row next
begins with zeros (`StateIndex.replay`), so nothing is cleared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.recurrence.index import FoldRule
from attention.recurrence.layer_spec import ConvSpec, DeltaSpec, RecurrenceSpec, bytes_per_row, fold_rule


@dataclass(frozen=True)
class StateGroup:
    """All recurrent calls of a model, in the order of a forward, and how many rows keep states.

    num_slots: rows, the null slot included. num_drafts: K, the most drafts of a row; the rings hold a round's drafts
    and the inputs that it replays.
    """

    specs: tuple[RecurrenceSpec, ...]
    num_slots: int
    num_drafts: int

    @property
    def rule(self) -> FoldRule:
        """When states are stored."""
        return fold_rule(self.specs, self.num_drafts)

    def bytes_per_row(self, dtype: torch.dtype) -> int:
        """Bytes of one slot over all layers, for a model of this dtype."""
        return bytes_per_row(self.specs, self.num_drafts, dtype)


@dataclass(frozen=True)
class ConvState:
    """A convolution's inputs by position, ring [slots, R, C] in the model's dtype."""

    ring: torch.Tensor


@dataclass(frozen=True)
class DeltaRing:
    """Inputs of the gated delta rule: k [slots, R, Hk, Dk], v [slots, R, Hv, Dv] in the model's dtype; g [slots, R, Hv]
    or [slots, R, Hv, Dk] and beta [slots, R, Hv] float32."""

    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True)
class ScanRing:
    """Inputs of a scan: Mamba2's x [slots, R, H, P], B [slots, R, G, N], dt [slots, R, H]; Mamba1's x [slots, R, C], B
    [slots, R, N], dt [slots, R, C]. x and B in the model's dtype, dt float32."""

    x: torch.Tensor
    B: torch.Tensor
    dt: torch.Tensor


@dataclass(frozen=True)
class RecurrentState:
    """A state, float32 [slots, Hv, Dv, Dk], [slots, H, P, N] or [slots, C, N], and the ring of its inputs."""

    state: torch.Tensor
    ring: DeltaRing | ScanRing


CallState = ConvState | RecurrentState


def tensors_of(state: CallState) -> list[torch.Tensor]:
    """Every tensor of a call's state, including its ring."""
    found = []
    for value in vars(state).values():
        found += [value] if isinstance(value, torch.Tensor) else list(vars(value).values())
    return found


def allocate_states(group: StateGroup, dtype: torch.dtype, device: torch.device) -> tuple[CallState, ...]:
    """Zeros for every call of a group; float32 states whatever the model's dtype.

    In half precision a state would be rounded once a round, and rounds with drafts are other rounds.
    """
    states: list[CallState] = []
    for spec in group.specs:
        shapes = spec.shapes(group.rule, dtype).items()
        made = {name: torch.zeros((group.num_slots, *dims), dtype=kind, device=device) for name, (dims, kind) in shapes}
        if isinstance(spec, ConvSpec):
            states.append(ConvState(**made))
        else:
            ring = DeltaRing if isinstance(spec, DeltaSpec) else ScanRing
            states.append(RecurrentState(made.pop("state"), ring(**made)))
    return tuple(states)
