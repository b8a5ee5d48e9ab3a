"""The paged torch backend says what plain dense attention in float64 says, written here a second time as loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from fakes import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.backends.reference import TorchBackend, attend
from attention.batch.host import rows_batch
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup, bytes_per_token, gather, write
from attention.errors import InvalidInputError, UnsupportedAttentionError
from attention.runner import GroupRunner
from attention.spec import AttentionSpec

CPU = torch.device("cpu")
Layout = Literal["NHD", "HND"]
PLAIN = AttentionSpec(4, 2, 8, 8, scale=8**-0.5)
VARIANTS = {
    "grouped": PLAIN,
    "window": replace(PLAIN, window=5),
    "sinks, softcap, window": replace(PLAIN, has_sinks=True, softcap=2.0, window=4),
    "both ways": replace(PLAIN, causal=False),
    "both ways, window, sinks": replace(PLAIN, causal=False, window=3, has_sinks=True),
    "wide keys": replace(PLAIN, head_dim_k=12, head_dim_v=4, scale=0.3),
    "wide values": replace(PLAIN, head_dim_k=4, head_dim_v=10, scale=1.0),
}
"""All others, one batch at a time: tests/attention/test_backends.py."""


def dense(
    key: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One row: q [Q, Hq, Dk] at positions first…, k, v [S, Hkv, D] from position 0 on -> [Q, Hq, Dv], float64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(len(q), key.num_q_heads, key.head_dim_v, dtype=torch.float64)
    for i in range(len(q)):
        position = first + i
        oldest = 0 if key.window is None else max(0, position - key.window + 1)
        newest = (
            position if key.causal else len(k) - 1 if key.window is None else min(len(k), position + key.window) - 1
        )
        for head in range(key.num_q_heads):
            kv = head // (key.num_q_heads // key.num_kv_heads)
            scores = [float(q[i, head] @ k[s, kv]) * key.scale for s in range(oldest, newest + 1)]
            if key.softcap is not None:
                scores = [key.softcap * math.tanh(s / key.softcap) for s in scores]
            weights = [math.exp(s) for s in scores]
            total = sum(weights) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
            for weight, s in zip(weights, range(oldest, newest + 1), strict=True):
                out[i, head] += weight / total * v[s, kv]
    return out


class Rig:
    """A runner over one layer whose pages are all NaN but the null page: touching a foreign page shows."""

    def __init__(self, key: AttentionSpec, page_size: int, rows: int, longest: int, layout: Layout, seed: int) -> None:
        self.key, self.page_size = key, page_size
        width = -(-longest // page_size)
        pages = np.random.default_rng(seed).permutation(np.arange(1, 2 * rows * width + 1))[: rows * width]
        self.table = pages.reshape(rows, width).astype(np.int32)
        group = CacheGroup("g", (key,), 2 * rows * width + 1, page_size, layout)
        self.runner = GroupRunner(TorchBackend(CPU), group, torch.float64, CPU)
        for states in (self.runner.layers[0].keys, self.runner.layers[0].values):
            states[1:] = float("nan")
        generator = torch.Generator().manual_seed(seed)
        self.sinks = torch.randn(key.num_q_heads, generator=generator) if key.has_sinks else None
        shapes = (
            (key.num_q_heads, key.head_dim_k),
            (key.num_kv_heads, key.head_dim_k),
            (key.num_kv_heads, key.head_dim_v),
        )
        self.states = [
            tuple(torch.randn(longest, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
            for _ in range(rows)
        ]

    def feed(self, start: list[int], stop: list[int]) -> list[torch.Tensor]:
        """Feed positions start[i] … stop[i]-1 of every row in one batch -> outputs a row."""
        lens = np.array(stop) - np.array(start)
        batch = rows_batch(np.concatenate([[0], np.cumsum(lens)]), np.array(start), self.table, self.page_size)
        arena, bucket = single_batch_arena(batch.num_reqs, batch.num_tokens, self.table.shape[1], CPU)
        planned = self.runner.plan(stage(batch, arena, bucket))
        q, k, v = (
            torch.cat([row[i][a:b] for row, a, b in zip(self.states, start, stop, strict=True)]) for i in range(3)
        )
        return list(self.runner.attend(planned, 0, q, k, v, self.sinks).split(lens.tolist()))

    def expected(self, start: list[int], stop: list[int]) -> list[torch.Tensor]:
        return [
            dense(self.key, q[a:b], k[:b], v[:b], a, self.sinks)
            for (q, k, v), a, b in zip(self.states, start, stop, strict=True)
        ]


def agree(ours: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a.double(), b, atol=1e-6, rtol=1e-6) for a, b in zip(ours, right, strict=True))


@settings(max_examples=examples(25), deadline=None)
@given(
    page_size=st.sampled_from([1, 3, 4, 16]),
    cuts=st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=3), min_size=1, max_size=4),
    variant=st.sampled_from(list(VARIANTS)),
    layout=st.sampled_from(["NHD", "HND"]),
    seed=st.integers(0, 5),
)
@pytest.mark.thorough
def test_any_cut_into_rounds_gives_the_same(
    page_size: int, cuts: list[list[int]], variant: str, layout: Layout, seed: int
) -> None:
    rows = len(cuts[0])
    cuts = [(c + [1] * rows)[:rows] for c in cuts]
    rig = Rig(VARIANTS[variant], page_size, rows, max(1, sum(map(max, cuts))), layout, seed)
    at = [0] * rows
    for cut in cuts:
        stop = [a + n for a, n in zip(at, cut, strict=True)]
        if sum(cut):
            assert agree(rig.feed(at, stop), rig.expected(at, stop))
        at = stop


def test_a_rewritten_slot_counts_and_a_scratch_slot_does_not() -> None:
    """Rejected drafts leave states behind; the next round overwrites them and nobody sees them before."""
    rig = Rig(PLAIN, 4, 2, 30, "NHD", seed=1)
    rig.feed([0, 0], [7, 11])
    drafts = [tuple(t.clone() for t in row) for row in rig.states]
    rig.states = [tuple(t * 3 for t in row) for row in rig.states]
    rig.feed([7, 11], [12, 16])
    rig.states = drafts
    assert agree(rig.feed([8, 11], [10, 13]), [right_of(rig, 0, 7), rig.expected([8, 11], [10, 13])[1]])


def right_of(rig: Rig, row: int, scratch: int) -> torch.Tensor:
    """Row 0 kept the tripled state at position `scratch` (it was accepted) and feeds 8 and 9."""
    q, k, v = (t.clone() for t in rig.states[row])
    k[scratch] *= 3
    v[scratch] *= 3
    return dense(rig.key, q[8:10], k[:10], v[:10], 8, None)


def test_the_comparison_sees_one_wrong_slot() -> None:
    rig = Rig(PLAIN, 4, 2, 30, "NHD", seed=1)
    rig.feed([0, 0], [7, 11])
    layer = rig.runner.layers[0]
    layer.keys[rig.table[0, 1], 2] = 0.0
    layer.values[rig.table[0, 1], 2] = 0.0
    assert not agree(rig.feed([7, 11], [9, 13]), rig.expected([7, 11], [9, 13]))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("both ways")])
def test_queries_that_see_those_after_them_are_cut_by_rows_alone(variant: str) -> None:
    """Rows of many and of few queries over a context, and one whose lengths are those of the batch's longest."""
    rig = Rig(VARIANTS[variant], 4, 3, 40, "NHD", seed=3)
    rig.feed([0, 0, 0], [9, 3, 12])
    assert agree(rig.feed([9, 3, 12], [14, 33, 17]), rig.expected([9, 3, 12], [14, 33, 17]))
    rig.feed([0, 0, 0], [9, 9, 9])
    assert agree(rig.feed([9, 9, 9], [14, 14, 14]), rig.expected([9, 9, 9], [14, 14, 14]))


@pytest.mark.parametrize("wrong", [{"window": 6}, {"scale": 0.3}, {"softcap": 3.0}, {"causal": False}])
def test_the_comparison_sees_a_wrong_parameter(wrong: dict[str, float]) -> None:
    right = replace(PLAIN, window=5, softcap=1.5)
    rig = Rig(right, 4, 1, 20, "NHD", seed=2)
    ours = rig.feed([0], [20])
    rig.key = replace(right, **wrong)
    assert not agree(ours, rig.expected([0], [20]))


def test_heads_that_do_not_divide_are_refused() -> None:
    key = replace(PLAIN, num_q_heads=5)
    with pytest.raises(UnsupportedAttentionError, match="5 query heads to be a multiple of the 2 KV heads"):
        GroupRunner(TorchBackend(CPU), CacheGroup("odd", (key,), 4, 4), torch.float32, CPU)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_is_written_is_gathered(layout: Layout) -> None:
    group = CacheGroup("g", (replace(PLAIN, head_dim_v=3),), 5, 4, layout)
    layer = GroupRunner(TorchBackend(CPU), group, torch.float32, CPU).layers[0]
    slots = torch.tensor([6, 19, 4])
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 3)
    write(layer, key, value, slots)
    assert torch.equal(gather(layer.keys, slots, layout), key)
    assert torch.equal(gather(layer.values, slots, layout), value)
    assert int((layer.keys != 0).any(-1).sum()) == 6, "nothing else was written"


def test_bytes_per_token() -> None:
    assert bytes_per_token((PLAIN, VARIANTS["wide keys"]), torch.float16) == 2 * (2 * 16 + 2 * 16)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_the_output_is_contiguous_whatever_the_strides_of_the_input(rows: int, queries: int) -> None:
    """Models call `view` on it; what they hand in may be a slice or a transposed view."""
    group = CacheGroup("g", (PLAIN,), 40, 4)
    runner = GroupRunner(TorchBackend(CPU), group, torch.float32, CPU)
    table = np.arange(1, 1 + rows * 6, dtype=np.int32).reshape(rows, 6)
    starts = np.arange(rows + 1) * queries
    batch = rows_batch(starts.astype(np.int32), np.zeros(rows, np.int64), table, 4)
    arena, bucket = single_batch_arena(rows, rows * queries, 6, CPU)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, rows * queries, 16, generator=generator) for heads in (4, 2, 2))
    strided = [x.transpose(0, 1)[..., ::2] for x in (q, k, v)]
    planned = runner.plan(stage(batch, arena, bucket))
    out = runner.attend(planned, 0, *strided)
    assert out.is_contiguous()
    assert torch.allclose(out, runner.attend(planned, 0, *(x.contiguous() for x in strided)), atol=1e-6)


@pytest.mark.parametrize(
    ("slopes", "others", "said"),
    [
        ((0.5,), {}, "one finite slope for each of the 2 query heads"),
        ((0.5, float("nan")), {}, "one finite slope for each of the 2 query heads"),
        ((0.5, 0.25), {"value_in_key": True}, "MLA has no slopes"),
    ],
)
def test_slopes_that_are_none_are_refused(slopes: tuple[float, ...], others: dict[str, bool], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        AttentionSpec(2, 1, 16, 16, 0.25, alibi=slopes, **others)


def test_dense_attention_has_no_slopes() -> None:
    """A mask does not say where queries stand."""
    states, mask = torch.zeros(1, 2, 1, 16), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(UnsupportedAttentionError, match="no ALiBi slopes; use TorchBackend"):
        attend(states, states, states, mask, AttentionSpec(2, 2, 16, 16, 0.25, alibi=(1.0, 2.0)))
