"""Layers in groups by window and chunk, and a runner of several groups: each layer gets its own group's pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention.backends.reference import TorchBackend
from attention.batch.host import HostBatch, rows_batch
from attention.batch.metadata import (
    BatchSection,
    CommonAttentionMetadata,
)
from attention.batch.transforms.windowed import windowed_batch
from attention.cache.kv_cache import FP8, CacheGroup, KVFormat
from attention.errors import InvalidInputError
from attention.groups import GroupedRunner, layers_by_group, reaches_of, runner_of, split_group
from attention.runner import GroupRunner
from attention.spec import AttentionSpec, Reach
from attention.staging import StagingArena, bucket_of

CPU = torch.device("cpu")
FULL = AttentionSpec(4, 2, 8, 8, 0.5)
NEAR, FAR = replace(FULL, window=12), replace(FULL, chunk_size=64)
SPECS = (NEAR, FULL, NEAR, FAR)
SHORT, CHUNK = Reach(12), Reach(64, 64)


def test_layers_of_one_reach_are_one_group() -> None:
    assert reaches_of([FULL] * 3, 100) == reaches_of([NEAR] * 3, 100) == reaches_of([FAR] * 3, 100) == ()
    assert reaches_of(SPECS, 100) == (CHUNK, SHORT) and reaches_of(SPECS, 65) == (CHUNK, SHORT)
    assert reaches_of(SPECS, 64) == (SHORT,) and reaches_of(SPECS, 12) == ()
    assert layers_by_group(SPECS, (CHUNK, SHORT)) == ((1,), (3,), (0, 2))
    assert layers_by_group(SPECS, (SHORT,)) == ((1, 3), (0, 2)), "a chunk that covers every request is none"


def test_windows_and_chunks_of_one_length_are_two_groups() -> None:
    chunked = replace(FULL, chunk_size=12)
    assert reaches_of([chunked, NEAR, FULL], 100) == (Reach(12, 12), SHORT)
    assert layers_by_group([chunked, NEAR, FULL], (Reach(12, 12), SHORT)) == ((2,), (0,), (1,))
    assert replace(NEAR, chunk_size=8).reach == Reach(8, 8), "a window within chunks: all of the chunk is kept"


def test_a_group_keeps_the_scales_of_its_layers() -> None:
    scales = ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0), (7.0, 8.0))
    whole = CacheGroup("target", SPECS, 9, 4, "HND", KVFormat(FP8, scales))
    first, near = split_group(whole, [(SHORT, 5)])
    assert (first.name, first.attention_specs, first.num_pages) == ("target", (FULL, FAR), 9)
    assert (near.name, near.attention_specs, near.num_pages) == ("target, window 12", (NEAR, NEAR), 5)
    assert first.format.scales == scales[1::2] and near.format.scales == scales[::2] and near.layout == "HND"


@pytest.mark.parametrize("reaches", [[Reach(13)], [Reach(64)], [SHORT, CHUNK, Reach(7)]])
def test_reaches_that_no_layer_has_are_refused(reaches: list[Reach]) -> None:
    right = f"{', '.join(map(str, reaches))} do not divide layers with window 12, None, window 12, chunks of 64 into"
    with pytest.raises(InvalidInputError, match=right):
        split_group(CacheGroup("target", SPECS, 9, 4), [(reach, 5) for reach in reaches])


def sent(batch: HostBatch, entries: list[int]) -> tuple[CommonAttentionMetadata, StagingArena]:
    section, width = BatchSection("b", len(entries)), batch.block_table.shape[1]
    bucket = bucket_of(**section.sizes(batch.num_reqs, batch.num_tokens, width, groups=entries))
    arena = StagingArena(section.fields, bucket, CPU)
    return section.metadata(batch, arena.send(bucket, section.values(batch))), arena


def grouped_batch() -> HostBatch:
    """Rows at 300 (3 tokens) and 150 (1 token) on pages of 4; the further groups have pages of their own."""
    starts, computed = np.array([0, 3, 4]), np.array([300, 150])
    tables = [np.random.default_rng(i).permutation(np.arange(1, 161)).reshape(2, 80).astype(np.int32) for i in range(3)]
    batch = rows_batch(starts, computed, tables[0], 4)
    return replace(
        batch,
        other_groups=tuple(windowed_batch(batch, tables[i], np.arange(2), r) for i, r in ((1, CHUNK), (2, SHORT))),
    )


def test_only_slots_and_page_lists_travel_again() -> None:
    batch = grouped_batch()
    metadata, _ = sent(batch, [64, 64])
    section = BatchSection("b", 2)
    names = [field.name for field in section.fields if ".group" in field.name]
    own = ("slot_mapping", "page_indices", "page_indptr")
    assert names == [f"b.group{g}.{name}" for g in (1, 2) for name in own]
    arrays = section.values(batch)
    assert sum(arrays[name].nbytes for name in names) == sum(
        8 * batch.num_tokens + 4 * len(g.page_indices) + 4 * (batch.num_reqs + 1) for g in batch.other_groups
    )
    for group, host in zip(metadata.other_groups, batch.other_groups, strict=True):
        assert group.host is host and group.block_table is None
        for name in own:
            assert getattr(group, name).tolist() == getattr(host, name).tolist()
        for name in ("query_start_loc", "seq_lens", "positions", "last_page_len"):
            assert getattr(group, name) is getattr(metadata, name)


def test_every_layer_gets_its_own_groups_pages() -> None:
    """As runners of single groups over the same pages."""
    metadata, _ = sent(grouped_batch(), [64, 64])
    whole = CacheGroup("target", SPECS, 161, 4)
    grouped = runner_of(TorchBackend(CPU), whole, [(CHUNK, 161), (SHORT, 161)], torch.float32, CPU)
    assert isinstance(grouped, GroupedRunner) and [len(r.layers) for r in grouped.runners] == [1, 1, 2]
    assert grouped.layer_numbers == {"target": (1,), "target, chunks of 64": (3,), "target, window 12": (0, 2)}
    generator = torch.Generator().manual_seed(1)
    batches = {FULL: metadata, FAR: metadata.other_groups[0], NEAR: metadata.other_groups[1]}
    planned = grouped.plan(metadata)
    for layer, spec in enumerate(SPECS):
        single = GroupRunner(TorchBackend(CPU), CacheGroup("one", (spec,), 161, 4), torch.float32, CPU)
        for ours, theirs in ((grouped.layers[layer].keys, single.layers[0].keys),
                             (grouped.layers[layer].values, single.layers[0].values)):  # fmt: skip
            theirs.copy_(ours.copy_(torch.randn(ours.shape, generator=generator)))
        states = [torch.randn(4, heads, 8, generator=generator) for heads in (4, 2, 2)]
        right = single.attend(single.plan(batches[spec]), 0, *states)
        assert torch.equal(grouped.attend(planned, layer, *states), right)
        assert torch.equal(grouped.layers[layer].keys, single.layers[0].keys)


def test_a_batch_without_the_further_groups_is_refused() -> None:
    batch = replace(grouped_batch(), other_groups=())
    metadata, _ = sent(batch, [])
    grouped = GroupedRunner(TorchBackend(CPU), CacheGroup("t", SPECS, 161, 4), [(SHORT, 161)], torch.float32, CPU)
    with pytest.raises(ValueError, match="zip"):
        grouped.plan(metadata)
    assert isinstance(runner_of(TorchBackend(CPU), CacheGroup("t", SPECS, 9, 4), (), torch.float32, CPU), GroupRunner)
