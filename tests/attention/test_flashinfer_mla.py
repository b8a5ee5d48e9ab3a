"""What FlashInfer's latent attention refuses, and how its work list is moved together; the kernels are in tests/gpu."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.backend import PlanKey
from attention.errors import InvariantError, UnsupportedAttentionError
from attention.flashinfer_backend import check_supported
from attention.flashinfer_mla import item_offsets, lay_out, work_items
from attention.kv_cache import CacheGroup

KEY = PlanKey(16, 1, 576, 512, scale=192**-0.5, value_in_key=True)
ARRAYS = range(2, 16)
PER_ITEM, PER_SM, STARTS = {2, 3, 4, 10, 11, 12, 13, 14}, set(range(5, 10)), 15


def refusal(key: PlanKey = KEY, dtype: torch.dtype = torch.bfloat16, page_size: int = 16) -> str:
    with pytest.raises(UnsupportedAttentionError) as error:
        check_supported(CacheGroup("target", (key,), 8, page_size), key, dtype)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 4, 16, 128])
def test_what_is_offered(dtype: torch.dtype, heads: int) -> None:
    key = replace(KEY, num_q_heads=heads)
    check_supported(CacheGroup("target", (key,), 8, 16), key, dtype)


def test_refusals_name_what_was_given_and_what_is_allowed() -> None:
    assert "float32" in refusal(dtype=torch.float32) and "float16 and bfloat16" in refusal(dtype=torch.float32)
    other_rank = refusal(replace(KEY, head_dim_k=256 + 64, head_dim_v=256))
    assert "512" in other_rank and "given 256 and 64" in other_rank and "backend='torch'" in other_rank
    assert "given 512 and 32" in refusal(replace(KEY, head_dim_k=512 + 32))
    assert "given 20" in refusal(replace(KEY, num_q_heads=20))
    assert "(1, 16, 32, 64)" in refusal(page_size=8)
    for options in ({"window": 128}, {"softcap": 30.0}, {"has_sinks": True}):
        assert "no window, softcap or sinks" in refusal(replace(KEY, **options))


def planned_items(query_lens: list[int], seq_lens: list[int], heads: int, sms: int) -> int:
    """Items as the planner makes them: tiles, each split by a limit on its keys."""
    cluster = 2 if sum(query_lens) * heads // len(query_lens) > 64 else 1
    tile, clusters = 64 * cluster, sms // cluster
    keys = []
    for query, seq in zip(query_lens, seq_lens, strict=True):
        tiles = -(-query * heads // tile)
        keys += [seq if t + 1 == tiles else min(seq - query + -(-(t + 1) * tile // heads), seq) for t in range(tiles)]
    mean = max(-(-sum(keys) // clusters), 1)
    limit = next((n for most, n in ((8, 32), (16, 64), (32, 128), (64, 192)) if mean <= most), -(-mean // 256) * 256)
    return sum(max(1, -(-k // limit)) for k in keys)


@given(
    st.lists(st.tuples(st.integers(1, 700), st.integers(0, 5000)), min_size=1, max_size=40),
    st.sampled_from([1, 4, 16, 128]),
    st.sampled_from([132, 108, 7]),
)
def test_the_bound_on_work_items_holds(rows: list[tuple[int, int]], heads: int, sms: int) -> None:
    query_lens = [q for q, _ in rows]
    assert planned_items(query_lens, [q + c for q, c in rows], heads, sms) <= work_items(query_lens, heads, sms)


def planner_answer(used: int, sms: int, clusters: int) -> tuple[np.ndarray, list[int]]:
    """A scratch buffer as the planner fills it, arrays far apart, every used entry a number of its own."""
    room = 1000
    scratch = np.full(16 * room, -1, np.int32)
    info = [1, clusters, *(4 * room * k for k in range(14)), 7, 8]
    for place in ARRAYS:
        count = used if place in PER_ITEM else sms if place in PER_SM else clusters + 1
        start = info[place] // 4
        scratch[start : start + count] = np.arange(count) + 10_000 * place
    scratch[info[STARTS] // 4 + clusters] = used
    return scratch, info


@given(st.integers(1, 300), st.integers(0, 40), st.sampled_from([(132, 132), (132, 66), (7, 3)]))
def test_moved_arrays_hold_what_the_planner_wrote(used: int, spare: int, grid: tuple[int, int]) -> None:
    sms, clusters = grid
    scratch, answer = planner_answer(used, sms, clusters)
    offsets, nbytes = item_offsets(used + spare, sms, clusters)
    out = np.full(nbytes // 4, -2, np.int32)
    layout = lay_out(scratch, answer, out, used + spare, sms)
    assert layout.nbytes == nbytes and layout.answer == tuple(answer)
    assert layout.info[:2] == (1, clusters) and layout.info[16:] == (7, 8) and layout.info[2:16] == offsets
    assert all(offset % 16 == 0 for offset in offsets)
    for value in (0, 5):  # one layout serves plan after plan
        scratch[: answer[STARTS] // 4] += value
        layout.move()
        for place in ARRAYS:
            count = used if place in PER_ITEM else sms if place in PER_SM else clusters + 1
            start, origin = layout.info[place] // 4, answer[place] // 4
            assert out[start : start + count].tolist() == scratch[origin : origin + count].tolist()


def test_more_items_than_the_list_has_room_for_raise() -> None:
    scratch, answer = planner_answer(20, 132, 132)
    out = np.zeros(item_offsets(19, 132, 132)[1] // 4, np.int32)
    with pytest.raises(InvariantError, match="20 work items"):
        lay_out(scratch, answer, out, 19, 132).move()
