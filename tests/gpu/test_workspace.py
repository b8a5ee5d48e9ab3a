"""Large groups of query heads: every plan finds room for the partial results of split-KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from attention.backends.flashinfer import backend as flashinfer_backend
from attention.batch.host import rows_batch
from attention.batch.metadata import CommonAttentionMetadata, single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup
from attention.spec import AttentionSpec

CUDA = torch.device("cuda")
PAGE = 16
QUERY_LEN = 6
GROUPS = {
    16: AttentionSpec(16, 1, 128, 128, 128**-0.5),
    48: AttentionSpec(48, 1, 128, 128, 128**-0.5),
    71: AttentionSpec(71, 1, 64, 64, 0.125),
}
ROWS = (1, 2, 3, 8, 17, 32, 64, 100, 128)
KEYS = (1, 700, 8192, 9000)


def batch(rows: int, computed: int) -> CommonAttentionMetadata:
    """Rows of six tokens after `computed` others; all of them share their pages, which a planner cannot see."""
    width = -(-(computed + QUERY_LEN) // PAGE)
    table = np.broadcast_to(np.arange(1, width + 1, dtype=np.int32), (rows, width)).copy()
    starts = np.arange(rows + 1, dtype=np.int32) * QUERY_LEN
    host = rows_batch(starts, np.full(rows, computed), table, PAGE)
    arena, bucket = single_batch_arena(host.num_reqs, host.num_tokens, width, CUDA)
    return stage(host, arena, bucket)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """No workspace to begin with, so that its computed size is all there is."""
    monkeypatch.setattr(flashinfer_backend, "LEAST_BYTES", 16)


def plan_all(group_size: int) -> int:
    """Plan every batch in graphs and outside; how many plans that were."""
    key = GROUPS[group_size]
    group = CacheGroup("test", (key,), 1200, PAGE)
    backend: Any = flashinfer_backend.FlashInferBackend(CUDA)
    any_batch = backend.builder(group, key, torch.bfloat16)
    count = 0
    for rows in ROWS:
        fixed = backend.fixed_builder(group, key, torch.bfloat16, rows, QUERY_LEN)
        for computed in KEYS:
            metadata = batch(rows, computed)
            any_batch.build(metadata)
            fixed.build(metadata)
            torch.cuda.synchronize()
            count += 2
    return count


@pytest.mark.parametrize("group_size", GROUPS)
def test_computed_room_is_enough(exact: None, group_size: int) -> None:
    assert plan_all(group_size) == 2 * len(ROWS) * len(KEYS)


@pytest.mark.parametrize("group_size", GROUPS)
def test_too_little_room_would_be_noticed(exact: None, monkeypatch: pytest.MonkeyPatch, group_size: int) -> None:
    """The control: half of the computed size is too little for some of the same plans."""
    whole = flashinfer_backend.split_bytes
    monkeypatch.setattr(flashinfer_backend, "split_bytes", lambda *args: whole(*args) // 2)
    with pytest.raises(Exception, match=r"(?i)buffer overflow"):
        plan_all(group_size)
