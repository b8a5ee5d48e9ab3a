"""The kernels of Mamba2's and Mamba1's scans in Triton's interpreter against the rule token by token in float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from attention.kernels.scan import selective_scan
from attention.kernels.ssd import ssd_scan
from tests.attention.kernels import token_by_token as oracle
from tests.attention.kernels.test_delta import RING, ROUND, close, same_rings
from tests.attention.kernels.token_by_token import SsdRing, StateRows, copied

TOKENS, SLOTS = 14, 6


def ssd_case(
    heads: int, dim: int, groups: int, states: int, dtype: torch.dtype = torch.float32, tokens: int = TOKENS
) -> dict[str, Any]:
    """x, B and C are slices of a wider tensor, and state and rings full of values, as of requests before."""
    widths = [heads * dim, groups * states, groups * states, 3]
    x, b, c, _ = torch.randn(tokens, sum(widths)).to(dtype).split(widths, 1)
    ring = SsdRing(
        torch.randn(SLOTS, RING, heads, dim).to(dtype),
        torch.randn(SLOTS, RING, groups, states).to(dtype),
        torch.rand(SLOTS, RING, heads),
    )
    return {
        "x": x.unflatten(1, (heads, dim)),
        "dt": torch.rand(tokens, heads),
        "A": -torch.rand(heads) * 4,
        "B": b.unflatten(1, (groups, states)),
        "C": c.unflatten(1, (groups, states)),
        "D": torch.randn(heads),
        "state": torch.randn(SLOTS, heads, dim, states),
        "ring": ring,
    }


def scan_case(channels: int, states: int, dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> dict[str, Any]:
    x, b, c, _ = torch.randn(tokens, channels + 2 * states + 3).to(dtype).split([channels, states, states, 3], 1)
    ring = SsdRing(
        torch.randn(SLOTS, RING, channels).to(dtype),
        torch.randn(SLOTS, RING, states).to(dtype),
        torch.rand(SLOTS, RING, channels),
    )
    A, D, state = -torch.rand(channels, states) * 4, torch.randn(channels), torch.randn(SLOTS, channels, states)
    return {"x": x, "dt": torch.rand(tokens, channels), "A": A, "B": b, "C": c, "D": D, "state": state, "ring": ring}


def checked(kernel: Any, right_rule: Any, case: dict[str, Any], rows: StateRows) -> None:
    ours, right = ({**case, "state": case["state"].clone(), "ring": copied(case["ring"])} for _ in range(2))
    expected = right_rule(**right, rows=rows)
    out = kernel(**ours, rows=rows)
    assert out.dtype == case["x"].dtype and out.is_contiguous()
    close(out, expected, 1e-6 if out.dtype == torch.float32 else 1e-3)
    close(ours["state"][1:], right["state"][1:])
    same_rings(ours["ring"], right["ring"])


@pytest.mark.parametrize(
    ("shape", "dtype", "has_d"),
    [
        ((4, 8, 2, 16), torch.float32, True),
        ((3, 12, 1, 24), torch.float32, False),
        ((4, 8, 4, 16), torch.float16, True),
    ],
    ids=["groups", "odd sizes", "half"],
)
def test_mamba2(shape: tuple[int, int, int, int], dtype: torch.dtype, has_d: bool) -> None:
    torch.manual_seed(0)
    case = ssd_case(*shape, dtype)
    checked(ssd_scan, oracle.ssd_scan, case if has_d else {**case, "D": None}, StateRows.of(ROUND))


@pytest.mark.parametrize(
    ("shape", "dtype", "has_d"), [((40, 16), torch.float32, True), ((16, 6), torch.float16, False)]
)
def test_mamba1(shape: tuple[int, int], dtype: torch.dtype, has_d: bool) -> None:
    torch.manual_seed(0)
    case = scan_case(*shape, dtype)
    checked(selective_scan, oracle.selective_scan, case if has_d else {**case, "D": None}, StateRows.of(ROUND))
