"""The recurrences token by token in float64, row by row, in Python: the oracle of the kernels. Of their code and of the
torch reference that serves CPUs it has only what holds the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from attention.recurrence import state_rows as recurrence_rows


class StateRows(recurrence_rows.StateRows):
    """The rows of a launch, made from a list and read as one."""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int, int]], device: torch.device | str = "cpu") -> StateRows:
        """From (tokens, slot, start, replay, num_new) of each row."""
        tokens, *rest = zip(*rows, strict=True)
        starts = [0]
        for n in tokens:
            starts.append(starts[-1] + n)
        new = [torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, *rest)]
        starts_at, *own = new
        return cls(*own, query_start_loc=starts_at, max_query_len=max(tokens), max_replay=max(rest[2]))

    def __iter__(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """(first token, one past the last, slot, start, replay, num_new) of each row."""
        starts = self.query_start_loc.tolist()
        rest = (x.tolist() for x in (self.slots, self.start, self.replay, self.num_new))
        yield from zip(starts[:-1], starts[1:], *rest, strict=True)


def copied(x: Any) -> Any:
    """A tensor or a ring of them, in memory of its own."""
    if isinstance(x, torch.Tensor):
        return x.clone()
    return replace(x, **{f.name: getattr(x, f.name).clone() for f in fields(x)})


def delta_step(S: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """S [H, Dv, Dk] after a token: k [H, Dk], v [H, Dv], g [H] or [H, Dk], beta [H]."""
    S = S * (g[:, None, None] if g.dim() == 1 else g[:, None, :]).exp()
    u = beta[:, None] * (v - torch.einsum("hvk,hk->hv", S, k))
    return S + u[:, :, None] * k[:, None, :]


def unit(x: torch.Tensor, normalize: bool) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() if normalize else x


def gated_delta(q, k, v, g, beta, scale, l2_normalize, state, ring, rows):  # type: ignore[no-untyped-def]
    """[T, H, Dv] float64; state and ring are written."""
    heads, size = v.shape[1], ring.k.shape[1]
    out = torch.zeros(v.shape, dtype=torch.float64, device=v.device)

    def key(x: torch.Tensor) -> torch.Tensor:
        return unit(x.double().repeat_interleave(heads // x.shape[-2], -2), l2_normalize)

    for first, end, slot, start, replay, num_new in rows:
        S = state[slot].double() if start > replay else torch.zeros_like(state[slot], dtype=torch.float64)
        for p in range(start - replay, start):
            at = (slot, p % size)
            S = delta_step(S, key(ring.k[at]), ring.v[at].double(), ring.g[at].double(), ring.beta[at].double())
        for t in range(first, end):
            S = delta_step(S, key(k[t]), v[t].double(), g[t].double(), beta[t].double())
            out[t] = torch.einsum("hvk,hk->hv", S, key(q[t])) * scale
            done = t - first + 1
            if done == num_new:
                state[slot] = S.to(state.dtype)
            if done > num_new:
                at = (slot, (start + done - 1) % size)
                ring.k[at], ring.v[at], ring.g[at], ring.beta[at] = k[t], v[t], g[t], beta[t]
    return out


def short_conv(x, weight, bias, silu, ring, rows):  # type: ignore[no-untyped-def]
    """[T, C] float64; the ring is written."""
    taps, size = weight.shape[1], ring.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for first, end, slot, start, *_ in rows:
        before = {p: ring[slot, p % size].clone() for p in range(max(0, start - taps + 1), start)}
        known = before | {start + i: x[first + i] for i in range(end - first)}
        for t in range(first, end):
            p = start + t - first
            total = torch.zeros_like(out[t]) if bias is None else bias.double()
            for tap in range(taps):
                source = p - taps + 1 + tap
                if source >= 0:
                    total = total + known[source].double() * weight[:, tap].double()
            out[t] = total / (1 + (-total).exp()) if silu else total
            ring[slot, p % size] = x[t]
    return out


def ssd_scan(x, dt, A, B, C, D, state, ring, rows):  # type: ignore[no-untyped-def]
    """[T, H, P] float64; state and ring are written."""
    size, repeat = ring.x.shape[1], x.shape[1] // B.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)

    def step(S: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        x, dt, B = x.double(), dt.double(), B.double().repeat_interleave(repeat, 0)
        return S * (dt * A.double()).exp()[:, None, None] + torch.einsum("h,hp,hn->hpn", dt, x, B)

    for first, end, slot, start, replay, num_new in rows:
        S = state[slot].double() if start > replay else torch.zeros_like(state[slot], dtype=torch.float64)
        for p in range(start - replay, start):
            S = step(S, ring.x[slot, p % size], ring.dt[slot, p % size], ring.B[slot, p % size])
        for t in range(first, end):
            S = step(S, x[t], dt[t], B[t])
            out[t] = torch.einsum("hpn,hn->hp", S, C[t].double().repeat_interleave(repeat, 0))
            if D is not None:
                out[t] += D.double()[:, None] * x[t].double()
            keep(S, (x, B, dt), t, t - first + 1, slot, start, num_new, state, (ring.x, ring.B, ring.dt))
    return out


def selective_scan(x, dt, A, B, C, D, state, ring, rows):  # type: ignore[no-untyped-def]
    """[T, C] float64; state and ring are written."""
    size = ring.x.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)

    def step(S: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        x, dt, B = x.double()[:, None], dt.double()[:, None], B.double()
        return S * (dt * A.double()).exp() + dt * x * B

    for first, end, slot, start, replay, num_new in rows:
        S = state[slot].double() if start > replay else torch.zeros_like(state[slot], dtype=torch.float64)
        for p in range(start - replay, start):
            S = step(S, ring.x[slot, p % size], ring.dt[slot, p % size], ring.B[slot, p % size])
        for t in range(first, end):
            S = step(S, x[t], dt[t], B[t])
            out[t] = S @ C[t].double() + (0 if D is None else D.double() * x[t].double())
            keep(S, (x, B, dt), t, t - first + 1, slot, start, num_new, state, (ring.x, ring.B, ring.dt))
    return out


def keep(S, inputs, t, done, slot, start, num_new, state, rings):  # type: ignore[no-untyped-def]
    """Store the state after the committed tokens, and the inputs of drafts."""
    if done == num_new:
        state[slot] = S.to(state.dtype)
    if done > num_new:
        for x, ring in zip(inputs, rings, strict=True):
            ring[slot, (start + done - 1) % ring.shape[1]] = x[t]
