"""Inputs of the recurrences' kernels, and how results are compared, in the interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from attention.recurrence.states import DeltaRing, ScanRing
from tests.attention.recurrence.token_by_token import StateRows, copied

ROUND = [
    *((3, 1, 7, 2, 1), (1, 4, 2, 2, 1), (2, 3, 5, 0, 1), (3, 2, 0, 0, 3)),
    *((2, 6, 9, 3, 0), (2, 7, 2, 2, 0), (3, 0, 0, 0, 1), (0, 5, 3, 1, 0)),
]
"""(tokens, slot, start, replay, num_new): replay and drafts, a single token that only replays, no replay, a prompt; two
that do not store, of the second nothing is stored yet; a padding row of a graph, a row of no tokens; tokens after them
are of no row."""
LONG = [(70, 1, 0, 0, 70), (5, 4, 9, 2, 1), (67, 2, 9, 2, 1), (20, 3, 5, 0, 18)]
"""A prompt of two chunks; a short row; replay, and more drafts than a chunk (more than rounds have, by the same rule);
a chunk of a prompt and two drafts."""
RING, LONG_RING = 5, 69
TOKENS, SLOTS = 18, 8


def delta_case(
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    vector: bool,
    dtype: torch.dtype = torch.float32,
    slots: int = SLOTS,
    ring_size: int = RING,
) -> dict[str, Any]:
    """q and k are slices of a wider tensor, and state and rings full of values, as of requests before."""
    (key_heads, value_heads), (dim_k, dim_v) = heads, dims
    widths = [key_heads * dim_k, key_heads * dim_k, value_heads * dim_v, 3]
    q, k, v, _ = torch.randn(tokens, sum(widths)).to(dtype).split(widths, 1)
    gates = (value_heads, dim_k) if vector else (value_heads,)
    ring = DeltaRing(
        torch.randn(slots, ring_size, key_heads, dim_k).to(dtype),
        torch.randn(slots, ring_size, value_heads, dim_v).to(dtype),
        -torch.rand(slots, ring_size, *gates),
        torch.rand(slots, ring_size, value_heads),
    )
    return {
        "q": q.unflatten(1, (key_heads, dim_k)),
        "k": k.unflatten(1, (key_heads, dim_k)),
        "v": v.unflatten(1, (value_heads, dim_v)),
        "g": -torch.rand(tokens, *gates),
        "beta": torch.rand(tokens, value_heads).to(dtype),
        "scale": dim_k**-0.5,
        "l2_normalize": True,
        "state": torch.randn(slots, value_heads, dim_v, dim_k),
        "ring": ring,
    }


def ssd_case(
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    slots: int = SLOTS,
    ring_size: int = RING,
) -> dict[str, Any]:
    """heads: groups of B and C, heads; dims: states, width of a head."""
    (groups, num_heads), (states, dim) = heads, dims
    widths = [num_heads * dim, groups * states, groups * states, 3]
    x, b, c, _ = torch.randn(tokens, sum(widths)).to(dtype).split(widths, 1)
    ring = ScanRing(
        torch.randn(slots, ring_size, num_heads, dim).to(dtype),
        torch.randn(slots, ring_size, groups, states).to(dtype),
        torch.rand(slots, ring_size, num_heads),
    )
    return {
        "x": x.unflatten(1, (num_heads, dim)),
        "dt": torch.rand(tokens, num_heads),
        "A": -torch.rand(num_heads) * 4,
        "B": b.unflatten(1, (groups, states)),
        "C": c.unflatten(1, (groups, states)),
        "D": torch.randn(num_heads),
        "state": torch.randn(slots, num_heads, dim, states),
        "ring": ring,
    }


def scan_case(
    tokens: int,
    channels: int,
    states: int,
    dtype: torch.dtype = torch.float32,
    slots: int = SLOTS,
    ring_size: int = RING,
) -> dict[str, Any]:
    x, b, c, _ = torch.randn(tokens, channels + 2 * states + 3).to(dtype).split([channels, states, states, 3], 1)
    ring = ScanRing(
        torch.randn(slots, ring_size, channels).to(dtype),
        torch.randn(slots, ring_size, states).to(dtype),
        torch.rand(slots, ring_size, channels),
    )
    A, D, state = -torch.rand(channels, states) * 4, torch.randn(channels), torch.randn(slots, channels, states)
    return {"x": x, "dt": torch.rand(tokens, channels), "A": A, "B": b, "C": c, "D": D, "state": state, "ring": ring}


def conv_case(
    tokens: int,
    channels: int,
    taps: int,
    dtype: torch.dtype = torch.float32,
    slots: int = SLOTS,
    has_bias: bool = True,
) -> dict[str, Any]:
    """A ring for two drafts."""
    x, weight = torch.randn(tokens, channels + 3).to(dtype), torch.randn(channels, taps).to(dtype)
    bias, ring = torch.randn(channels).to(dtype), torch.randn(slots, taps + 2, channels).to(dtype)
    return {"x": x[:, :channels], "weight": weight, "bias": bias if has_bias else None, "silu": True, "ring": ring}


def apart(case: dict[str, Any]) -> dict[str, Any]:
    """The case with a state and a ring of its own."""
    return case | {name: copied(case[name]) for name in ("state", "ring") if name in case}


def close(got: torch.Tensor, right: torch.Tensor, limit: float = 1e-6) -> None:
    """Relative Frobenius norm."""
    assert torch.isfinite(got).all()
    assert (got.double() - right.double()).norm() <= limit * right.double().norm()


def checked(kernel: Any, rule: Any, case: dict[str, Any], rows: StateRows, limit: float, state_limit: float) -> None:
    """A kernel against the rule token by token: outputs, states, and the ring to the bit; not the null slot."""
    ours, right = apart(case), apart(case)
    expected = rule(**right, rows=rows)
    out = kernel(**ours, rows=rows)
    wide = "dt" in case  # Mamba's scans
    assert out.is_contiguous() and out.dtype == (torch.float32 if wide else case["v" if "v" in case else "x"].dtype)
    close(out, expected, limit)
    if "state" in case:
        close(ours["state"][1:], right["state"][1:], state_limit)
    same_rings(ours["ring"], right["ring"])


def same_rings(got: Any, right: Any) -> None:
    """To the bit, but for the null slot."""
    rings = [[x] if isinstance(x, torch.Tensor) else vars(x).values() for x in (got, right)]
    for ours, expected in zip(*rings, strict=True):
        assert torch.equal(ours[1:], expected[1:])
