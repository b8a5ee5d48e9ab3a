"""The four recurrences in torch, for CPUs and as the kernels' oracle, and the choice of functions for a device.

All take the packed tokens of ragged rows. A launch processes every row as `StateRows` describes: start from the stored
state, or zeros for a fresh row; apply the replayed inputs and the committed tokens; store the state, unless that is
deferred; then apply the drafts, whose inputs are kept in the ring. Rows are computed side by side, padded with inputs
that change no state, and long ones in chunks. Inputs may have tokens after query_start_loc[-1] (padding), whose outputs
are zeros.

States and sums are float32. Outputs have the dtype of transformers' functions: the dtype of x (v), float32 for Mamba's
scans.

Source of the chunked forms: "Gated Delta Networks", arXiv 2412.06464, section 3.3; "Mamba-2", arXiv 2405.21060, section
6; the functions themselves are transformers' (`torch_chunk_gated_delta_rule`, `mamba2_chunk_scan`, …).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.recurrence.state_rows import Padded, StateRows
from attention.recurrence.states import DeltaRing, ScanRing

_CHUNK = 64
_VECTOR_CHUNK = 16
"""Tokens of a chunk. With a gate per channel the decays between two tokens are vectors, so fewer."""
_NORM_EPS = 1e-6

Scanned = tuple[Tensor, Tensor]
"""Outputs [B, L, …] of a scan, and the states [B, …] after them."""
Scan = Callable[[Padded, Tensor], Scanned]
"""A scan over some inputs of each row, from states [B, …]."""


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, ring: Tensor, rows: StateRows) -> Tensor:
    """Causal convolution by channel: y[t] = bias + sum_i weight[:, i] · x[t-k+1+i].

    Args:
        x: [T, C]; weight: [C, k]; bias: [C] or None; silu: whether silu(y) is returned.
        ring: [slots, R, C], x by position mod R. Read from start-k+1 on, written for the last R tokens of each row.

    Returns:
        [T, C] in the dtype of x.
    """
    width = weight.shape[1]
    size = ring.shape[1]
    lens = (rows.query_start_loc[1:] - rows.query_start_loc[:-1]).long()
    starts = rows.query_start_loc.long()[:-1]
    start = rows.start.long()
    slots = rows.slots.long()
    num_tokens = int(rows.query_start_loc[-1])
    owner = torch.repeat_interleave(torch.arange(len(lens), device=x.device), lens, output_size=num_tokens)
    offset = torch.arange(num_tokens, device=x.device) - starts[owner]
    back = torch.arange(width - 1, -1, -1, device=x.device)
    within = offset[:, None] - back  # [T, k], before the launch where negative
    position = start[owner][:, None] + within
    own = x[(starts[owner][:, None] + within).clamp_min(0)]
    kept = ring[slots[owner][:, None], position.clamp_min(0) % size]
    taps = torch.where((within >= 0)[..., None], own, kept)
    taps = taps.masked_fill((position < 0)[..., None], 0).float()
    y = x.new_zeros(()) if bias is None else bias.float()
    for tap in range(width):  # one after the other: a matmul would sum by the number of tokens
        y = y + taps[:, tap] * weight[:, tap].float()
    out = x.new_zeros(x.shape)
    y = y.to(x.dtype)
    out[:num_tokens] = F.silu(y) if silu else y
    last = offset >= lens[owner] - size
    ring[slots[owner][last], (start[owner] + offset)[last] % size] = x[:num_tokens][last].to(ring.dtype)
    return out


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    l2_normalize: bool, state: Tensor, ring: DeltaRing, rows: StateRows, in_order: bool = False,
) -> Tensor:  # fmt: skip
    """The gated delta rule, token by token: S *= exp(g); u = beta (v - S k); S += u kᵀ; o = S (scale q).

    Args:
        q, k: [T, Hk, Dk]; v: [T, Hv, Dv]: each head of keys serves Hv/Hk heads of values that follow each other.
        g: [T, Hv] float32, or [T, Hv, Dk] with a gate per channel; beta: [T, Hv].
        l2_normalize: whether q and k are divided by their norm first.
        state: [slots, Hv, Dv, Dk], of any float dtype.
        in_order: every token by itself, with the same bits in any launch.

    Returns:
        [T, Hv, Dv] in the dtype of v.
    """
    repeat = v.shape[1] // k.shape[1]

    def heads(x: Tensor, normalize: bool) -> Tensor:
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS) if normalize else x
        return x.repeat_interleave(repeat, dim=2) if repeat > 1 else x

    def scan(span: Padded, before: Tensor) -> Scanned:
        queries = heads(span.gathered(q), l2_normalize) * scale
        keys = heads(span.gathered(k, ring.k), l2_normalize)
        inputs = (queries, keys, span.gathered(v, ring.v), span.gathered(g, ring.g), span.gathered(beta, ring.beta))
        return _scan_in_chunks(*inputs, before, in_order)

    return _two_phases(scan, v, state, rows, ring, k=k, v=v, g=g, beta=beta)


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    state: Tensor, ring: ScanRing, rows: StateRows, in_order: bool = False,
) -> Tensor:  # fmt: skip
    """Mamba2's scan, token by token: S = S exp(dt A) + dt x Bᵀ; y = S C + D x.

    Args:
        x: [T, H, P]; dt: [T, H] float32, ready to use; A: [H] float32, negative; B, C: [T, G, N]; D: [H] or None.
        state: [slots, H, P, N], of any float dtype; in_order: see `gated_delta`.

    Returns:
        [T, H, P] float32.
    """
    repeat = x.shape[1] // B.shape[1]

    def scan(span: Padded, before: Tensor) -> Scanned:
        b = span.gathered(B, ring.B)
        c = span.gathered(C)
        b, c = (each.repeat_interleave(repeat, dim=2) if repeat > 1 else each for each in (b, c))
        inputs = span.gathered(x, ring.x)
        steps = span.gathered(dt, ring.dt)
        y, after = _scan_in_chunks(c, b, inputs, steps * A.float(), steps, before, in_order, corrects=False)
        return y if D is None else y + D.float()[:, None] * inputs, after

    return _two_phases(scan, x.float(), state, rows, ring, x=x, B=B, dt=dt)


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    state: Tensor, ring: ScanRing, rows: StateRows,
) -> Tensor:  # fmt: skip
    """Mamba1's scan, token by token: S = S exp(dt A) + dt x Bᵀ; y = S C + D x, each channel with separate states.

    Args:
        x: [T, C]; dt: [T, C] float32, ready to use; A: [C, N] float32, negative; B, C: [T, N]; D: [C] or None.
        state: [slots, C, N], of any float dtype.

    Returns:
        [T, C] float32.
    """

    def scan(span: Padded, before: Tensor) -> Scanned:
        inputs = span.gathered(x, ring.x)
        steps = span.gathered(dt, ring.dt)
        b = span.gathered(B, ring.B)
        c = span.gathered(C)
        outputs = []
        for t in range(span.length):
            step = steps[:, t, :, None]
            before = before * torch.exp(step * A) + step * inputs[:, t, :, None] * b[:, t, None]
            outputs.append((before * c[:, t, None]).sum(-1))
        y = torch.stack(outputs, dim=1)
        return y if D is None else y + D.float() * inputs, before

    return _two_phases(scan, x.float(), state, rows, ring, x=x, B=B, dt=dt)


def _two_phases(
    scan: Scan,
    like: Tensor,
    state: Tensor,
    rows: StateRows,
    ring: DeltaRing | ScanRing,
    **inputs: Tensor,
) -> Tensor:
    """Scan the committed tokens, store the state, scan the drafts and write their inputs into the ring.

    inputs: keyed by the names of the ring's tensors. Returns outputs [T, …] as `like`.
    """
    slots = rows.slots.long()
    out = like.new_zeros(like.shape)
    before = state[slots].float()
    before[rows.fresh] = 0
    for span in rows.committed:
        y, before[span.members] = scan(span, before[span.members])
        span.scatter(y, out)
        state[slots[span.members]] = before[span.members].to(state.dtype)
    if rows.kept.length:
        y, _ = scan(rows.kept, before[rows.kept.members])
        rows.kept.scatter(y, out)
    for name, x in inputs.items():
        rows.kept.keep(x, getattr(ring, name))
    return out


def _scan_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor,
    in_order: bool, corrects: bool = True,
) -> Scanned:  # fmt: skip
    """The gated delta rule; or Mamba2's scan, without a correction of v by what the state knows.

    q, k [B, L, H, Dk], v [B, L, H, Dv], g [B, L, H] or [B, L, H, Dk], beta [B, L, H], state [B, H, Dv, Dk], all
    float32 -> [B, L, H, Dv] and the state after them."""
    vector = g.dim() == 4
    gates = g if vector else g[..., None]
    q, k, v, gates, beta = (each.transpose(1, 2) for each in (q, k, v, gates, beta))
    outputs = []
    size, scanned = (_VECTOR_CHUNK if vector else _CHUNK), _chunk
    if in_order:
        size, scanned = 1, _token
    for first in range(0, q.shape[2], size):
        own = slice(first, first + size)
        chunk = q[:, :, own], k[:, :, own], v[:, :, own], gates[:, :, own], beta[:, :, own]
        y, state = scanned(*chunk, state, corrects)
        outputs.append(y)
    return torch.cat(outputs, dim=2).transpose(1, 2), state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor,
    corrects: bool,
) -> Scanned:  # fmt: skip
    """One chunk [B, H, c, …]: u = beta v, or solves (1 + tril(beta K Kᵀ decay, -1)) u = beta (v - K exp(sum g) Sᵀ)."""
    total = g.cumsum(2)  # [B, H, c, 1 or Dk]
    later = q.new_ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    decay = total[:, :, :, None] - total[:, :, None]  # [B, H, c, c, 1 or Dk]
    decay = decay.masked_fill(later[..., None], float("-inf")).exp()

    def scores(x: Tensor) -> Tensor:
        if g.shape[-1] == 1:
            return (x @ k.transpose(-1, -2)) * decay[..., 0]
        return torch.einsum("bhid,bhjd,bhijd->bhij", x, k, decay)

    grown = total.exp()
    weight = beta[..., None]
    if corrects:
        known = (k * grown) @ state.transpose(-1, -2)
        u = torch.linalg.solve_triangular(scores(k) * weight, (v - known) * weight, upper=False, unitriangular=True)
    else:
        u = v * weight
    y = (q * grown) @ state.transpose(-1, -2) + scores(q) @ u
    left = (total[:, :, -1:] - total).exp()
    return y, state * grown[:, :, -1, None] + u.transpose(-1, -2) @ (k * left)


def _token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor,
    corrects: bool,
) -> Scanned:  # fmt: skip
    """A chunk of one token, by sums over a row of the state, whose order depends on nothing else."""
    state = state * g.exp()
    u = v[:, :, 0] - (state * k).sum(-1) if corrects else v[:, :, 0]
    state = state + (beta * u)[..., None] * k
    return (state * q).sum(-1)[:, :, None], state


Recurrence = Callable[..., Tensor]


@dataclass(frozen=True)
class Recurrences:
    """One implementation of the four recurrences, with the signatures of the functions above; name: for `inspect`.

    capturable: whether a CUDA graph can hold their launches: nothing is read on the host.
    """

    name: str
    short_conv: Recurrence
    gated_delta: Recurrence
    ssd_scan: Recurrence
    selective_scan: Recurrence
    capturable: bool = False


REFERENCE = Recurrences("torch", short_conv, gated_delta, ssd_scan, selective_scan)


def recurrences_of(device: torch.device, in_order: bool = False) -> Recurrences:
    """Triton kernels on an NVIDIA GPU, torch elsewhere, because on ROCm the kernels are not tested.

    in_order: functions that read every token by itself, so that a row has the same bits in any launch.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        found = REFERENCE
    else:
        from attention.recurrence.conv_kernel import short_conv
        from attention.recurrence.delta_kernel import gated_delta
        from attention.recurrence.scan_kernel import selective_scan
        from attention.recurrence.ssd_kernel import ssd_scan

        found = Recurrences("Triton", short_conv, gated_delta, ssd_scan, selective_scan, capturable=True)
    if not in_order:
        return found
    delta, ssd = (partial(scan, in_order=True) for scan in (found.gated_delta, found.ssd_scan))
    return replace(found, name=f"{found.name}, token by token", gated_delta=delta, ssd_scan=ssd)
