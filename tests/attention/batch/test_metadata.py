"""CommonAttentionMetadata carries a HostBatch to the device unchanged, and refuses to be used late or wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention.backends.reference import TorchBackend
from attention.batch.host import HostBatch, rows_batch
from attention.batch.metadata import (
    BatchSection,
    single_batch_arena,
    stage,
    with_rows,
)
from attention.batch.transforms.local_attention import local_attention
from attention.batch.transforms.windowed import windowed_batch
from attention.cache.kv_cache import CacheGroup
from attention.errors import InvariantError, StaleMetadataError
from attention.runner import GroupRunner
from attention.spec import AttentionSpec, Reach
from attention.staging import Bucket, StagingArena, bucket_of

CPU = torch.device("cpu")
BATCH = rows_batch(np.array([0, 4, 5, 12]), np.array([3, 9, 0]), np.array([[2, 5], [1, 4], [6, 3]], np.int32), 8)


def test_device_views_equal_the_host_arrays() -> None:
    arena, bucket = single_batch_arena(4, 16, 2, CPU)
    metadata = stage(BATCH, arena, bucket)
    for field in BatchSection("b").fields:
        name = field.name.removeprefix("b.")
        view = getattr(metadata, name)
        assert view.numpy().dtype == field.dtype
        assert view.tolist() == getattr(BATCH, name).tolist()
    assert (metadata.num_reqs, metadata.num_tokens, metadata.max_query_len) == (3, 12, 7)


def test_two_batches_share_one_copy_under_their_prefixes() -> None:
    a, b = BatchSection("a"), BatchSection("b")
    bucket = bucket_of(**a.sizes(4, 16, 2), **b.sizes(4, 16, 2))
    arena = StagingArena([*a.fields, *b.fields], bucket, CPU)
    other = rows_batch(np.array([0, 1]), np.array([5]), np.array([[7]], np.int32), 8)
    staged = arena.send(bucket, a.values(BATCH) | b.values(other))
    assert arena.generation == 1
    assert staged["a.positions"].tolist() == BATCH.positions.tolist()
    assert staged["b.slot_mapping"].tolist() == [61]


def test_the_same_tokens_in_other_rows() -> None:
    table = np.array([[2, 5, 0], [1, 4, 7], [6, 3, 0]], np.int32)
    batch = rows_batch(np.array([0, 4, 5, 12]), np.array([3, 9, 0]), table, 4)
    metadata = stage(batch, *single_batch_arena(3, 12, 3, CPU))
    virtual = local_attention(batch, 4)
    found = with_rows(metadata, virtual)
    assert found.host is virtual and found.num_reqs == 5 > metadata.num_reqs
    for field in BatchSection("b", table=False).fields:
        name = field.name.removeprefix("b.")
        assert getattr(found, name).numpy().dtype == field.dtype
        assert getattr(found, name).tolist() == getattr(virtual, name).tolist(), name
    assert found.block_table is None and found.slot_mapping is metadata.slot_mapping
    other = rows_batch(np.array([0, 1]), np.array([5]), np.array([[7]], np.int32), 8)
    with pytest.raises(InvariantError, match="rows of other tokens"):
        with_rows(metadata, other)


def test_staging_validates_the_batch() -> None:
    arena, bucket = single_batch_arena(4, 16, 2, CPU)
    with pytest.raises(InvariantError):
        stage(replace(BATCH, seq_lens=BATCH.seq_lens + 1), arena, bucket)


def test_attending_with_stale_metadata_raises() -> None:
    runner = GroupRunner(
        TorchBackend(CPU), CacheGroup("g", (AttentionSpec(1, 1, 4, 4, 0.5),), 8, 8), torch.float32, CPU
    )
    arena, bucket = single_batch_arena(4, 16, 2, CPU)
    planned = runner.plan(stage(BATCH, arena, bucket))
    states = torch.ones(12, 1, 4)
    runner.attend(planned, 0, states, states, states)
    for _ in range(2):
        stage(BATCH, arena, bucket)
    with pytest.raises(StaleMetadataError):
        runner.attend(planned, 0, states, states, states)


GROUPED = BatchSection("batch", num_groups=2)


def with_groups() -> tuple[HostBatch, StagingArena, Bucket]:
    """Two sliding-window groups beside the first one, on pages of their own."""
    own = rows_batch(np.array([0, 2, 3]), np.array([400, 9]), np.arange(1, 61, dtype=np.int32).reshape(2, 30), 16)
    tables = [np.arange(begin, begin + 60, dtype=np.int32).reshape(2, 30) for begin in (100, 200)]
    reaches = zip(tables, (Reach(32), Reach(100)), strict=True)
    groups = tuple(windowed_batch(own, table, np.array([0, 1]), reach) for table, reach in reaches)
    batch = replace(own, other_groups=groups)
    bucket = bucket_of(**GROUPED.sizes(2, 3, 30, groups=(40, 40)))
    return batch, StagingArena(GROUPED.fields, bucket, CPU), bucket


def test_every_group_has_slots_and_pages_of_its_own_and_shares_all_else() -> None:
    batch, arena, bucket = with_groups()
    metadata = stage(batch, arena, bucket, GROUPED)
    assert arena.generation == 1 and len(metadata.other_groups) == 2
    for group, host in zip(metadata.other_groups, batch.other_groups, strict=True):
        assert group.host is host and group.block_table is None
        for name in ("slot_mapping", "page_indices", "page_indptr"):
            assert getattr(group, name).tolist() == getattr(host, name).tolist()
            assert getattr(group, name).tolist() != getattr(metadata, name).tolist()
        assert group.positions is metadata.positions and group.seq_lens is metadata.seq_lens


def test_staging_validates_every_group() -> None:
    batch, arena, bucket = with_groups()
    batch.other_groups[1].slot_mapping[0] += 1
    with pytest.raises(InvariantError, match="neither the one its row owns"):
        stage(batch, arena, bucket, GROUPED)
