"""The batch-invariant kernel, in Triton's interpreter, over page lists that begin near the window: the same bits, and
no freed page is read. (FlashInfer's kernels: tests/gpu/test_cache_groups.py; the reference: test_windowed.py.)"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

import attention.batch.transforms.windowed as windowed_module
from attention.backends.invariant import InvariantBackend
from attention.batch.host import rows_batch
from attention.batch.metadata import single_batch_arena, stage
from attention.batch.transforms.windowed import windowed_batch
from attention.cache.kv_cache import CacheGroup
from attention.cache.windowed import WindowedTables
from attention.runner import GroupRunner
from attention.spec import AttentionSpec, Reach

CPU, WINDOW, PAGE = torch.device("cpu"), 150, 16
KINDS = {"window": {}, "all": {"softcap": 5.0, "has_sinks": True}}


def attended(kind: str, free: bool) -> tuple[torch.Tensor, np.ndarray]:
    """A row that decodes, one that verifies and a chunk of a prompt; free: behind their windows are pages of NaN.

    Returns the result and the page list.
    """
    spec = AttentionSpec(4, 2, 64, 64, 0.125, window=WINDOW, **KINDS[kind])  # type: ignore[arg-type]
    query_lens, start = np.array([1, 6, 50]), np.array([600, 550, 471])
    tables = WindowedTables(120, 3, 640, PAGE, Reach(WINDOW))
    tables.resize(range(3), query_lens + start)
    whole = rows_batch(np.concatenate([[0], np.cumsum(query_lens)]), start, tables.table.copy(), PAGE)
    runner = GroupRunner(InvariantBackend(), CacheGroup("g", (spec,), 120, PAGE), torch.float16, CPU)
    generator = torch.Generator().manual_seed(0)
    for tensor in (runner.layers[0].keys, runner.layers[0].values):
        tensor.normal_(generator=generator)
        tensor[0] = 0
    states = [torch.randn(57, heads, 64, generator=generator).half() for heads in (4, 2, 2)]
    batch = whole
    if free:
        tables.free_behind(np.arange(3), start)
        gone = torch.from_numpy(whole.block_table[whole.block_table != tables.table]).long()
        assert len(gone) == 28 + 25 + 20
        runner.layers[0].keys[gone] = runner.layers[0].values[gone] = float("nan")
        batch = windowed_batch(whole, tables.table, np.arange(3), Reach(WINDOW))
    arena, bucket = single_batch_arena(3, 57, batch.block_table.shape[1], CPU)
    sinks = torch.randn(4, generator=generator).half() if spec.has_sinks else None
    out = runner.attend(runner.plan(stage(batch, arena, bucket)), 0, *states, sinks)
    return out, batch.page_indices


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.cases(1)
def test_lists_near_the_window_give_the_bits_of_whole_rows(kind: str) -> None:
    out, pages = attended(kind, True)
    assert len(pages) == 14 + 11 + 17, "from tokens 384, 384 and 256 on"
    assert (pages == 0).sum() == 4 + 1 + 4, "pages of that tile that are freed already"
    assert torch.equal(out, attended(kind, False)[0])


@pytest.mark.slow
def test_a_list_that_begins_within_a_tile_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    right, _ = attended("window", False)
    monkeypatch.setattr(windowed_module, "TILE_KEYS", PAGE)
    out, pages = attended("window", True)
    assert (pages > 0).all() and not torch.equal(out, right)
    torch.testing.assert_close(out, right, rtol=2e-3, atol=2e-3)
