"""The kernels of Mamba2's and Mamba1's scans in Triton's interpreter against the rule token by token in float64."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from attention.recurrence.scan_kernel import selective_scan
from attention.recurrence.ssd_kernel import ssd_scan
from tests.attention.recurrence import token_by_token as oracle
from tests.attention.recurrence.recurrence_cases import (
    LONG,
    LONG_RING,
    ROUND,
    TOKENS,
    checked,
    scan_case,
    ssd_case,
)
from tests.attention.recurrence.token_by_token import StateRows


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "has_d"),
    [
        ((2, 4), (16, 8), torch.float32, True),
        ((1, 3), (24, 12), torch.float32, False),
        ((4, 4), (16, 8), torch.float16, True),
    ],
    ids=["groups", "odd sizes", "half"],
)
@pytest.mark.cases(1)
def test_mamba2(heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, has_d: bool) -> None:
    torch.manual_seed(0)
    case = ssd_case(TOKENS, heads, dims, dtype)
    limit = 1e-6 if dtype == torch.float32 else 1e-3
    checked(ssd_scan, oracle.ssd_scan, case | ({} if has_d else {"D": None}), StateRows.of(ROUND), limit, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "has_d"),
    [((1, 2), (24, 70), torch.float32, True), ((2, 2), (16, 16), torch.float16, False)],
    ids=["odd sizes", "half"],
)
@pytest.mark.cases(1)
def test_mamba2_long_rows_and_short(
    heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, has_d: bool
) -> None:
    torch.manual_seed(0)
    case = ssd_case(sum(row[0] for row in LONG) + 2, heads, dims, dtype, ring_size=LONG_RING)
    limit = 1e-5 if dtype == torch.float32 else 1e-3
    checked(ssd_scan, oracle.ssd_scan, case | ({} if has_d else {"D": None}), StateRows.of(LONG), limit, 1e-5)


def test_mamba2_groups_of_heads_in_rows_of_both_kernels() -> None:
    """Four heads of two groups: B and C of a group are those of neighbouring heads. The longest of the short rows, the
    shortest of those that are read in chunks, and a single token."""
    torch.manual_seed(0)
    case, rows = (
        ssd_case(36, (2, 4), (16, 8), ring_size=LONG_RING),
        [(16, 4, 3, 1, 14), (17, 1, 9, 2, 15), (1, 2, 3, 0, 1)],
    )
    checked(ssd_scan, oracle.ssd_scan, case, StateRows.of(rows), 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "has_d"), [((40, 16), torch.float32, True), ((16, 6), torch.float16, False)]
)
def test_mamba1(shape: tuple[int, int], dtype: torch.dtype, has_d: bool) -> None:
    torch.manual_seed(0)
    case = scan_case(TOKENS, *shape, dtype)
    limit = 1e-6 if dtype == torch.float32 else 1e-3
    rule = oracle.selective_scan
    checked(selective_scan, rule, case | ({} if has_d else {"D": None}), StateRows.of(ROUND), limit, 1e-6)


@pytest.mark.parametrize("rule", ["mamba2", "mamba2, long", "mamba1"])
def test_states_in_half_precision_are_rounded_where_they_are_stored_and_nowhere_else(rule: str) -> None:
    torch.manual_seed(0)
    if rule == "mamba1":
        case, kernel, right, rows = scan_case(TOKENS, 40, 16), selective_scan, oracle.selective_scan, ROUND
    elif rule == "mamba2":
        case, kernel, right, rows = ssd_case(TOKENS, (2, 4), (16, 8)), ssd_scan, oracle.ssd_scan, ROUND
    else:
        tokens = sum(row[0] for row in LONG) + 2
        case = ssd_case(tokens, (1, 2), (24, 70), ring_size=LONG_RING)
        kernel, right, rows = ssd_scan, oracle.ssd_scan, LONG
    case["state"] = case["state"].half()  # the interpreter cuts bfloat16 off, a GPU rounds it
    checked(kernel, right, case, StateRows.of(rows), 1e-5, 1e-3)
