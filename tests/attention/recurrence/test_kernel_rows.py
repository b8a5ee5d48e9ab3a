"""How rows are cut into chunks, and the inverse of a triangular matrix, in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from attention.recurrence.chunks_kernel import CHUNK
from attention.recurrence.kernel_rows import chunk_of_row, chunks_of_row, row_of_chunk, unit_lower_inverse
from tests.attention.recurrence.recurrence_cases import LONG, close
from tests.attention.recurrence.token_by_token import StateRows


@triton.jit
def _inverse_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, unit_lower_inverse(tl.load(x_ptr + at), SIZE))


@pytest.mark.parametrize("kind", ["random", "equal keys"])
def test_inverse(kind: str) -> None:
    """Of equal keys without decay the powers of L grow to 10⁸, its inverse has but 1 and -1."""
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
    _cut_kernel[(10,)](rows.query_start_loc, rows.num_new, out, len(LONG), ROWS=4, CHUNK=64)
    expected = [[0, 0, 64], [0, 64, 70], [2, 0, 1], [2, 1, 65], [2, 65, 67], [3, 0, 18], [3, 18, 20]]
    assert out.tolist() == expected + [[4, -1, -1]] * 3


def test_a_row_commits_no_more_tokens_than_it_has() -> None:
    """And one of just so many tokens as there must be has chunks."""
    rows = StateRows.of([(20, 1, 0, 0, 99), (17, 2, 0, 0, 17), (16, 3, 0, 0, 16)])
    out = torch.full((4, 3), -1, dtype=torch.int32)
    _cut_kernel[(4,)](rows.query_start_loc, rows.num_new, out, 3, ROWS=4, CHUNK=64)
    assert out.tolist() == [[0, 0, 20], [1, 0, 17], [3, -1, -1], [3, -1, -1]]
