"""The load-time self-test of the kernels of recurrences: against the torch functions on a CPU, on separate states.

The self-test of logits runs the model's own weights. In half precision it cannot distinguish an accepted draft that was
not replayed, or a rejected draft that was folded into a state, from rounding. The twin can, but runs on a CPU, through
the torch functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.batch.host import starts_of
from attention.recurrence.functions import REFERENCE
from attention.recurrence.index import FoldRule
from attention.recurrence.runner import StateRunner
from attention.recurrence.state_rows import StateRows
from attention.recurrence.states import (
    CallState,
    ConvSpec,
    DeltaSpec,
    RecurrenceSpec,
    ScanSpec,
    SsdSpec,
    allocate_states,
    tensors_of,
)
from specdec.errors import UnsupportedModelError
from specdec.selftest.eager_reference import relative_errors

_TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.02}
"""Largest rms error of a row's outputs, and of its state, over their rms: outputs are rounded to the dtype, by 0.002 in
bfloat16, and prompts are summed in TF32. Errors planted in tests are off by 0.05 or more."""
_FLOAT32_TOLERANCE = 1e-3
_CPU = torch.device("cpu")
"""Device of the torch functions: on a GPU their matmuls round to TF32 if the program allows it."""
_SLOTS = (2, 3, 1)
_PADDING = 2
"""Tokens of no row, whose outputs are zeros."""

Row = tuple[int, int, int]
"""Tokens of a row in a launch, how many are replayed before them, and how many of them go into the state."""


@torch.inference_mode()
def recurrence_self_test(states: StateRunner) -> None:
    """Run each of the model's recurrences over a few launches; nothing where torch functions compute them anyway.

    Raises:
        UnsupportedModelError: a recurrence's results are wrong on this device; the message names it.
    """
    if states.functions == REFERENCE:
        return
    for spec in dict.fromkeys(states.group.specs):
        _test(spec, states)


def launches(rule: FoldRule) -> list[tuple[Row, ...]]:
    """Prompts; a prompt's second chunk together with verifications; verifications after all, some and none of the
    previous drafts were accepted, and once a row without drafts. Where storing may be deferred, enough further launches
    that every row stores its state after a replay and continues from it.

    >>> launches(FoldRule.every_launch(3))[2:]
    [((4, 0, 1), (4, 3, 1), (4, 1, 1)), ((1, 3, 1), (4, 1, 1), (4, 3, 1))]
    >>> [[row[2] for row in rows] for rows in launches(FoldRule.deferred(3))[2:]]
    [[0, 0, 0], [0, 0, 0], [0, 1, 0], [1, 0, 1], [0, 0, 0]]
    >>> [max(row[1] for rows in launches(FoldRule.deferred(k)) for row in rows) for k in (1, 2, 3, 7)]
    [14, 12, 12, 8]
    """
    drafts = rule.num_drafts
    one = np.ones(3, np.int64)
    some = drafts // 2
    verified = 1 + drafts
    decodes = one > 0
    found: list[tuple[Row, ...]] = [((70, 0, 70), (5, 0, 5), (19, 0, 19))]
    replay = np.zeros_like(one)
    num_new = rule.num_new(replay, one, np.array([False, True, True]))
    found.append(((20, 0, 20), *((verified, 0, int(new)) for new in num_new[1:])))
    accepted = [(0, drafts, some), (drafts, some, drafts), (0, drafts, some), (drafts, 0, drafts), (some, drafts, 0)]
    stored = continued = ~decodes
    while len(found) < 4 or (rule.defers and not continued.all()):
        number = len(found) - 2
        continued = stored
        replay = np.where(num_new > 0, 0, 1 + replay) + np.array(accepted[min(number, len(accepted) - 1)])
        num_new = rule.num_new(replay, one, decodes)
        stored = stored | ((replay > 0) & (num_new > 0))
        lens = (1 if number == 1 else verified, verified, verified)
        found.append(tuple(zip(lens, replay.tolist(), num_new.tolist(), strict=True)))
    return found


def _test(spec: RecurrenceSpec, states: StateRunner) -> None:
    """One recurrence: outputs of every launch, and the states after it."""
    device = tensors_of(states.states[0])[0].device
    dtype = states.dtype
    generator = torch.Generator().manual_seed(0)
    group = replace(states.group, specs=(spec,), num_slots=1 + len(_SLOTS))
    (right,) = allocate_states(group, dtype, _CPU)
    (ours,) = allocate_states(group, dtype, device)
    pairs = list(zip(tensors_of(ours), tensors_of(right), strict=True))
    for own, other in pairs:
        own.copy_(other.copy_(torch.randn(own.shape, generator=generator)))  # as of requests before
    start = np.zeros(len(_SLOTS), np.int64)
    for number, rows in enumerate(launches(group.rule)):
        tokens, replay, num_new = np.array(rows).T
        start += replay
        arrays = tokens, start, replay, num_new
        call = _inputs(spec, int(tokens.sum()) + _PADDING, dtype, generator)
        most = group.rule.most_replayed
        expected = _call(REFERENCE, *call, right, _rows(*arrays, most, _CPU))
        out = _call(states.functions, *call, ours, _rows(*arrays, most, device))
        pieces = zip(*(x.split([*tokens.tolist(), _PADDING]) for x in (out, expected)), strict=True)
        found = [("outputs", _error(*piece)) for piece in pieces]
        for own, other in pairs:
            found += [("states", _error(own[slot].cpu(), other[slot])) for slot in _SLOTS]
        what, worst = max(found, key=lambda pair: (pair[1] != pair[1], pair[1]))
        limit = _TOLERANCE.get(dtype, _FLOAT32_TOLERANCE)
        if not worst <= limit:
            raise UnsupportedModelError(
                f"the {spec.kind} of the model's recurrent layers comes out wrong on {device}: relative error "
                f"{worst:.2g} (allowed for {dtype}: {limit:g}) of the {what} in launch {number + 1} of {spec} by "
                f"{states.functions.name} functions; device='cpu' runs torch functions"
            )
        start = np.where(num_new > 0, start + num_new, start - replay)


def _rows(
    tokens: np.ndarray, start: np.ndarray, replay: np.ndarray, num_new: np.ndarray, most: int, device: torch.device
) -> StateRows:
    def sent(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x.astype(np.int32)).to(device)

    return StateRows(
        query_start_loc=sent(starts_of(tokens)),
        slots=sent(np.array(_SLOTS)),
        start=sent(start),
        replay=sent(replay),
        num_new=sent(num_new),
        max_query_len=int(tokens.max()),
        max_replay=most,
    )


def _inputs(
    spec: RecurrenceSpec, count: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[str, Sequence[Any]]:
    """The name of a recurrence's function, and its inputs of `count` tokens before states and rows.

    Gates and steps are small, so that a token shows in the state for some ten tokens.
    """

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    uniform = partial(torch.rand, generator=generator)
    match spec:
        case ConvSpec():
            return "short_conv", (drawn(count, spec.channels), drawn(spec.channels, spec.width), None, True)
        case DeltaSpec():
            q, k = (drawn(count, spec.num_k_heads, spec.k_dim) for _ in range(2))
            gates = (spec.num_v_heads, spec.k_dim) if spec.vector_gate else (spec.num_v_heads,)
            g = -0.2 * uniform(count, *gates)
            beta = uniform(count, spec.num_v_heads)
            v = drawn(count, spec.num_v_heads, spec.v_dim)
            return "gated_delta", (q, k, v, g, beta, spec.k_dim**-0.5, True)
        case SsdSpec():
            heads = spec.num_heads
            x = drawn(count, heads, spec.head_dim)
            dt = 0.3 * uniform(count, heads)
            a = -uniform(heads) - 0.1
            b, c = (drawn(count, spec.num_groups, spec.num_states) for _ in range(2))
            return "ssd_scan", (x, dt, a, b, c, drawn(heads))
        case ScanSpec():
            width = spec.channels
            states = spec.num_states
            x = drawn(count, width)
            dt = 0.3 * uniform(count, width)
            a = -uniform(width, states) - 0.1
            b, c = (drawn(count, states) for _ in range(2))
            return "selective_scan", (x, dt, a, b, c, drawn(width))


def _call(functions: Any, name: str, inputs: Sequence[Any], kept: CallState, rows: StateRows) -> Tensor:
    """A recurrence's outputs [T, …] on the CPU, by functions on the device of `rows`; `kept` goes on."""
    device = rows.slots.device
    sent = [value.to(device) if isinstance(value, Tensor) else value for value in inputs]
    found: Tensor = getattr(functions, name)(*sent, *vars(kept).values(), rows)
    return found.cpu()


def _error(ours: Tensor, right: Tensor) -> float:
    """Rms error over rms, of all numbers together; NaN where ours has NaN."""
    return float(relative_errors(ours.flatten(), right.flatten()))
