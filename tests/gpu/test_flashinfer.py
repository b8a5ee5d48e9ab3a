"""FlashInfer's plans: chunks, fa3, graphs, and the two ways they can go wrong. Its kernels one by one, over every
batch and option: tests/attention/test_backends.py."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import keep_gpu_busy

from attention.backends.base import AttentionBackend
from attention.backends.reference import TorchBackend
from attention.batch.host import HostBatch, rows_batch
from attention.batch.metadata import CommonAttentionMetadata, single_batch_arena, stage
from attention.cache.kv_cache import FP8, CacheGroup, KVFormat
from attention.errors import InvariantError
from attention.runner import GroupRunner
from attention.spec import AttentionSpec

CUDA = torch.device("cuda")
NUM_PAGES = 1200
MODEL_FORMAT = KVFormat()
LIMIT = {torch.bfloat16: 3e-3, torch.float16: 1e-3}
ROUNDING = 0.06
"""What e4m3 rounding of normally distributed keys and values may change: each rounds by 2.6 % rms."""

DECODE = ([1, 1, 1, 1], [0, 15, 16, 777])
VERIFY = ([6, 6, 4, 1, 6], [31, 0, 1023, 160, 62])
PROMPT = ([300, 17, 64], [0, 47, 5])
MIXED = ([4, 1, 200, 3, 33], [500, 80, 0, 14, 128])
LONG = ([600, 513], [0, 333])
BEFORE_LONG = ([4, 1, 900], [500, 80, 130])


def attention_spec(heads: tuple[int, int] = (32, 8), dim: int = 128, **options: object) -> AttentionSpec:
    return AttentionSpec(*heads, dim, dim, scale=dim**-0.5, **options)  # type: ignore[arg-type]


def host_batch(
    query_lens: list[int], computed: list[int], page_size: int, seed: int = 0, slots: int = NUM_PAGES * 16
) -> HostBatch:
    """Rows on random pages of a cache of `slots` tokens."""
    start = np.array(computed)
    counts = -(-(start + query_lens) // page_size)
    pages = np.random.default_rng(seed).permutation(np.arange(1, slots // page_size))[: counts.sum()]
    table = np.zeros((len(counts), counts.max()), np.int32)
    table[np.arange(counts.max()) < counts[:, None]] = pages
    return rows_batch(np.concatenate([[0], np.cumsum(query_lens)]), start, table, page_size)


def metadata_of(batch: HostBatch) -> CommonAttentionMetadata:
    arena, bucket = single_batch_arena(batch.num_reqs, batch.num_tokens, batch.block_table.shape[1], CUDA)
    return stage(batch, arena, bucket)


class Pair:
    """The same cache contents under FlashInfer and under the reference, and one batch's inputs."""

    def __init__(
        self,
        key: AttentionSpec,
        dtype: torch.dtype,
        page_size: int = 16,
        layout: str = "NHD",
        format: KVFormat = MODEL_FORMAT,
        backend: AttentionBackend | None = None,
    ) -> None:
        from attention.backends.flashinfer.backend import FlashInferBackend

        group = CacheGroup("test", (key,), NUM_PAGES * 16 // page_size, page_size, layout, format)  # type: ignore[arg-type]
        self.key = key
        self.dtype = dtype
        self.flashinfer = GroupRunner(backend or FlashInferBackend(CUDA), group, dtype, CUDA)
        self.reference = GroupRunner(TorchBackend(CUDA), group, dtype, CUDA)
        generator = torch.Generator(CUDA).manual_seed(1)
        self.sinks = torch.randn(key.num_q_heads, generator=generator, device=CUDA).to(dtype) if key.has_sinks else None
        for ours, other in zip(self.flashinfer.layers, self.reference.layers, strict=True):
            for mine, theirs in ((ours.keys, other.keys), (ours.values, other.values)):
                mine.copy_(torch.randn(mine.shape, generator=generator, device=CUDA, dtype=torch.float32))
                theirs.copy_(mine)

    def states(self, tokens: int, seed: int = 2) -> list[torch.Tensor]:
        generator = torch.Generator(CUDA).manual_seed(seed)
        heads = (self.key.num_q_heads, self.key.num_kv_heads, self.key.num_kv_heads)
        return [
            torch.randn(tokens, n, self.key.head_dim_k, generator=generator, device=CUDA).to(self.dtype) for n in heads
        ]

    def expected(self, metadata: CommonAttentionMetadata, states: list[torch.Tensor]) -> torch.Tensor:
        query, key, value = states
        return self.reference.attend(self.reference.plan(metadata), 0, query.float(), key, value, self.sinks)

    def error(self, batch: HostBatch) -> float:
        metadata, states = metadata_of(batch), self.states(batch.num_tokens)
        query, key, value = states
        out = self.flashinfer.attend(self.flashinfer.plan(metadata), 0, query, key, value, self.sinks)
        return relative_error(out, self.expected(metadata, states))

    def assert_same_caches(self) -> None:
        for mine, theirs in zip(self.flashinfer.layers, self.reference.layers, strict=True):
            for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("chunk_size", [16, 64, 528, 8192])
@pytest.mark.parametrize(
    "batch", [DECODE, VERIFY, PROMPT, MIXED, LONG], ids=["decode", "verify", "prompt", "mixed", "fa3"]
)
def test_attention_in_chunks(batch: tuple[list[int], list[int]], chunk_size: int) -> None:
    """Local attention as virtual rows, on both sides; the reference's own are tested against a dense mask."""
    pair = Pair(attention_spec(chunk_size=chunk_size), torch.bfloat16)
    assert pair.error(host_batch(*batch, 16)) <= LIMIT[torch.bfloat16]
    pair.assert_same_caches()


def test_the_rows_of_attention_in_chunks_arrive_while_the_device_is_busy() -> None:
    """Their copy waits in the stream behind a kernel that spins; the next batch is planned meanwhile."""
    pair = Pair(attention_spec(chunk_size=64), torch.bfloat16)
    batches = [host_batch(*lens, 16, seed=seed) for seed, lens in enumerate((VERIFY, MIXED, PROMPT))]
    inputs = [(metadata_of(batch), pair.states(batch.num_tokens, seed)) for seed, batch in enumerate(batches)]
    keep_gpu_busy(200_000_000)
    outs = [pair.flashinfer.attend(pair.flashinfer.plan(metadata), 0, *states) for metadata, states in inputs]
    for out, (metadata, states) in zip(outs, inputs, strict=True):
        assert relative_error(out, pair.expected(metadata, states)) <= LIMIT[torch.bfloat16]


@pytest.mark.parametrize(
    "batch",
    [VERIFY, PROMPT, MIXED, LONG, BEFORE_LONG],
    ids=["verify", "prompt", "mixed", "fa3", "fa2 and fa3"],
)
def test_padding_is_neither_written_nor_attended(batch: tuple[list[int], list[int]]) -> None:
    """Rounds by segments: padded tensors, and a result that is written where the next graph reads it."""
    pair, host = Pair(attention_spec(), torch.bfloat16), host_batch(*batch, 16)
    metadata, states, tokens = metadata_of(host), pair.states(host.num_tokens), host.num_tokens
    alone = pair.flashinfer.attend(pair.flashinfer.plan(metadata), 0, *states)
    padded = [torch.cat([x, x.new_full((100, *x.shape[1:]), float("nan"))]) for x in states]
    out = torch.full_like(padded[0], 7.0)
    assert pair.flashinfer.attend(pair.flashinfer.plan(metadata), 0, *padded, None, out) is out
    assert torch.equal(out[:tokens], alone) and bool((out[tokens:] == 7).all())
    assert relative_error(alone, pair.expected(metadata, states)) <= 3e-3
    pair.assert_same_caches()


def test_what_8_bits_change_is_their_rounding() -> None:
    batch = host_batch([300, 64, 17], [0, 0, 0], 16)
    rounded, exact = (
        Pair(attention_spec(), torch.bfloat16, format=KVFormat(FP8)),
        Pair(attention_spec(), torch.bfloat16),
    )
    metadata, states = metadata_of(batch), exact.states(batch.num_tokens)
    out = rounded.flashinfer.attend(rounded.flashinfer.plan(metadata), 0, *states)
    assert 5e-3 < relative_error(out, exact.expected(metadata, states)) <= ROUNDING


def test_values_beyond_the_range_are_cut_off_alike() -> None:
    pair = Pair(attention_spec(), torch.bfloat16, format=KVFormat(FP8))
    batch = host_batch(*VERIFY, 16)
    metadata, (query, key, value) = metadata_of(batch), pair.states(batch.num_tokens)
    pair.flashinfer.attend(pair.flashinfer.plan(metadata), 0, query, key * 1000, value * 1000)
    pair.expected(metadata, [query, key * 1000, value * 1000])
    pair.assert_same_caches()
    assert pair.flashinfer.layers[0].keys.float().abs().max() == 448


def test_a_forgotten_scale_shows() -> None:
    pair = Pair(attention_spec(), torch.bfloat16, format=KVFormat(FP8, ((0.7, 1.3),)))
    pair.flashinfer.layers = tuple(replace(layer, key_scale=1.0) for layer in pair.flashinfer.layers)
    assert pair.error(host_batch(*VERIFY, 16)) > 4e-3


def routes_of(pair: Pair, batch: HostBatch) -> list[str]:
    return [kernel.route for kernel, _, _ in pair.flashinfer.plan(metadata_of(batch)).plans[pair.key].parts]


@pytest.mark.parametrize(("batch", "routes"), [(LONG, ["fa3"]), (BEFORE_LONG, ["fa2", "fa3"]), (MIXED, ["fa2", "fa2"])])
def test_long_prompt_chunks_take_fa3(batch: tuple[list[int], list[int]], routes: list[str]) -> None:
    pair = Pair(attention_spec(), torch.bfloat16)
    assert routes_of(pair, host_batch(*batch, 16)) == routes
    assert pair.error(host_batch(*batch, 16)) <= 3e-3


@pytest.mark.parametrize(("page_size", "layout"), [(1, "NHD"), (64, "NHD"), (32, "HND")])
def test_fa3_pages_and_layouts(page_size: int, layout: str) -> None:
    pair = Pair(attention_spec((28, 4)), torch.bfloat16, page_size, layout)
    assert routes_of(pair, host_batch(*LONG, page_size)) == ["fa3"]
    assert pair.error(host_batch(*LONG, page_size)) <= 3e-3


def test_the_comparison_can_fail() -> None:
    pair = Pair(attention_spec(), torch.bfloat16)
    batch = host_batch(*VERIFY, 16)
    pair.flashinfer.layers[0].values[batch.block_table[0, 0]] = 0
    assert pair.error(batch) > 3e-3


def test_replanning_behind_a_slow_kernel() -> None:
    """Plans made while the stream is far behind must not disturb each other."""
    pair = Pair(attention_spec(), torch.bfloat16)
    batches = [host_batch([6] * 4, [16 * i + j for j in range(4)], 16, seed=i) for i in range(12)]
    metadata = [metadata_of(batch) for batch in batches]
    states = [pair.states(batch.num_tokens, seed=i) for i, batch in enumerate(batches)]
    torch.cuda.synchronize()
    keep_gpu_busy(200_000_000)
    got = [pair.flashinfer.attend(pair.flashinfer.plan(m), 0, *s) for m, s in zip(metadata, states, strict=True)]
    for out, m, s in zip(got, metadata, states, strict=True):
        assert relative_error(out, pair.expected(m, s)) <= 3e-3


def test_a_plan_does_not_outlive_its_wrapper(check_mode_on: None) -> None:
    pair = Pair(attention_spec(), torch.bfloat16)
    metadata = metadata_of(host_batch(*VERIFY, 16))
    first = pair.flashinfer.plan(metadata)
    torch.cuda.synchronize()
    for _ in range(4):  # on a busy machine a third wrapper was made for the first plan
        pair.flashinfer.plan(metadata)
    with pytest.raises(InvariantError, match="planned anew"):
        pair.flashinfer.attend(first, 0, *pair.states(metadata.num_tokens))


@pytest.fixture
def check_mode_on():  # type: ignore[no-untyped-def]
    from fakes import check_mode

    with check_mode(True):
        yield


@pytest.mark.parametrize(
    ("rows", "query_len", "cache"),
    [(1, 1, None), (1, 6, None), (8, 6, None), (32, 1, None), (40, 6, None), (8, 4, None), (8, 6, FP8), (1, 1, FP8)],
)
def test_graph_equals_eager(rows: int, query_len: int, cache: torch.dtype | None) -> None:
    """One captured launch, planned anew for other lengths, gives what an eager plan gives. 40 rows are planned once."""
    pair = Pair(attention_spec(), torch.bfloat16, format=KVFormat(cache))
    planner = pair.flashinfer.fixed_planner(rows, query_len)
    rng = np.random.default_rng(rows)
    arena, bucket = single_batch_arena(rows, rows * query_len, 64, CUDA)
    static = pair.states(rows * query_len)
    eager = copy.copy(pair.flashinfer)

    def staged(longest: int) -> CommonAttentionMetadata:
        computed = rng.integers(0, longest, rows).tolist()
        return stage(host_batch([query_len] * rows, computed, 16, seed=longest), arena, bucket)

    metadata = staged(8)
    plan = planner.plan(metadata)
    pair.flashinfer.attend(plan, 0, *static)
    pair.expected(metadata, static)  # both caches hold the same from here on
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pair.flashinfer.attend(plan, 0, *static)
    for longest in (30, 500, 1000 if rows == 1 else 400, 3):
        metadata = staged(longest)
        planner.replan(metadata.host)
        graph.replay()
        assert relative_error(out, pair.expected(metadata, static)) <= 3e-3
        assert relative_error(eager.attend(eager.plan(metadata), 0, *static), out.float()) <= 3e-3


def test_planning_never_synchronises() -> None:
    """Nor does it where the device is so far behind that every plan needs a wrapper of its own."""
    pair = Pair(attention_spec(), torch.bfloat16)
    planner = pair.flashinfer.fixed_planner(4, 6)
    metadata = metadata_of(host_batch([6] * 4, [100, 20, 3, 64], 16))
    for _ in range(3):
        pair.flashinfer.plan(metadata)
    planner.plan(metadata)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        keep_gpu_busy(200_000_000)
        for _ in range(6):
            pair.flashinfer.plan(metadata)
        planner.plan(metadata)
        with pytest.raises(RuntimeError, match="synchroniz"):
            metadata.seq_lens.cpu()
    finally:
        torch.cuda.set_sync_debug_mode("default")
