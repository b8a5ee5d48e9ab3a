"""StateRunner: the states of all recurrent layers of a model, and the functions that update them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from attention.batch.metadata import CommonAttentionMetadata, ExtraSection
from attention.recurrence.functions import recurrences_of
from attention.recurrence.index import StateArrays, StateIndex, slots_of_rows
from attention.recurrence.state_rows import StateRows
from attention.recurrence.states import (
    ConvSpec,
    ConvState,
    RecurrentState,
    StateGroup,
    allocate_states,
    moved_shape,
    tensors_of,
)
from attention.staging import Arrays, Views


class Recur(Protocol):
    """Computes the recurrent calls of one forward."""

    def __call__(self, name: str, call: int, *inputs: Any) -> Tensor:
        """Compute one call.

        Args:
            name: the recurrence's name, see `OUTPUTS`. call: the call's number in the model.
            inputs: arguments of the function of this name in `attention.recurrence.functions`, without state, ring,
                rows.

        Returns:
            The result of that function.
        """


class StateRunner:
    """The states of a model's recurrent calls on one device, with the functions that update them.

    Attributes:
        group: specifications of the calls, number of slots; dtype: the model's dtype.
        states: one per call. functions: the torch implementation or the kernels.
    """

    def __init__(self, group: StateGroup, dtype: torch.dtype, device: torch.device) -> None:
        self.group = group
        self.dtype = dtype
        self.functions = recurrences_of(device, group.in_order)
        self.states = allocate_states(group, dtype, device)

    def copied(self) -> tuple[Tensor, ...]:
        """Copies of all states, to restore them by `put_back`."""
        return tuple(tensor.clone() for tensor in self._tensors())

    def put_back(self, copies: tuple[Tensor, ...]) -> None:
        """Restore the states from copies."""
        for tensor, copy in zip(self._tensors(), copies, strict=True):
            tensor.copy_(copy)

    @property
    def moved_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors that `of_row` returns."""
        return [moved_shape(spec) for spec in self.group.specs]

    def of_row(self, row: int, position: int) -> list[Tensor]:
        """Copies of a row's states at `position`: each call's state, or a convolution's last inputs.

        All tokens before `position` must be in the states. The tensors do not depend on K. Never waits for the device.
        """
        return [tensor[place].clone() for tensor, place in self._places(row, position)]

    def put_row(self, row: int, position: int, given: Sequence[Tensor]) -> None:
        """Write the tensors of `of_row`, on any device, into a row of this engine."""
        for (tensor, place), own in zip(self._places(row, position), given, strict=True):
            tensor[place] = own.to(tensor)

    def _places(self, row: int, position: int) -> Iterator[tuple[Tensor, Any]]:
        """Of each call the tensor and index of what a row takes to another engine, see `of_row`.

        Of a convolution's inputs, those at positions below 0 are never read.
        """
        slot = int(slots_of_rows(np.array(row)))
        for spec, state in zip(self.group.specs, self.states, strict=True):
            if isinstance(state, RecurrentState):
                yield state.state, slot
            elif isinstance(spec, ConvSpec):
                last = torch.arange(position - spec.width + 1, position, device=state.ring.device)
                yield state.ring, (slot, last % state.ring.shape[1])

    def _tensors(self) -> list[Tensor]:
        return [tensor for state in self.states for tensor in tensors_of(state)]

    def over(self, rows: StateRows) -> Recur:
        """The calls of one launch, with a copy of the rows: cached properties of shared buffers would grow stale."""
        return partial(self._called, replace(rows))

    def _called(self, rows: StateRows, name: str, call: int, *inputs: Any) -> Tensor:
        kept = self.states[call]
        own = (kept.ring,) if isinstance(kept, ConvState) else (kept.state, kept.ring)
        return getattr(self.functions, name)(*inputs, *own, rows)

    def serving(self, metadata: CommonAttentionMetadata) -> Recur | None:
        """The calls of the launch of a batch; None for a batch without states."""
        rows = metadata.extra(StateRows)
        return None if rows is None else self.over(rows)

    @staticmethod
    def noted(note: Note) -> Recur:
        """Report every call to `note` with uninitialised memory for its output, to be computed later."""

        def noted(name: str, call: int, *inputs: Any) -> Tensor:
            out = empty_output(name, inputs)
            note(name, call, inputs, out)
            return out

        return noted

    @staticmethod
    def blank() -> Recur:
        """Return zeros from every call and leave the states unchanged, so that a model can run before its kernels are
        built."""
        return _zeros


OUTPUTS: dict[str, tuple[int, torch.dtype | None]] = {
    "short_conv": (0, None),
    "gated_delta": (2, None),
    "ssd_scan": (0, torch.float32),
    "selective_scan": (0, torch.float32),
}
"""For each recurrence the index of the input with its output's shape, and the output's dtype if it differs."""


def empty_output(name: str, inputs: tuple[Any, ...]) -> Tensor:
    """Memory for the output of a call of this name."""
    place, dtype = OUTPUTS[name]
    like: Tensor = inputs[place]
    return like.new_empty(like.shape, dtype=dtype)


def _zeros(name: str, call: int, *inputs: Any) -> Tensor:
    return empty_output(name, inputs).zero_()


Note = Callable[[str, int, tuple[Any, ...], Tensor], None]
"""Receives a call: its name, its number, its inputs, and memory for its output."""


class StateSection(ExtraSection):
    """The arrays of a `StateIndex` in a batch's staging arena; padding rows use the null slot."""

    def __init__(self, name: str, shared: Mapping[str, str], most_replayed: int | None = None) -> None:
        """name, shared: see `MakeSection`. most_replayed: see `StateIndex`, for rounds that are written in place."""
        super().__init__(StateArrays, "states", name, shared)
        self._most_replayed = most_replayed

    def of(self, metadata: CommonAttentionMetadata, views: Views) -> StateRows | None:
        own = metadata.host.extra(StateIndex)
        if own is None:
            return None
        most = {"max_query_len": metadata.max_query_len, "max_replay": own.max_replay}
        return self.arrays.of(views, StateRows, query_start_loc=metadata.query_start_loc, **most)

    def buffers(self, host: Arrays) -> StateIndex:
        return self.arrays.of(host, StateIndex, most_replayed=self._most_replayed)
