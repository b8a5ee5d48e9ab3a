"""The states of recurrent calls: which tensors each keeps, and their memory.

One slot for each row of the row table, and the null slot. Not pages: a state has one size however long the row is. A
row's slot is its own while it runs; who takes the row next begins with zeros (`StateIndex.replay`), so nothing is
cleared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.recurrence.index import FoldRule, conv_ring_size

Shape = tuple[tuple[int, ...], torch.dtype]
"""Dimensions and dtype of a tensor of one slot."""
Shapes = dict[str, Shape]
"""The tensors of one slot by name."""


@dataclass(frozen=True)
class ConvSpec:
    """A short causal convolution by channel: channels C, taps k."""

    channels: int
    width: int
    kind = "short convolution"

    def shapes(self, rule: FoldRule, dtype: torch.dtype) -> Shapes:
        """The tensors of one slot by name."""
        return {"ring": ((conv_ring_size(self.width, rule.num_drafts), self.channels), dtype)}


@dataclass(frozen=True)
class DeltaSpec:
    """The gated delta rule: heads of queries and keys Hk (each serves Hv/Hk heads of values), widths Dk and Dv.

    vector_gate: a gate for each of a head's Dk key channels (KDA), else one for each head.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    vector_gate: bool

    @property
    def kind(self) -> str:
        """Name of the recurrence, for people."""
        return "gated delta rule, a gate per channel" if self.vector_gate else "gated delta rule"

    def shapes(self, rule: FoldRule, dtype: torch.dtype) -> Shapes:
        """The tensors of one slot by name."""
        size = rule.ring_size
        heads = self.num_v_heads
        gate = (size, heads, self.k_dim) if self.vector_gate else (size, heads)
        return {
            "state": ((heads, self.v_dim, self.k_dim), torch.float32),
            "k": ((size, self.num_k_heads, self.k_dim), dtype),
            "v": ((size, heads, self.v_dim), dtype),
            "g": (gate, torch.float32),
            "beta": ((size, heads), torch.float32),
        }


@dataclass(frozen=True)
class SsdSpec:
    """Mamba2's scan: heads H of width P, groups G that share B and C, N states."""

    num_heads: int
    head_dim: int
    num_groups: int
    num_states: int
    kind = "Mamba2 scan"

    def shapes(self, rule: FoldRule, dtype: torch.dtype) -> Shapes:
        """The tensors of one slot by name."""
        size = rule.ring_size
        return {
            "state": ((self.num_heads, self.head_dim, self.num_states), torch.float32),
            "x": ((size, self.num_heads, self.head_dim), dtype),
            "B": ((size, self.num_groups, self.num_states), dtype),
            "dt": ((size, self.num_heads), torch.float32),
        }


@dataclass(frozen=True)
class ScanSpec:
    """Mamba1's selective scan: channels C with N states each."""

    channels: int
    num_states: int
    kind = "Mamba1 scan"

    def shapes(self, rule: FoldRule, dtype: torch.dtype) -> Shapes:
        """The tensors of one slot by name."""
        size = rule.ring_size
        return {
            "state": ((self.channels, self.num_states), torch.float32),
            "x": ((size, self.channels), dtype),
            "B": ((size, self.num_states), dtype),
            "dt": ((size, self.channels), torch.float32),
        }


RecurrenceSpec = ConvSpec | DeltaSpec | SsdSpec | ScanSpec


def moved_shape(spec: RecurrenceSpec) -> tuple[int, ...]:
    """Shape of the tensor that a row takes to another engine: its state, or a convolution's last inputs."""
    if isinstance(spec, ConvSpec):
        return spec.width - 1, spec.channels
    return spec.shapes(FoldRule.every_launch(0), torch.float32)["state"][0]


def fold_rule(specs: Sequence[RecurrenceSpec], num_drafts: int, in_order: bool = False) -> FoldRule:
    """When a model with these calls stores its states.

    Storing is deferred if all states belong to a gated delta rule with one gate per head, whose kernel reads up to
    `MOST_INPUTS` tokens at the cost of one token; other kernels replay token by token, as all do `in_order`.
    """
    chunked = [isinstance(spec, DeltaSpec) and not spec.vector_gate for spec in specs if not isinstance(spec, ConvSpec)]
    defers = chunked and all(chunked) and not in_order
    return FoldRule.deferred(num_drafts) if defers else FoldRule.every_launch(num_drafts)


@dataclass(frozen=True)
class StateGroup:
    """All recurrent calls of a model, in the order of a forward, and how many rows keep states.

    num_slots: rows, the null slot included. num_drafts: K, the most drafts of a row; the rings hold a round's drafts
    and the inputs that it replays. state_dtype: how states are kept between launches, which compute in float32.
    in_order: every token is read by itself, see `recurrences_of`.

    In half precision a state is rounded when it is stored, and rounds with drafts store at other positions.
    """

    specs: tuple[RecurrenceSpec, ...]
    num_slots: int
    num_drafts: int
    state_dtype: torch.dtype = torch.float32
    in_order: bool = False

    @property
    def rule(self) -> FoldRule:
        """When states are stored."""
        return fold_rule(self.specs, self.num_drafts, self.in_order)

    def shapes(self, spec: RecurrenceSpec, dtype: torch.dtype) -> Shapes:
        """The tensors of one slot of a call by name, for a model of this dtype."""
        found = spec.shapes(self.rule, dtype)
        return {name: (dims, self.state_dtype if name == "state" else kind) for name, (dims, kind) in found.items()}

    def bytes_per_row(self, dtype: torch.dtype) -> int:
        """Bytes of one slot over all layers, for a model of this dtype.

        Qwen3-Next-80B (36 layers of 16/32 heads of 128, a convolution of 8,192 channels), K=3, bfloat16:

        >>> group = StateGroup((ConvSpec(8192, 4), DeltaSpec(16, 32, 128, 128, False)), 1, 3)
        >>> round(36 * group.bytes_per_row(torch.bfloat16) / 2**20, 1)
        82.8
        """
        shapes = (shape for spec in self.specs for shape in self.shapes(spec, dtype).values())
        return sum(math.prod(dims) * kind.itemsize for dims, kind in shapes)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all slots, for a model of this dtype."""
        return self.num_slots * self.bytes_per_row(dtype)


@dataclass(frozen=True)
class ConvState:
    """A convolution's inputs by position, ring [slots, R, C] in the model's dtype."""

    ring: Tensor


@dataclass(frozen=True)
class DeltaRing:
    """Inputs of the gated delta rule: k [slots, R, Hk, Dk], v [slots, R, Hv, Dv] in the model's dtype; g [slots, R, Hv]
    or [slots, R, Hv, Dk] and beta [slots, R, Hv] float32."""

    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


@dataclass(frozen=True)
class ScanRing:
    """Inputs of a scan: Mamba2's x [slots, R, H, P], B [slots, R, G, N], dt [slots, R, H]; Mamba1's x [slots, R, C], B
    [slots, R, N], dt [slots, R, C]. x and B in the model's dtype, dt float32."""

    x: Tensor
    B: Tensor
    dt: Tensor


@dataclass(frozen=True)
class RecurrentState:
    """A state [slots, Hv, Dv, Dk], [slots, H, P, N] or [slots, C, N] in the group's `state_dtype`, and the ring of its
    inputs."""

    state: Tensor
    ring: DeltaRing | ScanRing


CallState = ConvState | RecurrentState


def tensors_of(state: CallState) -> list[Tensor]:
    """Every tensor of a call's state, including its ring."""
    found = []
    for value in vars(state).values():
        found += [value] if isinstance(value, Tensor) else list(vars(value).values())
    return found


def allocate_states(group: StateGroup, dtype: torch.dtype, device: torch.device) -> tuple[CallState, ...]:
    """Zeros for every call of a group."""
    states: list[CallState] = []
    for spec in group.specs:
        shapes = group.shapes(spec, dtype).items()
        made = {name: torch.zeros((group.num_slots, *dims), dtype=kind, device=device) for name, (dims, kind) in shapes}
        if isinstance(spec, ConvSpec):
            states.append(ConvState(**made))
        else:
            ring = DeltaRing if isinstance(spec, DeltaSpec) else ScanRing
            states.append(RecurrentState(made.pop("state"), ring(**made)))
    return tuple(states)
