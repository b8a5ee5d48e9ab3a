"""MLA through FlashInfer against the torch reference over the same pages, eager and from CUDA graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import check_mode, keep_gpu_busy, split_as_by_flashinfer

from attention.backends.reference import TorchBackend
from attention.batch.host import HostBatch, rows_batch
from attention.batch.metadata import CommonAttentionMetadata, single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup
from attention.errors import InvariantError, UnsupportedAttentionError
from attention.runner import GroupRunner
from attention.spec import AttentionSpec
from tests.gpu.test_flashinfer import host_batch as paged_batch
from tests.gpu.test_flashinfer import metadata_of, relative_error

CUDA = torch.device("cuda")
SLOTS = 40_000
LIMIT = 5e-3

DECODE = ([1, 1, 1, 1, 1], [0, 15, 16, 777, 2047])
PROMPT = ([300, 17, 64], [0, 47, 5])
MIXED = ([4, 1, 200, 3, 33], [500, 80, 0, 14, 128])
ODD = ([3, 5, 1, 2], [1, 61, 62, 63])


def host_batch(query_lens: list[int], computed: list[int], page_size: int = 16, seed: int = 0) -> HostBatch:
    return paged_batch(query_lens, computed, page_size, seed, SLOTS)


def attention_spec(heads: int = 16) -> AttentionSpec:
    return AttentionSpec(heads, 1, 576, 512, scale=192**-0.5, value_in_key=True)


class Pair:
    """The same latents under FlashInfer and under the reference."""

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, heads: int = 16, page_size: int = 16, layout: str = "NHD"
    ) -> None:
        from attention.backends.flashinfer.backend import FlashInferBackend

        key = attention_spec(heads)
        group = CacheGroup("test", (key,), SLOTS // page_size, page_size, layout)  # type: ignore[arg-type]
        self.dtype, self.heads, self.page_size = dtype, heads, page_size
        self.flashinfer = GroupRunner(FlashInferBackend(CUDA), group, dtype, CUDA)
        self.reference = GroupRunner(TorchBackend(CUDA), group, dtype, CUDA)
        mine, theirs = self.flashinfer.layers[0].keys, self.reference.layers[0].keys
        mine.copy_(torch.randn(mine.shape, generator=torch.Generator(CUDA).manual_seed(1), device=CUDA))
        theirs.copy_(mine)

    def states(self, tokens: int, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query [T, Hq, 576], strided as absorption leaves it; latents with their rotary part, and without."""
        generator = torch.Generator(CUDA).manual_seed(seed)
        query = torch.randn(self.heads, tokens, 576, generator=generator, device=CUDA).to(self.dtype)
        key = torch.randn(tokens, 1, 576, generator=generator, device=CUDA).to(self.dtype)
        return query.transpose(0, 1), key, key[..., :512]

    def expected(self, metadata: CommonAttentionMetadata, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        query, key, value = states
        plan = self.reference.plan(metadata)
        return self.reference.attend(plan, 0, query.float().contiguous(), key, value)

    def attend(self, metadata: CommonAttentionMetadata, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.flashinfer.attend(self.flashinfer.plan(metadata), 0, *states)

    def error(self, query_lens: list[int], computed: list[int]) -> float:
        batch = host_batch(query_lens, computed, self.page_size)
        metadata, states = metadata_of(batch), self.states(batch.num_tokens)
        return relative_error(self.attend(metadata, states), self.expected(metadata, states))


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize("batch", [DECODE, PROMPT, MIXED, ODD], ids=["decode", "prompt", "mixed", "odd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equals_the_reference(batch: tuple[list[int], list[int]], dtype: torch.dtype) -> None:
    pair = Pair(dtype)
    assert pair.error(*batch) <= LIMIT
    assert torch.equal(pair.flashinfer.layers[0].keys, pair.reference.layers[0].keys)


@pytest.mark.parametrize("batch", [DECODE, PROMPT, MIXED], ids=["decode", "prompt", "mixed"])
def test_padding_is_neither_written_nor_attended(batch: tuple[list[int], list[int]]) -> None:
    """Rounds by segments: padded tensors, and a result that is written where the next graph reads it."""
    pair, host = Pair(), host_batch(*batch, 16)
    metadata, states, tokens = metadata_of(host), pair.states(host.num_tokens), host.num_tokens
    alone = pair.attend(metadata, states)
    padded = [torch.cat([x, x.new_full((100, *x.shape[1:]), float("nan"))]) for x in states]
    out = alone.new_full((tokens + 100, *alone.shape[1:]), 7.0)
    assert pair.flashinfer.attend(pair.flashinfer.plan(metadata), 0, *padded, None, out) is out
    assert torch.equal(out[:tokens], alone) and bool((out[tokens:] == 7).all())
    pair.expected(metadata, states)
    assert torch.equal(pair.flashinfer.layers[0].keys, pair.reference.layers[0].keys)


@pytest.mark.parametrize("query_len", range(2, 9))
def test_verification_equals_the_reference(pair: Pair, query_len: int) -> None:
    """Rows of q tokens whose last ones end before, on and after a page's end."""
    computed = [0, 16 - query_len, 17 - query_len, 31, 160, 1023, 5]
    assert pair.error([query_len] * len(computed), computed) <= LIMIT


@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_page_sizes_and_layouts(page_size: int, layout: str) -> None:
    assert Pair(page_size=page_size, layout=layout).error(*MIXED) <= LIMIT


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 32, 64, 128])
def test_query_heads(heads: int) -> None:
    pair = Pair(heads=heads)
    assert pair.error(*MIXED) <= LIMIT
    assert pair.error(*DECODE) <= LIMIT


def test_many_rows_and_a_long_one(pair: Pair) -> None:
    assert pair.error([4] * 64 + [900], [*range(0, 64 * 7, 7), 20_000]) <= LIMIT


def test_the_comparison_can_fail(pair: Pair) -> None:
    batch = host_batch(*DECODE)
    keys = pair.flashinfer.layers[0].keys
    before = keys[batch.block_table[3, 0]].clone()
    keys[batch.block_table[3, 0]] = 0
    assert pair.error(*DECODE) > LIMIT
    keys[batch.block_table[3, 0]] = before


def test_equals_the_public_wrapper_bit_for_bit() -> None:
    """With its rule for KV chunks our plans are those of `BatchMLAPagedAttentionWrapper.plan`."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    pair = Pair()
    backend = "fa3" if torch.cuda.get_device_capability()[0] == 9 else "fa2"
    wrapper = BatchMLAPagedAttentionWrapper(torch.zeros(128 << 20, dtype=torch.uint8, device=CUDA), backend=backend)
    for query_lens, computed in (DECODE, MIXED, ODD):
        metadata = metadata_of(host_batch(query_lens, computed))
        states = pair.states(metadata.num_tokens)
        with split_as_by_flashinfer():
            ours = pair.attend(metadata, states)
        arrays = (metadata.query_start_loc, metadata.page_indptr, metadata.page_indices, metadata.seq_lens)
        wrapper.plan(*arrays, 16, 512, 64, 16, True, 192**-0.5, torch.bfloat16, torch.bfloat16)
        pages = pair.flashinfer.layers[0].keys[:, :, 0]
        query = states[0]
        theirs = wrapper.run(query[..., :512], query[..., 512:], pages[..., :512], pages[..., 512:])
        assert torch.equal(ours, theirs)


def test_neighbours_and_drafts_change_no_bit_of_a_row(pair: Pair) -> None:
    """Up to 128 keys a multiprocessor. The keys of all but the last tokens are in the cache already."""
    computed = [37 * i % 250 for i in range(15)] + [600]
    batch = host_batch([4] * 16, computed)
    states = pair.states(64)
    together = pair.attend(metadata_of(batch), states)
    for rows in ([3], [15], [0, 7, 15]):
        for token in (0, 3):
            start = np.array(computed)[rows] + token
            single = rows_batch(np.arange(len(rows) + 1), start, batch.block_table[rows], 16)
            places = [4 * row + token for row in rows]
            alone = pair.attend(metadata_of(single), tuple(x[places] for x in states))
            assert torch.equal(alone, together[places])


@pytest.mark.parametrize(("rows", "query_len"), [(1, 1), (1, 2), (1, 4), (8, 4), (32, 1), (8, 8)])
def test_graph_replays_with_other_lengths_equal_eager(pair: Pair, rows: int, query_len: int) -> None:
    planner = pair.flashinfer.fixed_planner(rows, query_len)
    rng = np.random.default_rng(rows)
    arena, bucket = single_batch_arena(rows, rows * query_len, 2100 // 16, CUDA)
    static = pair.states(rows * query_len)

    def batch(longest: int) -> HostBatch:
        return host_batch([query_len] * rows, rng.integers(0, longest, rows).tolist(), seed=longest)

    plan = planner.plan(stage(batch(8), arena, bucket))
    pair.flashinfer.attend(plan, 0, *static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pair.flashinfer.attend(plan, 0, *static)
    for longest in (30, 500, 2000 if rows < 16 else 900, 3):
        metadata = stage(batch(longest), arena, bucket)
        with check_mode(True):
            planner.replan(metadata.host)
        graph.replay()
        got = out.clone()
        assert torch.equal(got, pair.attend(metadata, static))
        pair.reference.layers[0].keys.copy_(pair.flashinfer.layers[0].keys)
        assert relative_error(got, pair.expected(metadata, static)) <= LIMIT


def test_two_groups_of_pages_share_a_plan(pair: Pair) -> None:
    """Same lengths on other pages, as the draft prefill has them: planned once, attended twice."""
    first = pair.flashinfer.fixed_planner(4, 4)
    second = pair.flashinfer.fixed_planner(4, 4, first)
    arenas = [single_batch_arena(4, 16, 64, CUDA) for _ in range(2)]
    states = pair.states(16)
    seeds = (1, 2)
    batches = [host_batch([4] * 4, [0, 0, 0, 0], seed=seed) for seed in seeds]
    metadata = [stage(batch, *arena) for batch, arena in zip(batches, arenas, strict=True)]
    graphs, outs = [], []
    for planner, each in zip((first, second), metadata, strict=True):
        plan = planner.plan(each)
        pair.flashinfer.attend(plan, 0, *states)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append(pair.flashinfer.attend(plan, 0, *states))
    for computed in ([100, 7, 300, 33], [16, 15, 500, 0]):
        metadata = [stage(host_batch([4] * 4, computed, seed=s), *a) for s, a in zip(seeds, arenas, strict=True)]
        for planner, each, graph, out in zip((first, second), metadata, graphs, outs, strict=True):
            planner.replan(each.host)
            graph.replay()
            assert torch.equal(out, pair.attend(each, states))


def test_replanning_behind_a_slow_kernel() -> None:
    """Plans made while the stream is far behind must not disturb each other."""
    pair = Pair()
    batches = [host_batch([4] * 4, [16 * i + j for j in range(4)], seed=i) for i in range(12)]
    metadata = [metadata_of(batch) for batch in batches]
    states = [pair.states(batch.num_tokens, seed=i) for i, batch in enumerate(batches)]
    torch.cuda.synchronize()
    keep_gpu_busy(200_000_000)
    got = [pair.attend(m, s) for m, s in zip(metadata, states, strict=True)]
    for out, m, s in zip(got, metadata, states, strict=True):
        assert relative_error(out, pair.expected(m, s)) <= LIMIT


def test_planning_never_synchronises(pair: Pair) -> None:
    planner = pair.flashinfer.fixed_planner(4, 4)
    metadata = metadata_of(host_batch([4] * 4, [100, 20, 3, 64]))
    for _ in range(3):
        pair.flashinfer.plan(metadata)
    planner.plan(metadata)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        keep_gpu_busy(1_000_000)
        pair.flashinfer.plan(metadata)
        planner.replan(metadata.host)
        with pytest.raises(RuntimeError, match="synchroniz"):
            metadata.seq_lens.cpu()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_plan_does_not_outlive_its_arrays(pair: Pair) -> None:
    metadata = metadata_of(host_batch(*ODD))
    first = pair.flashinfer.plan(metadata)
    for _ in range(8):
        torch.cuda.synchronize()
        pair.flashinfer.plan(metadata)
    with check_mode(True), pytest.raises(InvariantError, match="planned anew"):
        pair.flashinfer.attend(first, 0, *pair.states(metadata.num_tokens))


def test_other_ranks_are_refused_before_anything_is_allocated() -> None:
    from attention.backends.flashinfer.backend import FlashInferBackend

    backend = FlashInferBackend(CUDA)
    before = torch.cuda.memory_allocated()
    key = AttentionSpec(16, 1, 256 + 32, 256, scale=1.0, value_in_key=True)
    with pytest.raises(UnsupportedAttentionError, match=r"512 .*64 .*given 256 and 32.*torch"):
        GroupRunner(backend, CacheGroup("target", (key,), 8, 16), torch.bfloat16, CUDA)
    assert torch.cuda.memory_allocated() == before
