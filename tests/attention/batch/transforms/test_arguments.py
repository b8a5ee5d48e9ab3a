"""What a transform cannot do with is refused in words, before anything is made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attention.batch.host import HostBatch, rows_batch
from attention.batch.transforms.decode_first import decode_first_swaps, swapped, token_order
from attention.batch.transforms.local_attention import fixed_local_attention, local_attention
from attention.batch.transforms.slices import request_slices, token_slices
from attention.batch.transforms.windowed import windowed_batch
from attention.errors import InvalidInputError
from attention.recurrence.index import StateIndex
from attention.spec import Reach

TABLE = np.arange(1, 31, dtype=np.int32).reshape(3, 10)
LENS = np.array([4, 10, 5])
BATCH = rows_batch(np.array([0, 4, 14, 19]), np.array([2, 7, 4]), TABLE, 2)
ONE = np.ones(3, np.int32)
RECURRENT = replace(BATCH, extras=(StateIndex(ONE, 0 * ONE, 0 * ONE, LENS.astype(np.int32)),))


@pytest.mark.parametrize("chunk", [0, -4, 4.0, "4", None, True])
@pytest.mark.parametrize("transform", [local_attention, lambda batch, size: fixed_local_attention(batch, size, 4)])
def test_chunk_sizes(transform: Callable[[HostBatch, Any], object], chunk: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^chunk_size=.*whole numbers from 1 on"):
        transform(BATCH, chunk)


def test_a_fixed_form_that_would_leave_out_tokens() -> None:
    with pytest.raises(InvalidInputError, match="each=3: a row lies in more than 3 chunks of 4 tokens"):
        fixed_local_attention(BATCH, 4, 3)
    assert fixed_local_attention(BATCH, 4, 4).query_lens.sum() == BATCH.num_tokens
    with pytest.raises(InvalidInputError, match=r"chunks of 3 tokens .* given pages of 2"):
        fixed_local_attention(BATCH, 3, 9)


@pytest.mark.parametrize("slicer", [request_slices, token_slices])
@pytest.mark.parametrize("cuts", [[1.5], ["1"], "1", 1, None])
def test_cuts(slicer: Callable[[HostBatch, Any], object], cuts: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"has no slices at cuts .* whole numbers from 1"):
        slicer(BATCH, cuts)


@pytest.mark.parametrize("swaps", [[[0, 1, 2]], [0, 2], [[0.0, 1.0]]])
def test_swaps(swaps: Any) -> None:
    for function in (swapped, token_order):
        with pytest.raises(InvalidInputError, match="allowed are pairs of rows from 0 to 2"):
            function(BATCH, np.array(swaps))
    with pytest.raises(InvalidInputError, match=r"longest_decode=1\.5: .* whole numbers from 1"):
        decode_first_swaps(LENS, 1.5)  # type: ignore[arg-type]


def test_rows_with_recurrent_states_are_not_reordered() -> None:
    """Their states would be another row's."""
    with pytest.raises(InvalidInputError, match="recurrent states cannot be reordered"):
        swapped(RECURRENT, np.array([[0, 2]]))


@pytest.mark.parametrize(("rows", "window"), [(2, 8), (4, 8), (3, 0), (3, -1)])
def test_windows(rows: int, window: int) -> None:
    with pytest.raises(InvalidInputError, match=f"3 rows with window {window}"):
        windowed_batch(BATCH, TABLE, np.arange(rows), Reach(window))
