"""Attention of pages that rows share in Triton's interpreter: narrow heads, few rows.

tests/test_triton_kernels.py has more of them, with the tiles that a GPU takes.
"""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from attention.cache.kv_cache import LayerKV
from attention.cascade.kernel import launch_prefix, sum_shapes
from attention.kernels.packed_kernel import PrefixTiling, SharedKeys, Tiling
from tests.attention.kernels.test_packed_kernel import KEY, QUERY_LEN, check, layer_of, table_of


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.cases(1)
def test_shared_pages_are_attended_once(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rows that share them, not the first; a prefix that ends inside a tile, in a part or several, of which the
    last may have nothing; then their own keys."""
    torch.manual_seed(0)
    monkeypatch.setattr("attention.kernels.packed_kernel.tiling", lambda *_: Tiling(16, 2, 1, 6, 16))
    tiling = PrefixTiling(16, 16, 2, 1, 1, 1.0, parts, 16)
    for pages in (5, 4):
        lengths = [20, 8 * pages + 3, 8 * pages + 90]
        table = table_of(lengths)
        table[2, :pages] = table[1, :pages]
        layer = layer_of(int(table.max()) + 1, "NHD")

        def before(query: torch.Tensor, layer: LayerKV, *places: torch.Tensor, pages: int = pages) -> SharedKeys:
            sums, stats = (torch.full(shape, torch.nan) for shape in sum_shapes(KEY, len(query), tiling))
            shared = SharedKeys(torch.tensor([0, pages, pages], dtype=torch.int32), sums, stats, tiling)
            launch_prefix(query, layer, KEY, *places, shared, QUERY_LEN)
            alone = (shared.pages == 0).repeat_interleave(QUERY_LEN)
            assert shared.sums[:, alone].isnan().all() and not shared.sums[0, ~alone].isnan().any()
            return shared

        check(lengths, table, layer, before)
