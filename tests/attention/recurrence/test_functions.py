"""The torch recurrences in ragged rounds with rejected drafts, against loops over tokens in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from attention.recurrence import functions as reference
from attention.recurrence.index import FoldRule, StateIndex
from attention.recurrence.state_rows import StateRows
from attention.recurrence.states import (
    ConvSpec,
    ConvState,
    DeltaSpec,
    RecurrenceSpec,
    ScanSpec,
    SsdSpec,
    StateGroup,
    allocate_states,
    tensors_of,
)

CPU = torch.device("cpu")
K = 3
CHUNKS, LENGTHS = ([90, 5], [3], [1, 70]), 140
"""Tokens of each row's prompt, by launch, and of a whole row."""


def rows_of(
    start: list[int], lens: list[int], num_new: list[int], replay: list[int], slots: list[int], rule: FoldRule
) -> StateRows:
    index = StateIndex.of(*(np.array(values) for values in (slots, start, replay, num_new)))
    index.validate(np.array(lens), rule)
    bounds = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    device = (torch.from_numpy(array) for array in (index.slots, index.start, index.replay, index.num_new))
    return StateRows(*device, query_start_loc=bounds, max_query_len=max(lens), max_replay=index.max_replay)


@dataclass(frozen=True)
class Case:
    """A recurrence: its spec, inputs [T, …] of a row, the call, and a loop over one row's inputs in float64."""

    spec: RecurrenceSpec
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    call: Callable[..., torch.Tensor]
    loop: Callable[..., torch.Tensor]


def _normal(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def delta_case(vector: bool, in_order: bool = False) -> Case:
    heads_k, heads_v, dim_k, dim_v = 2, 4, 6, 5

    def inputs(n: int) -> tuple[torch.Tensor, ...]:
        gate = (n, heads_v, dim_k) if vector else (n, heads_v)
        q, k = torch.randn(n, heads_k, dim_k), torch.randn(n, heads_k, dim_k)
        return q, k, torch.randn(n, heads_v, dim_v), -F.softplus(torch.randn(gate)), torch.rand(n, heads_v)

    def call(given: Any, state: Any, rows: StateRows) -> torch.Tensor:
        return reference.gated_delta(*given, 0.4, True, state.state, state.ring, rows, in_order)

    def loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        q, k = (_normal(x).repeat_interleave(heads_v // heads_k, 1) for x in (q, k))
        s, out = torch.zeros(heads_v, dim_v, dim_k, dtype=torch.float64), []
        for t in range(len(q)):
            s = s * (g[t][:, None] if vector else g[t][:, None, None]).exp()
            u = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", s, k[t]))
            s = s + u[..., None] * k[t][:, None]
            out.append(torch.einsum("hvk,hk->hv", s, q[t] * 0.4))
        return torch.stack(out)

    return Case(DeltaSpec(heads_k, heads_v, dim_k, dim_v, vector), inputs, call, loop)


def ssd_case(in_order: bool = False) -> Case:
    heads, width, groups, states = 4, 3, 2, 5
    decay, skip = -torch.rand(heads) - 0.1, torch.randn(heads)

    def inputs(n: int) -> tuple[torch.Tensor, ...]:
        x, dt = torch.randn(n, heads, width), F.softplus(torch.randn(n, heads))
        return x, dt, torch.randn(n, groups, states), torch.randn(n, groups, states)

    def call(given: Any, state: Any, rows: StateRows) -> torch.Tensor:
        x, dt, b, c = given
        return reference.ssd_scan(x, dt, decay, b, c, skip, state.state, state.ring, rows, in_order)

    def loop(x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        b, c = (each.repeat_interleave(heads // groups, 1) for each in (b, c))
        s, out = torch.zeros(heads, width, states, dtype=torch.float64), []
        for t in range(len(x)):
            step = dt[t][:, None, None]
            s = s * (step * decay.double()[:, None, None]).exp() + step * x[t][..., None] * b[t][:, None]
            out.append(torch.einsum("hpn,hn->hp", s, c[t]) + skip.double()[:, None] * x[t])
        return torch.stack(out)

    return Case(SsdSpec(heads, width, groups, states), inputs, call, loop)


def scan_case() -> Case:
    channels, states = 6, 4
    decay, skip = -torch.rand(channels, states) - 0.1, torch.randn(channels)

    def inputs(n: int) -> tuple[torch.Tensor, ...]:
        x, dt = torch.randn(n, channels), F.softplus(torch.randn(n, channels))
        return x, dt, torch.randn(n, states), torch.randn(n, states)

    def call(given: Any, state: Any, rows: StateRows) -> torch.Tensor:
        x, dt, b, c = given
        return reference.selective_scan(x, dt, decay, b, c, skip, state.state, state.ring, rows)

    def loop(x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        s, out = torch.zeros(channels, states, dtype=torch.float64), []
        for t in range(len(x)):
            s = s * (dt[t][:, None] * decay.double()).exp() + dt[t][:, None] * x[t][:, None] * b[t]
            out.append(s @ c[t] + skip.double() * x[t])
        return torch.stack(out)

    return Case(ScanSpec(channels, states), inputs, call, loop)


def conv_case(width: int, silu: bool) -> Case:
    weight, bias = torch.randn(5, width), torch.randn(5) if silu else None

    def call(given: Any, state: ConvState, rows: StateRows) -> torch.Tensor:
        return reference.short_conv(given[0], weight, bias, silu, state.ring, rows)

    def loop(x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x.T[None], (width - 1, 0))
        y = F.conv1d(padded, weight.double()[:, None], None if bias is None else bias.double(), groups=5)[0].T
        return F.silu(y) if silu else y

    return Case(ConvSpec(5, width), lambda n: (torch.randn(n, 5),), call, loop)


CASES: dict[str, Callable[[], Case]] = {
    "delta": lambda: delta_case(False),
    "delta, vector gate": lambda: delta_case(True),
    "ssd": ssd_case,
    "selective": scan_case,
    "conv of 4": lambda: conv_case(4, True),
    "conv of 1": lambda: conv_case(1, False),
    "conv without silu": lambda: conv_case(4, False),
    "delta in order": lambda: delta_case(False, True),
    "delta in order, vector gate": lambda: delta_case(True, True),
    "ssd in order": lambda: ssd_case(True),
}


@pytest.mark.parametrize("name", CASES)
def test_ragged_rounds_with_rejected_drafts_are_right(name: str) -> None:
    torch.manual_seed(0)
    case, rng = CASES[name](), np.random.default_rng(0)
    group = StateGroup((case.spec,), 4, K)
    (state,) = allocate_states(group, torch.float32, CPU)
    for tensor in tensors_of(state):
        tensor.fill_(7.0)  # what an earlier row left
    true = [case.inputs(LENGTHS) for _ in CHUNKS]
    right = [case.loop(*(x.double() for x in row)).float() for row in true]
    slots, start, folded = [2, 3, 1], [0, 0, 0], [0, 0, 0]
    waiting, put_off = [list(chunks) for chunks in CHUNKS], 0
    for number in range(12):
        members = [row for row in range(3) if number % 3 or row != number % 2]  # not every row runs in every round
        decodes = np.array([not waiting[row] for row in members])
        num_new = [waiting[row].pop(0) if waiting[row] else 1 for row in members]
        drafts = [
            0 if n > 1 or waiting[row] else int(rng.integers(0, K + 1)) for n, row in zip(num_new, members, strict=True)
        ]
        accepted = [int(rng.integers(0, d + 1)) for d in drafts]
        lens = [n + d for n, d in zip(num_new, drafts, strict=True)]
        begin = [start[row] for row in members]
        parts, padding = [], case.inputs(2)  # a graph's tokens after those of the rows
        for row, a, n, more, good in zip(members, begin, lens, num_new, accepted, strict=True):
            own = [x[a : a + n].clone() for x in true[row]]
            for x, noise in zip(own, case.inputs(n), strict=True):
                x[more + good :] = noise[more + good :]  # rejected drafts are other tokens
            parts.append(own)
        packed = [torch.cat([*columns, pad]) for columns, pad in zip(zip(*parts, strict=True), padding, strict=True)]
        replay = [start[row] - folded[row] for row in members]
        stored = group.rule.num_new(np.array(replay), np.array(num_new), decodes).tolist()
        rows = rows_of(begin, lens, stored, replay, [slots[row] for row in members], group.rule)
        found = case.call(packed, state, rows)
        assert found.shape[0] == sum(lens) + 2 and not found[sum(lens) :].any()
        pieces = found[: sum(lens)].split(lens)
        for row, a, more, good, piece, new in zip(members, begin, num_new, accepted, pieces, stored, strict=True):
            torch.testing.assert_close(piece[: more + good], right[row][a : a + more + good], rtol=1e-4, atol=1e-5)
            folded[row], start[row] = a + more if new else folded[row], a + more + good
            put_off += not new
    assert not any(torch.isnan(tensor).any() for tensor in tensors_of(state))
    assert (put_off > 5) == (name in ("delta", "delta in order"))


IN_ORDER = ["delta in order", "delta in order, vector gate", "ssd in order", "selective", "conv without silu"]


@pytest.mark.parametrize("name", [*IN_ORDER, "delta", "ssd"])
def test_in_order_a_row_has_the_same_bits_however_it_is_cut_and_beside_others(name: str) -> None:
    """Read at once; in pieces beside another row; with drafts, some of them rejected. In chunks the bits differ."""
    torch.manual_seed(0)
    case = CASES[name]()
    rule = FoldRule.every_launch(K)
    group = StateGroup((case.spec,), 4, K, in_order=True)
    assert group.rule == rule
    row, other = case.inputs(70), case.inputs(70)
    (state,) = allocate_states(group, torch.float32, CPU)
    whole = case.call(row, state, rows_of([0], [70], [70], [0], [1], rule))
    pieces, start, replay = [], 0, 0
    launches = [(20, 0), (1, 0), (34, 0), (1, 2), (1, 0), (1, 3), (1, 1)]  # new tokens, and accepted drafts after them
    for turn, (new, accepted) in enumerate(launches):
        drafts = K if start >= 55 else 0
        own = [x[start : start + new + drafts].clone() for x in row]
        for x in own:
            x[new + accepted :] = 0.7
        # Slots 1 and 2 keep states; the other row begins anew in each launch.
        beside = 1 + 9 * turn
        rows = rows_of([start, 0], [new + drafts, beside], [new, beside], [replay, 0], [2, 3], rule)
        out = case.call([torch.cat([x, y[:beside]]) for x, y in zip(own, other, strict=True)], state, rows)
        pieces.append(out[: new + accepted])
        start, replay = start + new + accepted, accepted
    assert torch.equal(torch.cat(pieces), whole[:start]) == (name in IN_ORDER)
