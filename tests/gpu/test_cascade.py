"""Cascade attention on a GPU: equal to flat attention over the same shared pages, for any prefix in one graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes import results_of

from attention.backends.flashinfer.backend import FlashInferBackend
from attention.batch.host import HostBatch, rows_batch
from attention.batch.metadata import single_batch_arena, stage
from attention.cascade import page_sharing as sharing
from specdec.requests.sampling import SamplingParams
from tests.agreement import agreement, drafted
from tests.gpu.test_flashinfer import (
    CUDA,
    LIMIT,
    NUM_PAGES,
    Pair,
    attention_spec,
    host_batch,
    metadata_of,
    relative_error,
)
from tests.gpu.test_graph_rounds import PROMPTS, VOCAB, model


class FixedOnly(FlashInferBackend):
    """Without FlashInfer's own kernels, which take minutes to build."""

    def builder(self, *args: Any) -> Any:
        return None


def cascade_pair(
    heads: tuple[int, int], dim: int, dtype: torch.dtype, page_size: int = 16, layout: str = "NHD"
) -> Pair:
    backend = FixedOnly(CUDA)
    backend.cascade()
    return Pair(attention_spec(heads, dim), dtype, page_size, layout, backend=backend)


def shared_batch(
    rows: int, query_len: int, prefix: int, own: np.ndarray, members: np.ndarray, page_size: int
) -> HostBatch:
    """Rows with `own` keys before their queries; `members` have `prefix` keys before these, on the same pages."""
    computed = own.copy()
    computed[members] += prefix
    batch = host_batch([query_len] * rows, own.tolist(), page_size, seed=prefix)
    pages = prefix // page_size
    free = np.setdiff1d(np.arange(1, NUM_PAGES * 16 // page_size), batch.block_table)
    table = np.zeros((rows, batch.block_table.shape[1] + pages), np.int32)
    table[:, : batch.block_table.shape[1]] = batch.block_table
    table[members, pages:] = batch.block_table[members]
    table[members, :pages] = free[:pages]
    return rows_batch(np.arange(rows + 1) * query_len, computed, table, page_size)


def take_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cost rule says."""
    monkeypatch.setattr(sharing, "LEAST_GAIN", 0.0)


@pytest.fixture
def sharings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the kernels of fixed shapes share, as they are made."""
    return results_of(monkeypatch, sharing.Sharing, "fixed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "query_len"),
    [((32, 8), 128, 16, 6), ((32, 8), 128, 16, 1), ((32, 8), 64, 64, 8), ((8, 8), 128, 1, 3), ((28, 4), 128, 32, 4)],
)
def test_replays_serve_any_prefix(
    heads: tuple[int, int],
    dim: int,
    page_size: int,
    query_len: int,
    layout: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    sharings: list[Any],
) -> None:
    """One captured graph: no prefix, prefixes of all rows and of some, at the edges of tiles and parts, none again."""
    take_always(monkeypatch)
    rows, rng = 33, np.random.default_rng(0)
    pair = cascade_pair(heads, dim, dtype, page_size, layout)
    planner = pair.flashinfer.fixed_planner(rows, query_len)
    arena, bucket = single_batch_arena(rows, rows * query_len, 9000 // page_size, CUDA)
    static = pair.states(rows * query_len)
    metadata = stage(host_batch([query_len] * rows, [0] * rows, page_size), arena, bucket)
    plan = planner.plan(metadata)
    pair.flashinfer.attend(plan, 0, *static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pair.flashinfer.attend(plan, 0, *static)
    for mine, theirs in zip(pair.flashinfer.layers, pair.reference.layers, strict=True):  # the launches wrote keys
        theirs.keys.copy_(mine.keys)
        theirs.values.copy_(mine.values)
    (shared,) = sharings
    everyone, some = np.arange(rows), np.array([0, 5, 6, 20, 32])
    for prefix, members in ((0, some), (2048, everyone), (2048, some), (64, everyone), (4160, some), (0, some)):
        batch = shared_batch(rows, query_len, prefix, rng.integers(0, 260, rows), members, page_size)
        metadata = stage(batch, arena, bucket)
        planner.replan(metadata.host)
        pages = np.zeros(rows, np.int32)
        pages[members] = prefix // page_size
        assert shared.shared.pages.tolist() == pages.tolist()
        graph.replay()
        expected = pair.expected(metadata, static)
        for row in range(rows):  # a row by itself: a wrong one must not hide behind the others
            tokens = slice(row * query_len, (row + 1) * query_len)
            assert relative_error(out[tokens], expected[tokens]) <= 2 * LIMIT[dtype]
        assert relative_error(out, expected) <= LIMIT[dtype]
    copies = shared.num_copies
    planner.replan(metadata.host)
    assert shared.num_copies == copies, "nothing is sent where nothing changed"


@pytest.mark.parametrize("query_len", [1, 6])
def test_the_rule_takes_what_it_is_meant_for(query_len: int, sharings: list[Any]) -> None:
    """32 rows that share 2,048 keys and have 256 of their own; a prefix of a page is left to flat attention."""
    pair, rows = cascade_pair((32, 8), 128, torch.bfloat16), 32
    planner = pair.flashinfer.fixed_planner(rows, query_len)
    (shared,) = sharings
    states = pair.states(rows * query_len)
    for prefix, pays in ((2048, True), (16, False)):
        batch = shared_batch(rows, query_len, prefix, np.full(rows, 256 - query_len), np.arange(rows), 16)
        metadata = metadata_of(batch)
        out = pair.flashinfer.attend(planner.plan(metadata), 0, *states)
        assert bool(shared.shared.pages.any()) == pays
        assert relative_error(out, pair.expected(metadata, states)) <= 3e-3


def test_the_comparison_can_fail(sharings: list[Any]) -> None:
    """One row too many is told that it shares the prefix."""
    pair, rows = cascade_pair((32, 8), 128, torch.bfloat16), 32
    batch = shared_batch(rows, 6, 2048, np.full(rows, 250), np.arange(rows - 1), 16)
    metadata, states = metadata_of(batch), pair.states(6 * rows)
    planner = pair.flashinfer.fixed_planner(rows, 6)
    plan = planner.plan(metadata)
    sharings[0].shared.pages[rows - 1] = 4
    out = pair.flashinfer.attend(plan, 0, *states)
    expected = pair.expected(metadata, states)
    assert relative_error(out[:-6], expected[:-6]) <= 3e-3 < relative_error(out[-6:], expected[-6:])


@pytest.mark.parametrize("graphs", [True, False])
def test_rounds_of_requests_that_share_a_prefix(
    graphs: bool, monkeypatch: pytest.MonkeyPatch, sharings: list[Any]
) -> None:
    """Target and head, from graphs and operator by operator: flat attention's tokens and drafts, but for rounding."""
    take_always(monkeypatch)
    launches: list[Any] = []
    prefix = torch.randint(VOCAB, (200,), generator=torch.Generator().manual_seed(7)).tolist()
    prompts = [prefix + own[:60] for own in PROMPTS[:4]]
    params = SamplingParams(max_new_tokens=48, return_drafts=True)
    outs = []
    for cascade in (False, True):
        with model(5, graphs, cascade_attention=cascade, enable_prefix_caching=True) as loaded:
            assert loaded.cascade_attention == ("on" if cascade else "off: cascade_attention=False")
            loaded.generate(prompts[0], SamplingParams(max_new_tokens=8))  # leaves the prefix, the head's too
            if cascade and not graphs:
                launches = results_of(monkeypatch, sharing.Sharing, "of_batch")
            outs.append(loaded.generate(prompts, params))
            assert all(c.stats.cached_tokens >= 176 for c in outs[-1]), [c.stats for c in outs[-1]]
    for each in ([c.token_ids for c in outs[0]], [c.token_ids for c in outs[1]]), (drafted(outs[0]), drafted(outs[1])):
        assert agreement(*each) >= 0.97
    if graphs:
        assert sum(each is not None and each.num_copies > 0 for each in sharings) >= 3, (
            "verification, draft prefill and draft steps"
        )
    else:
        assert sum(each is not None and each.launches for each in launches) >= 3
