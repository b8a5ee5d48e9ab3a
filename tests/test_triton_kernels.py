"""The Triton kernels in Triton's interpreter: the source that runs on a GPU, on a machine without one.

The interpreter knows nothing of dependent launches, pipelines and shared memory, and cuts bfloat16 off where a GPU
rounds (so float16 here); tests/gpu runs the compiled kernels.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from fakes import check_mode

from attention.backends.flashinfer.short_queries import PackedKernel, PackedKernels, packed_scratch, whole_batch
from attention.backends.invariant import InvariantBackend
from attention.batch.host import rows_batch, slots_of
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import FP8, CacheGroup, KVFormat, KVLayout, LayerKV, allocate
from attention.cascade.kernel import launch_prefix, prefix_tiling, sum_shapes
from attention.kernels.cache_write import write_kv
from attention.kernels.packed_kernel import Scratch, SharedKeys, Tiling, launch_packed
from attention.spec import AttentionSpec
from specdec.ops.elementwise import add_rms_norm, rms_norm, rotated, rotated_together, silu_product, token_major
from specdec.ops.elementwise_kernel import launch_norm, launch_rotation, launch_silu_product
from specdec.ops.greedy_kernel import launch_greedy
from specdec.ops.greedy_rows import greedy_drafts
from specdec.ops.linear_kernel import fits, launch_invariant_linear, launch_linear
from specdec.ops.mixtures.paired import expert_matmul
from specdec.ops.mixtures.routed_kernel import launch_expert_matmul
from tests.attention.cascade.two_levels import shared_prefix
from tests.local_rounds import fixed_rounds

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def cache(
    key: AttentionSpec, pages: int, page_size: int, layout: KVLayout, dtype: torch.dtype = torch.float16
) -> LayerKV:
    layer = allocate(CacheGroup("test", (key,), pages, page_size, layout), dtype, CPU)[0]
    layer.keys.normal_()
    layer.values.normal_()
    return layer


def by_slot(pages: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """[slots, Hkv, D] of a layer's keys or values."""
    return (pages if layout == "NHD" else pages.transpose(1, 2)).flatten(0, 1)


def attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, both_ways: int | None = None
) -> torch.Tensor:
    """query [q, Hq, D], the last of keys and values [L, Hkv, D] -> [q, Hq, D] float64; causal, or both ways in a window
    of so many positions."""
    group = query.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,lhd->hql", query.double(), k) * scale
    places = torch.arange(len(keys))
    own = (len(keys) - len(query) + torch.arange(len(query)))[:, None]
    hidden = places[None] > own if both_ways is None else (places[None] - own).abs() >= both_ways
    return torch.einsum("hql,lhd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


WHOLE, IN_PARTS, WIDE = Tiling(64, 2, 3, 1, 1 << 20), Tiling(32, 2, 5, 64, 40), Tiling(128, 4, 3, 8, 128)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "query_len"), [((8, 2), 128, 16, 6), ((4, 2), 64, 1, 1), ((6, 2), 64, 32, 5)]
)
@pytest.mark.parametrize(
    ("tiles", "layout"),
    [
        pytest.param(WHOLE, "NHD", id="whole-NHD"),
        pytest.param(IN_PARTS, "NHD", id="in parts-NHD", marks=pytest.mark.long),
        pytest.param(IN_PARTS, "HND", id="in parts-HND"),
        pytest.param(WIDE, "NHD", id="wide-NHD", marks=pytest.mark.long),
        pytest.param(WIDE, "HND", id="wide-HND"),
        pytest.param(WHOLE, "HND", id="whole-HND", marks=pytest.mark.long),
    ],
)
@pytest.mark.cases(1)
def test_packed_attention(
    heads: tuple[int, int],
    dim: int,
    page_size: int,
    query_len: int,
    layout: KVLayout,
    tiles: Tiling,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lengths at the edges of pages, of tiles of keys and of parts; the first part of a row may see nothing of it."""
    monkeypatch.setattr("attention.kernels.packed_kernel.tiling", lambda *_: tiles)
    check_packed(AttentionSpec(*heads, dim, dim, dim**-0.5), page_size, query_len, layout)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [WHOLE, IN_PARTS], ids=["whole", "in parts"])
@pytest.mark.parametrize(("window", "query_len"), [(None, 8), (3, 8), (70, 5), (1000, 8)])
@pytest.mark.cases(1)
def test_packed_attention_both_ways(
    window: int | None, query_len: int, tiles: Tiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window on either side of each query, narrower than the block, wider, and wider than the row."""
    monkeypatch.setattr("attention.kernels.packed_kernel.tiling", lambda *_: tiles)
    key = AttentionSpec(8, 2, 64, 64, 0.125, window=window, causal=False)
    check_packed(key, 16, query_len, "NHD")


def check_packed(key: AttentionSpec, page_size: int, query_len: int, layout: KVLayout) -> None:
    heads, dim = (key.num_q_heads, key.num_kv_heads), key.head_dim_k
    both_ways = None if key.causal else key.window or 1 << 20
    lengths = np.array([query_len, 64, 65, 70, 128, 129, 135, 300])
    rows = len(lengths)
    counts = -(-lengths // page_size)
    layer = cache(key, int(counts.sum()) + 1, page_size, layout)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    pages = np.random.default_rng(1).permutation(np.arange(1, counts.sum() + 1))
    fused = torch.randn(rows * query_len, heads[0] + 1, dim, dtype=torch.float16)
    query, out = fused[:, :-1], torch.zeros(rows * query_len, heads[0], dim, dtype=torch.float16)
    args = [torch.from_numpy(x.astype(np.int32)) for x in (indptr, pages, (lengths - 1) % page_size + 1)]
    scratch = Scratch.on(torch.device("cpu"), query_len * heads[0] // heads[1], dim)
    for x in (scratch.sums, scratch.stats):
        x.fill_(torch.nan)
    launch_packed(query, layer, key, *args, out, scratch, query_len)
    assert not scratch.arrived.any()
    keys, values = by_slot(layer.keys, layout), by_slot(layer.values, layout)
    for row, length in enumerate(lengths):
        own = pages[indptr[row] : indptr[row + 1]]
        slots = torch.from_numpy((own[:, None] * page_size + np.arange(page_size)).reshape(-1)[:length])
        tokens = slice(row * query_len, (row + 1) * query_len)
        expected = attended(query[tokens], keys[slots], values[slots], key.scale, both_ways)
        assert (out[tokens] - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "size", "heads", "dim", "page_size", "query_len", "layout"),
    [
        (3, 64, (8, 2), 64, 16, 6, "NHD"),
        pytest.param(3, 64, (6, 2), 64, 32, 5, "HND", marks=pytest.mark.long),
        pytest.param(3, 64, (4, 2), 64, 1, 1, "HND", marks=pytest.mark.slow),
        pytest.param(1, 128, (8, 2), 64, 16, 6, "HND", marks=pytest.mark.long),
        pytest.param(1, 128, (6, 2), 64, 32, 5, "NHD", marks=pytest.mark.slow),
        pytest.param(1, 128, (4, 2), 64, 1, 1, "NHD", marks=pytest.mark.long),
        pytest.param(3, 64, (6, 2), 64, 32, 5, "NHD", marks=pytest.mark.long),
        pytest.param(3, 64, (4, 2), 64, 1, 1, "NHD", marks=pytest.mark.long),
        pytest.param(3, 64, (8, 2), 64, 16, 6, "HND", marks=pytest.mark.long),
        pytest.param(1, 128, (8, 2), 64, 16, 6, "NHD", marks=pytest.mark.long),
        pytest.param(1, 128, (6, 2), 64, 32, 5, "HND", marks=pytest.mark.long),
        pytest.param(1, 128, (4, 2), 64, 1, 1, "HND", marks=pytest.mark.long),
    ],
)
@pytest.mark.thorough
def test_packed_attention_after_a_shared_prefix(
    heads: tuple[int, int],
    dim: int,
    page_size: int,
    query_len: int,
    layout: KVLayout,
    parts: int,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same launch for any prefix: rows that share it or do not, prefixes at the edges of tiles and parts, none.

    A row's own keys are in several parts, of which the first alone begins with the prefix. size: of the prefix's tiles.
    """
    monkeypatch.setattr("attention.kernels.packed_kernel.tiling", lambda *_: Tiling(32, 2, 5, 64, 40))
    key, rows = AttentionSpec(*heads, dim, dim, dim**-0.5), 9
    scratch = Scratch.on(CPU, query_len * heads[0] // heads[1], dim)
    pages = torch.zeros(rows, dtype=torch.int32)
    tiling = prefix_tiling(rows * query_len * heads[0] // heads[1], heads[1], 4, 0)
    tiling = replace(tiling, queries=size, keys=size, parts=parts, least_keys=64)
    sums, stats = sum_shapes(key, rows * query_len, tiling)
    shared = SharedKeys(pages, torch.empty(sums), torch.empty(stats), tiling)
    query = torch.randn(rows * query_len, heads[0] + 1, dim, dtype=torch.float16)[:, :-1]
    for prefix, members in ((0, ()), (64, range(rows)), (224, (0, 8)), (32, range(3, rows))):
        count = prefix // page_size
        members = np.array(members, np.int64)
        lengths = query_len + np.arange(rows) % 3 * 40
        lengths[members] += prefix
        table, layer = _rows_over(lengths, members, count, key, page_size, layout)
        batch = rows_batch(np.arange(rows + 1) * query_len, lengths - query_len, table, page_size)
        found = shared_prefix(table, batch.num_computed_tokens, page_size)
        by_row = np.zeros(rows, np.int32) if found is None else found.pages_by_row(rows)
        assert by_row.max() == count and (by_row > 0).sum() == len(members)
        pages.copy_(torch.from_numpy(by_row))
        for x in (shared.sums, shared.stats, scratch.sums, scratch.stats):
            x.fill_(torch.nan)
        indptr, indices, last = (
            torch.from_numpy(x) for x in (batch.page_indptr, batch.page_indices, batch.last_page_len)
        )
        out = torch.zeros(rows * query_len, heads[0], dim, dtype=torch.float16)
        launch_prefix(query, layer, key, indptr, indices, shared, query_len)
        launch_packed(query, layer, key, indptr, indices, last, out, scratch, query_len, shared)
        assert not scratch.arrived.any()
        alone = np.repeat(by_row == 0, query_len)
        assert shared.sums[:, alone].isnan().all() and not shared.sums[0, ~alone].isnan().any()
        keys, values = by_slot(layer.keys, layout), by_slot(layer.values, layout)
        for row, length in enumerate(lengths):
            slots = torch.from_numpy(slots_of(table, np.full(length, row), np.arange(length), page_size))
            tokens = slice(row * query_len, (row + 1) * query_len)
            expected = attended(query[tokens], keys[slots], values[slots], key.scale)
            assert (out[tokens] - expected).norm() <= 2e-3 * expected.norm(), (prefix, row)


def _rows_over(
    lengths: np.ndarray, members: np.ndarray, count: int, key: AttentionSpec, page_size: int, layout: KVLayout
) -> tuple[np.ndarray, LayerKV]:
    """Block table of rows of these lengths, the first `count` pages of `members` being the same; and a cache."""
    width = int((-(-lengths // page_size)).max())
    own = np.random.default_rng(2).permutation(np.arange(1, count + len(lengths) * width + 1)).astype(np.int32)
    table = own[count:].reshape(len(lengths), width).copy()
    table[members, :count] = own[:count]
    table[np.arange(width) >= -(-lengths // page_size)[:, None]] = 0
    return table, cache(key, len(own) + 1, page_size, layout)


def test_packed_kernel_follows_its_part() -> None:
    """`PackedKernel` launches over the device arrays of the last plan."""
    from attention.backends.flashinfer.wrapper import Part

    key = AttentionSpec(4, 2, 64, 64, 0.125)
    layer = cache(key, 4, 16, "NHD")
    host = np.zeros(2, np.int32)
    kernel, outs = PackedKernel(key, packed_scratch(torch.device("cpu"))), []
    query = torch.randn(2, 4, 64, dtype=torch.float16)
    for page, length in ((1, 9), (3, 16)):
        starts, last, pages = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [length], [page]))
        kernel.plan(Part(host, host, host, starts, starts, last, pages, 0, 2))
        outs.append(torch.zeros_like(query))
        kernel.run(query, layer, outs[-1], None)
        expected = attended(query, layer.keys[page, :length], layer.values[page, :length], key.scale)
        assert (outs[-1] - expected).norm() <= 2e-3 * expected.norm()
    assert kernel.generation == 2 and kernel.keeps(host)


@pytest.mark.slow
@pytest.mark.thorough
def test_packed_kernel_of_a_shape_finds_what_rows_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel, as a graph holds it: batches without shared pages, with, with others; sent only where they change."""
    from attention.cascade import page_sharing
    from attention.cascade.page_sharing import SharedRows

    monkeypatch.setattr(page_sharing, "LEAST_GAIN", 0.0)
    rows, query_len, size, key = 4, 2, 16, AttentionSpec(4, 2, 64, 64, 0.125)
    kernels = PackedKernels(CPU, cascades=True)
    kernel = kernels.kernel(key, torch.float16, rows, query_len)
    layer, shared = cache(key, 40, size, "NHD"), kernel.sharing
    assert isinstance(shared, SharedRows) and kernels.kernel(key, torch.float16, 3, query_len).sharing is None
    own = np.arange(8, 8 + 4 * rows, dtype=np.int32).reshape(rows, 4)
    with_two, with_three = own.copy(), own.copy()
    with_two[:, :2] = [1, 2]
    with_three[1:, :3] = [5, 4, 3]
    copies, found = [], []
    for table in (own, with_two, with_two, with_three, own):
        batch = rows_batch(np.arange(rows + 1) * query_len, np.array([50, 49, 48, 51]), table, size)
        metadata = stage(batch, *single_batch_arena(rows, rows * query_len, 4, CPU))
        query = torch.randn(rows * query_len, 4, 64, dtype=torch.float16)
        once = kernels.kernel(key, torch.float16, rows, query_len, batch)
        assert once.sharing is not None and once.sharing.launches == (table is not own)
        for each in (kernel, once):
            each.plan(whole_batch(metadata))
            each.share(batch)
            out = torch.zeros_like(query)
            shared.shared.sums.fill_(torch.nan)
            each.run(query, layer, out, None)
            for row, length in enumerate(batch.seq_lens):
                slots = torch.from_numpy(slots_of(table, np.full(length, row), np.arange(length), size))
                tokens = slice(row * query_len, (row + 1) * query_len)
                keys, values = (by_slot(pages, "NHD")[slots] for pages in (layer.keys, layer.values))
                expected = attended(query[tokens], keys, values, key.scale)
                assert (out[tokens] - expected).norm() <= 2e-3 * expected.norm()
        copies.append(shared.num_copies)
        found.append(shared.shared.pages.tolist())
    assert found == [[0] * 4, [2] * 4, [2] * 4, [0, 3, 3, 3], [0] * 4] and copies == [0, 1, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("query_len", [1, 6])
@pytest.mark.cases(1)
def test_batch_invariant_attention_in_chunks_of_fixed_rounds(query_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual rows with many queries, few and none, at the addresses of the first round."""
    monkeypatch.setattr("attention.staging._RING", 1)
    key = AttentionSpec(4, 2, 64, 64, 0.125, chunk_size=64)
    firsts = [[0, 61], [63, 300], [58, 64]]
    with check_mode(False):  # a recorded launch runs no Python again
        rounds = fixed_rounds(InvariantBackend(), key, torch.float16, CPU, firsts, query_len, lambda launch: launch)
        for own, expected in rounds:
            assert (own - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize(
    ("tokens", "width", "has_bias"),
    [
        *[(1, 96, True), (16, 256, False), (17, 256, True), (40, 96, False), (70, 256, False)],
        pytest.param(513, 96, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.cases(1)
def test_batch_invariant_matmuls(tokens: int, width: int, has_bias: bool) -> None:
    """Every size of tiles, over more weight rows than a group of tiles has, the last tile cut off."""
    dtype = torch.float16
    wide = torch.randn(tokens, width + 8, dtype=dtype)
    x, weight, bias = wide[:, :width], torch.randn(8 * 128 + 70, width, dtype=dtype), torch.randn(8 * 128 + 70)
    added = bias.to(dtype) if has_bias else None
    right = x.double() @ weight.double().T + (0 if added is None else added.double())
    got = launch_invariant_linear(x, weight, added)
    torch.testing.assert_close(got.double(), right, rtol=2 * torch.finfo(dtype).eps, atol=1e-2)


@pytest.mark.parametrize("width", [48, 512])
@pytest.mark.cases(1)
def test_norm(width: int) -> None:
    dtype = torch.float16
    wide = torch.randn(1, 7, width + 16, dtype=dtype)
    x, residual, weight = wide[..., :width], torch.randn(1, 7, width, dtype=dtype), torch.randn(width, dtype=dtype)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(launch_norm(x, None, weight, 1e-5)[1], rms_norm(x, weight, 1e-5), rtol=2 * step, atol=0)
    total, normed = launch_norm(x, residual, weight, 1e-5)
    expected = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected[0])
    torch.testing.assert_close(normed, expected[1], rtol=2 * step, atol=0)
    for ours, right in ((normed, expected[1]), (launch_norm(x, None, weight, 1e-5)[1], rms_norm(x, weight, 1e-5))):
        assert (ours != right).float().mean() < 0.02, "rounded before the weight, as torch does"


@pytest.mark.parametrize(("heads", "dim"), [((32, 8), 16), ((3, 1), 24)])
def test_rotation(heads: tuple[int, int], dim: int) -> None:
    dtype = torch.float16
    q, k = (x.transpose(1, 2) for x in torch.randn(1, 5, sum(heads), dim, dtype=dtype).split(heads, 2))
    cos, sin = torch.randn(2, 1, 1, 5, dim, dtype=dtype)
    outs = token_major(q), token_major(k)
    launch_rotation(q, k, cos, sin, outs)
    for ours, right in zip(outs, rotated(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, right, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert ours.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("heads", "dim"), [((32, 8), 16), ((3, 1), 24)])
def test_rotation_of_a_draft_head(heads: tuple[int, int], dim: int) -> None:
    """Both into one tensor, with cos and sin in float32 for both halves."""
    fused = torch.randn(5, sum(heads) + 2, dim, dtype=torch.float16)
    q, k, _ = fused.split((*heads, 2), 1)
    cos, sin = torch.randn(2, 5, 1, dim // 2)
    out = torch.full((5, sum(heads), dim), 7.0, dtype=torch.float16)
    outs = tuple(x.transpose(0, 1)[None] for x in out.split(heads, 1))
    launch_rotation(*(x.transpose(0, 1)[None] for x in (q, k, cos, sin)), outs)
    assert torch.equal(out, rotated_together(q, k, cos, sin))


@pytest.mark.parametrize("width", [48, 1100])
def test_silu_product(width: int) -> None:
    """Of the halves of one matmul's result, and of two tensors."""
    fused = torch.randn(1, 5, 2 * width, dtype=torch.float16)
    gate, up = fused.split(width, -1)
    for args in ((gate, up), (gate[0].contiguous(), up[0]), (gate.transpose(1, 2).contiguous().transpose(1, 2), up)):
        out = launch_silu_product(*args)
        assert out.is_contiguous()
        torch.testing.assert_close(out, silu_product(*args), rtol=torch.finfo(torch.float16).eps, atol=1e-7)


@pytest.mark.parametrize("tokens", [1, 6, 16])
def test_linear(tokens: int) -> None:
    x, weight = torch.randn(tokens, 256, dtype=torch.float16), torch.randn(100, 256, dtype=torch.float16)
    assert fits(x, weight)
    torch.testing.assert_close(launch_linear(x, weight).double(), x.double() @ weight.double().T, rtol=2e-3, atol=2e-2)


def test_rows_that_are_no_whole_tiles_do_not_fit() -> None:
    x, weight = torch.randn(2, 192).half(), torch.randn(8, 192).half()
    assert fits(x[:, :128], weight[:, :128]) and not fits(x, weight)
    assert not fits(x[:, :128], torch.randn(128, 8).half().T) and not fits(
        torch.randn(128, 2).half().T, weight[:, :128]
    )


@pytest.mark.parametrize("vocab", [5, 4096, 9000])
def test_greedy(vocab: int) -> None:
    """Few distinct values: the first of equal ones counts."""
    logits = torch.randint(0, 50, (3, vocab + 7)).half()[:, :vocab]
    assert torch.equal(launch_greedy(logits), logits.float().argmax(-1))


def test_greedy_takes_a_nan_for_the_largest() -> None:
    """As torch's arg max does: the first one, also after an infinity and in a later part."""
    logits = torch.randn(3, 9000).half()
    logits[0, 17], logits[1, [40, 8000]], logits[2, [3, 8999]] = torch.nan, torch.nan, torch.inf
    logits[0, 20] = logits[1, 8500] = torch.inf
    assert torch.equal(launch_greedy(logits), logits.float().argmax(-1))


def test_greedy_finds_the_largest_in_any_part() -> None:
    logits = torch.randn(4, 9000).half()
    at = torch.tensor([5, 4095, 4096, 8999])
    logits[torch.arange(4), at] = 20.0
    assert torch.equal(launch_greedy(logits), at)


@pytest.mark.parametrize("mapped", [True, False])
def test_greedy_drafts(mapped: bool) -> None:
    """The target's ids go into one column of the drafts, by the launch that finds them."""
    logits, drafts = torch.randint(0, 50, (3, 9000)).half(), torch.full((5, 4), -7)
    target_ids = torch.randperm(20_000)[:9000].sort().values if mapped else None
    ids = launch_greedy(logits, target_ids, drafts[:3, 2])
    right = logits.float().argmax(-1)
    assert torch.equal(ids, right) and torch.equal(drafts[:3, 2], right if target_ids is None else target_ids[right])
    assert int((drafts == -7).sum()) == 17
    again = torch.full((3,), -7)
    assert torch.equal(greedy_drafts(logits, target_ids, again), right) and torch.equal(again, drafts[:3, 2])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_cache_writes(layout: KVLayout) -> None:
    layer = cache(AttentionSpec(4, 3, 24, 24, 1.0), 5, 8, layout)
    expected = [by_slot(pages.clone(), layout) for pages in (layer.keys, layer.values)]
    states = torch.randn(6, 7, 24, dtype=torch.float16)
    key, value, slots = states[:, :3], states[:, 4:], torch.tensor([9, 38, 10, 17, 8, 31])
    write_kv(layer, key, value, slots)
    for pages, rows, new in zip((layer.keys, layer.values), expected, (key, value), strict=True):
        rows[slots] = new
        assert torch.equal(by_slot(pages, layout), rows)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_cache_writes_of_values_of_another_width(layout: KVLayout) -> None:
    """Wider ones as well: what lies beside a slot stays."""
    for dim_k, dim_v in ((24, 16), (8, 40)):
        layer = allocate(
            CacheGroup("test", (AttentionSpec(4, 3, dim_k, dim_v, 1.0),), 3, 4, layout), torch.float16, CPU
        )[0]
        key, value, slots = torch.randn(2, 3, dim_k).half(), torch.randn(2, 3, dim_v).half(), torch.tensor([9, 6])
        write_kv(layer, key, value, slots)
        for pages, new in ((layer.keys, key), (layer.values, value)):
            expected = torch.zeros_like(by_slot(pages, layout))
            expected[slots] = new
            assert torch.equal(by_slot(pages, layout), expected)


def test_cache_writes_in_8_bits() -> None:
    """Numbers that 8 bits hold, as the interpreter cuts others off: keys and values by their own scale, clamped."""
    group = CacheGroup("test", (AttentionSpec(4, 2, 16, 16, 1.0),), 2, 4, format=KVFormat(FP8, ((0.5, 0.125),)))
    (layer,) = allocate(group, torch.float16, CPU)
    states = torch.tensor([1.0, -2.0, 0.25, 96.0, -96.0, 0.0, 6000.0, -6000.0]).half().repeat(2, 2, 2)
    write_kv(layer, states, states, torch.tensor([5, 6]))
    for pages, scale in ((layer.keys, 0.5), (layer.values, 0.125)):
        right = (states.float() / scale).clamp(-448, 448).to(FP8).float()
        assert torch.equal(by_slot(pages, "NHD")[[5, 6]].float(), right)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_latent_writes(layout: KVLayout) -> None:
    key = AttentionSpec(4, 1, 72, 64, 1.0, value_in_key=True)
    layer = allocate(CacheGroup("test", (key,), 4, 8, layout), torch.float16, CPU)[0]
    latents, slots = torch.randn(3, 1, 72, dtype=torch.float16), torch.tensor([30, 9, 10])
    write_kv(layer, latents, latents, slots)
    expected = torch.zeros(32, 1, 72, dtype=torch.float16)
    expected[slots] = latents
    assert torch.equal(by_slot(layer.keys, layout), expected)


@pytest.mark.parametrize(("tokens", "same"), [(1, True), (6, True), (6, False)])
def test_matmuls_of_experts(tokens: int, same: bool) -> None:
    """Fewer pairs than experts and more; one input a token and one a pair."""
    stack, index = torch.randn(8, 40, 72, dtype=torch.float16), torch.randint(0, 8, (tokens, 3))
    x = torch.randn(tokens, 1 if same else 3, 72, dtype=torch.float16)
    out = launch_expert_matmul(x, stack, None, index)
    torch.testing.assert_close(out, expert_matmul(x, stack, None, index), rtol=2e-3, atol=2e-2)


def test_more_pairs_of_an_expert_than_a_tile() -> None:
    """Of 40 pairs of each expert 16 are multiplied at a time."""
    stack, x = torch.randn(2, 40, 72, dtype=torch.float16), torch.randn(40, 1, 72, dtype=torch.float16)
    index = torch.tensor([[0, 1]] * 40)
    out = launch_expert_matmul(x, stack, None, index)
    torch.testing.assert_close(out, expert_matmul(x, stack, None, index), rtol=2e-3, atol=2e-2)
