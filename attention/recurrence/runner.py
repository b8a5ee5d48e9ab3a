"""StateRunner: the states of all recurrent layers, and what computes them. Serves every layer of a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from attention.batch.metadata import CommonAttentionMetadata, ExtraSection
from attention.recurrence.functions import recurrences_of
from attention.recurrence.index import StateArrays, StateIndex, slots_of_rows
from attention.recurrence.layer_spec import ConvSpec
from attention.recurrence.state_cache import CallState, ConvState, StateGroup, allocate_states, tensors_of
from attention.recurrence.state_rows import StateRows


class Recur(Protocol):
    """Computes the recurrent calls of one forward: `call` is a call's number in the model. The inputs are those of the
    functions of the same name in `attention.recurrence.functions`, without state, ring and rows."""

    def short_conv(self, call: int, *inputs: Any) -> torch.Tensor:
        """x [T, C], weight, bias, silu -> [T, C]."""

    def gated_delta(self, call: int, *inputs: Any) -> torch.Tensor:
        """q, k, v [T, Hv, Dv], g, beta, scale, l2_normalize -> [T, Hv, Dv]."""

    def ssd_scan(self, call: int, *inputs: Any) -> torch.Tensor:
        """x [T, H, P], dt, A, B, C, D -> [T, H, P] float32."""

    def selective_scan(self, call: int, *inputs: Any) -> torch.Tensor:
        """x [T, C], dt, A, B, C, D -> [T, C] float32."""


class StateRunner:
    """The states of a model's recurrent calls on one device.

    Attributes:
        group: whose states; dtype: of the model. states: of each call. functions: what computes them.
    """

    def __init__(self, group: StateGroup, dtype: torch.dtype, device: torch.device) -> None:
        self.group = group
        self.dtype = dtype
        self.functions = recurrences_of(device)
        self.states: tuple[CallState, ...] = allocate_states(group, dtype, device)

    def copied(self) -> tuple[torch.Tensor, ...]:
        """A copy of all states, for `put_back`."""
        return tuple(tensor.clone() for tensor in self._tensors())

    def put_back(self, copies: tuple[torch.Tensor, ...]) -> None:
        """Make the states what they were."""
        for tensor, copy in zip(self._tensors(), copies, strict=True):
            tensor.copy_(copy)

    @property
    def moved_shapes(self) -> list[tuple[int, ...]]:
        """Of what `of_row` gives."""
        return [spec.moved_shape for spec in self.group.specs]

    def of_row(self, row: int, position: int) -> list[torch.Tensor]:
        """Copies of what a row of the row table needs of its past from `position` on, where its states hold all tokens
        before it: each call's state, or a convolution's last inputs. The same for any K. Never waits for the device."""
        slot, found = int(slots_of_rows(np.array(row))), []
        for spec, state in zip(self.group.specs, self.states, strict=True):
            if isinstance(spec, ConvSpec) and isinstance(state, ConvState):
                found.append(state.ring[slot, _kept_places(spec, state, position)])
            else:
                found.append(_stored(state)[slot].clone())
        return found

    def put_row(self, row: int, position: int, given: Sequence[torch.Tensor]) -> None:
        """The inverse of `of_row`, into a row of this engine; tensors on any device."""
        slot = int(slots_of_rows(np.array(row)))
        for spec, state, own in zip(self.group.specs, self.states, given, strict=True):
            if isinstance(spec, ConvSpec) and isinstance(state, ConvState):
                state.ring[slot, _kept_places(spec, state, position)] = own.to(state.ring)
            else:
                _stored(state)[slot].copy_(own)

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for state in self.states for tensor in tensors_of(state)]

    def over(self, rows: StateRows) -> StatesOver:
        """The calls of one launch; what it derives from the rows is its own, as buffers are written again."""
        return StatesOver(self, replace(rows))

    def serving(self, metadata: CommonAttentionMetadata) -> StatesOver | None:
        """The calls of the launch of a batch; None for a batch without states."""
        rows = metadata.extra(StateRows)
        return None if rows is None else self.over(rows)

    @staticmethod
    def noted(note: Note) -> NotedCalls:
        """Calls that are noted, and computed later."""
        return NotedCalls(note)

    @staticmethod
    def blank() -> Blank:
        """Calls that give zeros and leave the states alone: to run a model before its kernels are there."""
        return Blank()


def _stored(state: CallState) -> torch.Tensor:
    assert not isinstance(state, ConvState), "a convolution has inputs alone"
    return state.state


def _kept_places(spec: ConvSpec, state: ConvState, position: int) -> torch.Tensor:
    """Where a convolution's inputs before `position` are in its ring; made on the device. A place of a position below 0
    is nobody's, and never read."""
    ring = state.ring
    return torch.arange(position - spec.width + 1, position, device=ring.device) % ring.shape[1]


def _served(name: str) -> Callable[..., torch.Tensor]:
    """The method of `StatesOver` that computes calls of this name."""

    def served(over: StatesOver, call: int, *inputs: Any) -> torch.Tensor:
        kept = over.runner.states[call]
        own = (kept.ring,) if isinstance(kept, ConvState) else (kept.state, kept.ring)
        out: torch.Tensor = getattr(over.runner.functions, name)(*inputs, *own, over.rows)
        return out

    return served


@dataclass(frozen=True)
class StatesOver:
    """The recurrent calls of one launch over its rows: see `Recur`."""

    runner: StateRunner
    rows: StateRows
    short_conv = _served("short_conv")
    gated_delta = _served("gated_delta")
    ssd_scan = _served("ssd_scan")
    selective_scan = _served("selective_scan")


_OUTPUTS: dict[str, tuple[int, torch.dtype | None]] = {
    "short_conv": (0, None),
    "gated_delta": (2, None),
    "ssd_scan": (0, torch.float32),
    "selective_scan": (0, torch.float32),
}
"""Of each call of a `Recur`: the input that its output has the shape of, and its dtype where that is another."""


def empty_output(name: str, inputs: tuple[Any, ...]) -> torch.Tensor:
    """Memory for the output of a call of this name."""
    place, dtype = _OUTPUTS[name]
    like: torch.Tensor = inputs[place]
    return like.new_empty(like.shape, dtype=dtype)


def _zeros(name: str) -> Callable[..., torch.Tensor]:
    return lambda blank, call, *inputs: empty_output(name, inputs).zero_()


class Blank:
    """Zeros for every call: see `Recur`."""

    short_conv = _zeros("short_conv")
    gated_delta = _zeros("gated_delta")
    ssd_scan = _zeros("ssd_scan")
    selective_scan = _zeros("selective_scan")


Note = Callable[[str, int, tuple[Any, ...], torch.Tensor], None]
"""Told of a call: its name and number, its inputs, and the memory where its output is expected."""


class NotedCalls:
    """A `Recur` that computes nothing: every call is handed on, see `Note`."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self.short_conv: Any = partial(self._noted, "short_conv")
        self.gated_delta: Any = partial(self._noted, "gated_delta")
        self.ssd_scan: Any = partial(self._noted, "ssd_scan")
        self.selective_scan: Any = partial(self._noted, "selective_scan")

    def _noted(self, name: str, call: int, *inputs: Any) -> torch.Tensor:
        out = empty_output(name, inputs)
        self._note(name, call, inputs, out)
        return out


class StateSection(ExtraSection):
    """The arrays of a `StateIndex` in the arena of a batch; rows that are added are on the null slot."""

    def __init__(self, name: str, shared: Mapping[str, str], most_replayed: int | None = None) -> None:
        """name, shared: see `MakeSection`. most_replayed: see `StateIndex`, for rounds that are written in place."""
        super().__init__(StateArrays, "states", name, shared)
        self._most_replayed = most_replayed

    def of(self, metadata: CommonAttentionMetadata, views: Mapping[str, torch.Tensor]) -> StateRows | None:
        own = metadata.host.extra(StateIndex)
        if own is None:
            return None
        most = {"max_query_len": metadata.max_query_len, "max_replay": own.max_replay}
        found: StateRows = self.arrays.of(views, StateRows, query_start_loc=metadata.query_start_loc, **most)
        return found

    def buffers(self, host: Mapping[str, np.ndarray]) -> StateIndex:
        found: StateIndex = self.arrays.of(host, StateIndex, most_replayed=self._most_replayed)
        return found
