"""Attention of short queries in Triton's interpreter: narrow heads, few rows.

tests/test_triton_kernels.py has more of them, with the tiles that a GPU takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from attention.batch.host import rows_batch, slots_of
from attention.cache.kv_cache import CacheGroup, KVLayout, LayerKV, allocate
from attention.kernels.packed_kernel import Scratch, SharedKeys, Tiling, launch_packed
from attention.spec import AttentionSpec
from tests.attention.oracle import expected_row

CPU = torch.device("cpu")
KEY, PAGE, QUERY_LEN = AttentionSpec(4, 2, 16, 16, 0.25), 8, 3
BeforeRows = Callable[[torch.Tensor, LayerKV, torch.Tensor, torch.Tensor], SharedKeys | None]


def layer_of(pages: int, layout: KVLayout) -> LayerKV:
    (layer,) = allocate(CacheGroup("test", (KEY,), pages, PAGE, layout), torch.float16, CPU)
    layer.keys.normal_()
    layer.values.normal_()
    return layer


def check(lengths: list[int], table: np.ndarray, layer: LayerKV, before: BeforeRows = lambda *_: None) -> None:
    """Rows of QUERY_LEN queries over these pages, after `before` has attended some of them; against the oracle."""
    rows, seq_lens = len(lengths), np.array(lengths)
    batch = rows_batch(np.arange(rows + 1) * QUERY_LEN, seq_lens - QUERY_LEN, table, PAGE)
    arrays = [torch.from_numpy(x) for x in (batch.page_indptr, batch.page_indices, batch.last_page_len)]
    scratch = Scratch.on(CPU, QUERY_LEN * 2, 16)
    query = torch.randn(rows * QUERY_LEN, 4, 16, dtype=torch.float16)
    out, shared = torch.zeros_like(query), before(query, layer, *arrays[:2])
    for x in (scratch.sums, scratch.stats):
        x.fill_(torch.nan)
    launch_packed(query, layer, KEY, *arrays, out, scratch, QUERY_LEN, shared)
    assert not scratch.arrived.any()
    keys, values = (
        (x if layer.layout == "NHD" else x.transpose(1, 2)).flatten(0, 1) for x in (layer.keys, layer.values)
    )
    for row, length in enumerate(lengths):
        slots = torch.from_numpy(slots_of(table, np.full(length, row), np.arange(length), PAGE))
        tokens = slice(row * QUERY_LEN, (row + 1) * QUERY_LEN)
        right = expected_row(KEY, query[tokens], keys[slots], values[slots], None)
        assert (out[tokens] - right).norm() <= 2e-3 * right.norm()


def table_of(lengths: list[int]) -> np.ndarray:
    """Pages in any order."""
    counts = -(-np.array(lengths) // PAGE)
    width = int(counts.max())
    table = np.random.default_rng(1).permutation(np.arange(1, len(lengths) * width + 1)).astype(np.int32)
    table = table.reshape(len(lengths), width)
    table[np.arange(width) >= counts[:, None]] = 0
    return table


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_keys_of_a_row_in_one_part_and_in_several(layout: KVLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of one page, at the edges of tiles, and of rows that are cut into parts."""
    torch.manual_seed(0)
    monkeypatch.setattr("attention.kernels.packed_kernel.tiling", lambda *_: Tiling(16, 2, 1, 6, 16))
    lengths = [3, 16, 90, 33]
    table = table_of(lengths)
    check(lengths, table, layer_of(int(table.max()) + 1, layout))


def test_rows_in_one_part_take_no_place_for_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many places as the parts of rows that have several, however many rows stand before these."""
    torch.manual_seed(0)
    monkeypatch.setattr("attention.kernels.packed_kernel.tiling", lambda *_: Tiling(16, 2, 1, 4, 16))
    monkeypatch.setattr("attention.kernels.packed_kernel._MOST_HEADS", 0)
    lengths = [3] * 6 + [200]
    table = table_of(lengths)
    check(lengths, table, layer_of(int(table.max()) + 1, "NHD"))
