"""Recurrences in chunks, in Triton's interpreter, against the rules token by token in float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from attention.kernels.chunks import CHUNK, chunk_of_row, chunks_of_row, row_of_chunk, unit_lower_inverse
from attention.kernels.delta_chunks import launch_delta_chunks
from tests.attention.kernels import token_by_token as oracle
from tests.attention.kernels.test_delta import close, inputs, same_rings
from tests.attention.kernels.token_by_token import StateRows, copied

LONG = [(70, 1, 0, 0, 70), (5, 4, 9, 2, 1), (67, 2, 9, 2, 1), (20, 3, 5, 0, 18)]
"""(tokens, slot, start, replay, num_new): a prompt of two chunks; a row too short; replay, and more drafts than a chunk
(more than rounds have, by the same rule); a chunk of a prompt and two drafts."""
LEAST = 17


@triton.jit
def _inverse_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, unit_lower_inverse(tl.load(x_ptr + at), SIZE))


@pytest.mark.parametrize("kind", ["random", "equal keys"])
def test_inverse(kind: str) -> None:
    """Of equal keys without decay the powers of L grow to 10¹⁷, its inverse has but 1 and -1."""
    torch.manual_seed(0)
    L = (torch.randn(CHUNK, CHUNK) * 0.3 if kind == "random" else torch.ones(CHUNK, CHUNK)).tril(-1)
    out = torch.empty_like(L)
    _inverse_kernel[(1,)](L, out, SIZE=CHUNK)
    close(out, (torch.eye(CHUNK) + L).double().inverse(), 1e-5)


@triton.jit
def _cut_kernel(query_start_loc_ptr, num_new_ptr, out_ptr, rows, ROWS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    row, chunk = row_of_chunk(query_start_loc_ptr, num_new_ptr, rows, program, 17, CHUNK, ROWS)
    tl.store(out_ptr + program * 3, row)
    if row < rows:
        tokens = tl.load(query_start_loc_ptr + row + 1) - tl.load(query_start_loc_ptr + row)
        num_new = tl.load(num_new_ptr + row)
        begin, end = chunk_of_row(tokens, num_new, chunk, CHUNK)
        _, chunks = chunks_of_row(tokens, num_new, CHUNK)
        tl.store(out_ptr + program * 3 + 1, begin)
        tl.store(out_ptr + program * 3 + 2, tl.where(chunk < chunks, end, -1))


def test_chunks_of_rows() -> None:
    """Every token of a long row is in one chunk, and none of them on both sides of the last committed token."""
    rows = StateRows.of(LONG)
    out = torch.full((10, 3), -1, dtype=torch.int32)
    _cut_kernel[(10,)](rows.query_start_loc, rows.num_new, out, len(LONG), ROWS=4, CHUNK=CHUNK)
    expected = [[0, 0, 64], [0, 64, 70], [2, 0, 1], [2, 1, 65], [2, 65, 67], [3, 0, 18], [3, 18, 20]]
    assert out.tolist() == expected + [[4, -1, -1]] * 3


def checked(case: dict[str, Any], rows: StateRows, normalize: bool, limit: float) -> None:
    right = {**case, "state": case["state"].clone(), "ring": copied(case["ring"])}
    ours = {**case, "state": case["state"].clone(), "ring": copied(case["ring"])}
    long = StateRows.of([row for row in LONG if row[0] >= LEAST])
    first, end = int(rows.query_start_loc[1]), int(rows.query_start_loc[2])
    kept = [t for t in range(int(rows.query_start_loc[-1])) if not first <= t < end]
    names = ("q", "k", "v", "g", "beta")
    expected = oracle.gated_delta(
        **{**right, **{n: case[n][kept] for n in names}}, scale=0.3, l2_normalize=normalize, rows=long
    )
    out = torch.full(case["v"].shape, 7.0, dtype=case["v"].dtype)
    launch_delta_chunks(**ours, scale=0.3, l2_normalize=normalize, rows=rows, out=out, least_tokens=LEAST)
    close(out[kept], expected, limit)
    assert (out[first:end] == 7).all()
    close(ours["state"], right["state"], 1e-5)
    same_rings(ours["ring"], right["ring"])


@pytest.mark.parametrize(
    ("heads", "dims", "vector", "dtype"),
    [
        ((1, 2), (16, 40), False, torch.float32),
        ((2, 2), (24, 16), True, torch.float32),
        ((1, 1), (32, 16), False, torch.float16),
    ],
    ids=["scalar gate", "vector gate", "half"],
)
def test_delta(heads: tuple[int, int], dims: tuple[int, int], vector: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    total = sum(row[0] for row in LONG)
    case = inputs(total, heads, dims, vector, 5, dtype, ring_size=69)
    case["g"] *= 5  # gates whose sums over a chunk are beyond the range of exp in float32
    checked(case, StateRows.of(LONG), True, 1e-5 if dtype == torch.float32 else 1e-3)
