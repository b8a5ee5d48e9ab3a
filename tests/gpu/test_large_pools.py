"""Caches of more than 2**32 numbers, where an offset of 32 bits would read other pages: rows of 65,536 keys on the last
pages of such a pool, beside short ones, against attention in float32 over the same pages."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from attention.backends.base import AttentionBackend
from attention.backends.invariant import InvariantBackend
from attention.batch.host import HostBatch, rows_batch
from attention.cache.kv_cache import CacheGroup, LayerKV
from attention.runner import GroupRunner
from attention.spec import AttentionSpec
from tests.gpu.test_flashinfer import CUDA, LIMIT, attention_spec, metadata_of, relative_error

BEFORE = 1 << 32
"""Numbers of the pool before the pages that rows own."""
PAGE, OWNED, KEYS = 16, 6000, 65_536
NEEDED_BYTES = 24 << 30
GQA = attention_spec()
MLA = AttentionSpec(16, 1, 576, 512, scale=192**-0.5, value_in_key=True)
SHORT = [37, 800, 16, 5, 300]

VERIFICATION = ([4] * 6, [KEYS - 4, *SHORT])
DECODING = ([1] * 6, [KEYS - 1, *SHORT])
MANY_QUERIES = ([9] * 6, [KEYS - 9, *SHORT])
CHUNK = ([512], [KEYS - 512])
SHORT_CHUNK = ([100], [KEYS - 100])
MIXED = ([4, 4, 600], [800, 16, KEYS - 600])


def pool_of(key: AttentionSpec, backend: AttentionBackend) -> tuple[GroupRunner, int]:
    """A runner whose last pages hold keys and values, and the first of those pages; all others hold zeros."""
    numbers = PAGE * key.num_kv_heads * key.head_dim_k
    first = -(-BEFORE // numbers)
    group = CacheGroup("test", (key,), first + OWNED, PAGE)
    runner = GroupRunner(backend, group, torch.bfloat16, CUDA)
    torch.manual_seed(1)
    layer = runner.layers[0]
    for pages in (layer.keys,) if key.value_in_key else (layer.keys, layer.values):
        assert pages.numel() > BEFORE
        pages[first:] = torch.randn(pages[first:].shape, device=CUDA, dtype=torch.bfloat16)
    return runner, first


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """One pool at a time."""
    if torch.cuda.get_device_properties(0).total_memory < NEEDED_BYTES:
        pytest.skip(f"a pool of 2**32 numbers needs a GPU with {NEEDED_BYTES >> 30} GiB")
    yield
    gc.collect()
    torch.cuda.empty_cache()


def host_batch(query_lens: list[int], computed: list[int], first: int) -> HostBatch:
    """Rows on random pages from `first` on."""
    counts = -(-(np.array(computed) + query_lens) // PAGE)
    table = np.zeros((len(counts), counts.max()), np.int32)
    own = np.random.default_rng(0).permutation(OWNED)[: counts.sum()]
    table[np.arange(counts.max()) < counts[:, None]] = own + first
    return rows_batch(np.concatenate([[0], np.cumsum(query_lens)]), np.array(computed), table, PAGE)


def states(key: AttentionSpec, tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(2)
    shapes = ((key.num_q_heads, key.head_dim_k), (key.num_kv_heads, key.head_dim_k), (key.num_kv_heads, key.head_dim_v))
    return [torch.randn(tokens, *shape, device=CUDA).to(torch.bfloat16) for shape in shapes]


def in_pieces(key: AttentionSpec, layer: LayerKV, host: HostBatch, query: torch.Tensor) -> torch.Tensor:
    """[T, Hq, Dv] float32, causal: the row's pages are gathered, and 32 of its queries attended at a time."""
    outs = []
    for row, length in enumerate(host.seq_lens.tolist()):
        pages = torch.from_numpy(host.block_table[row, : -(-length // PAGE)].astype(np.int64)).to(CUDA)
        keys, values = (x[pages].flatten(0, 1)[:length].float() for x in (layer.keys, layer.values))
        group = key.num_q_heads // key.num_kv_heads
        k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))  # [Hq, L, D]
        begin, end = host.query_start_loc[row : row + 2].tolist()
        places = torch.arange(length, device=CUDA)
        for start in range(begin, end, 32):
            q = query[start : min(start + 32, end)].float().transpose(0, 1)  # [Hq, q, D]
            last = torch.from_numpy(host.positions[start : min(start + 32, end)]).to(CUDA)
            scores = (q @ k.mT * key.scale).masked_fill(places > last[:, None], -torch.inf)
            outs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def check(
    key: AttentionSpec, backend: AttentionBackend, batch: tuple[list[int], list[int]], limit: float, fixed: bool = False
) -> None:
    """Every row by itself: a wrong one must not hide behind the others; and the pages below stay as they were."""
    runner, first = pool_of(key, backend)
    host = host_batch(*batch, first)
    metadata, (query, keys, values) = metadata_of(host), states(key, host.num_tokens)
    plan = (runner.fixed_planner(host.num_reqs, batch[0][0]) if fixed else runner).plan(metadata)
    out = runner.attend(plan, 0, query, keys, keys[..., : key.head_dim_v] if key.value_in_key else values)
    layer = runner.layers[0]
    slots = torch.from_numpy(host.slot_mapping).to(CUDA)
    assert torch.equal(layer.keys[slots // PAGE, slots % PAGE], keys)
    expected = in_pieces(key, layer, host, query)
    for begin, end in zip(host.query_start_loc[:-1].tolist(), host.query_start_loc[1:].tolist(), strict=True):
        assert relative_error(out[begin:end], expected[begin:end]) <= limit
    for pages in (layer.keys, layer.values):
        assert not any(bool(part.any()) for part in pages[:first].split(1 << 14)), "a page of nobody was written"


@pytest.mark.parametrize("fixed", [False, True], ids=["any batch", "fixed shape"])
@pytest.mark.parametrize("batch", [VERIFICATION, DECODING], ids=["verification", "decoding"])
def test_packed(batch: tuple[list[int], list[int]], fixed: bool) -> None:
    from attention.backends.flashinfer.backend import FlashInferBackend
    from attention.backends.flashinfer.short_queries import is_packed

    assert is_packed(CacheGroup("test", (GQA,), 2, PAGE), GQA, torch.bfloat16, batch[0][0])
    check(GQA, FlashInferBackend(CUDA), batch, 2 * LIMIT[torch.bfloat16], fixed)


@pytest.mark.parametrize(
    "batch", [MANY_QUERIES, CHUNK, SHORT_CHUNK, MIXED], ids=["fa2 short", "fa3 chunk", "fa2 chunk", "mixed"]
)
def test_flashinfer(batch: tuple[list[int], list[int]]) -> None:
    from attention.backends.flashinfer.backend import FlashInferBackend

    check(GQA, FlashInferBackend(CUDA), batch, 2 * LIMIT[torch.bfloat16])


def test_flashinfer_in_a_fixed_shape() -> None:
    """Split-KV of fa2, as graphs hold it, with the workspace that was computed for the shape."""
    from attention.backends.flashinfer.backend import FlashInferBackend

    check(GQA, FlashInferBackend(CUDA), MANY_QUERIES, 2 * LIMIT[torch.bfloat16], fixed=True)


@pytest.mark.parametrize(
    ("batch", "fixed"),
    [(VERIFICATION, False), (VERIFICATION, True), (DECODING, True), (CHUNK, False), (MIXED, False)],
    ids=["verification", "verification, fixed shape", "decoding, fixed shape", "chunk", "mixed"],
)
def test_mla(batch: tuple[list[int], list[int]], fixed: bool) -> None:
    from attention.backends.flashinfer.backend import FlashInferBackend

    check(MLA, FlashInferBackend(CUDA), batch, 1e-2, fixed)


@pytest.mark.parametrize("batch", [VERIFICATION, DECODING, CHUNK], ids=["verification", "decoding", "chunk"])
def test_batch_invariant(batch: tuple[list[int], list[int]]) -> None:
    check(GQA, InvariantBackend(), batch, 2 * LIMIT[torch.bfloat16])
