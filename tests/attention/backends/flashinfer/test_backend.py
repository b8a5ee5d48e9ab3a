"""What the FlashInfer backend refuses, and how it splits a batch; no GPU needed (the kernels are in tests/gpu)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention.backends.flashinfer.backend import (
    FlashInferBackend,
    check_supported,
    routes,
    start_building,
)
from attention.backends.flashinfer.short_queries import split_batch
from attention.backends.flashinfer.wrapper import kernel_name
from attention.backends.invariant import InvariantBuilder
from attention.batch.host import rows_batch
from attention.batch.metadata import CommonAttentionMetadata, single_batch_arena, stage
from attention.cache.kv_cache import FP8, CacheGroup
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec

KEY = AttentionSpec(32, 8, 128, 128, scale=128**-0.5)


def group(key: AttentionSpec, page_size: int = 16) -> CacheGroup:
    return CacheGroup("target", (key,), 8, page_size)


def refusal(key: AttentionSpec = KEY, dtype: torch.dtype = torch.bfloat16, page_size: int = 16) -> str:
    with pytest.raises(UnsupportedAttentionError) as error:
        check_supported(group(key, page_size), key, dtype)
    return str(error.value)


def test_refusals_name_what_was_given_and_what_is_allowed() -> None:
    assert "float32" in refusal(dtype=torch.float32) and "float16 and bfloat16" in refusal(dtype=torch.float32)
    other_dim = refusal(replace(KEY, head_dim_k=640))
    assert "up to 512" in other_dim and "640 and 128" in other_dim and "backend='torch'" in other_dim
    assert "(1, 16, 32, 64)" in refusal(page_size=8) and "given 8" in refusal(page_size=8)
    assert "30 query heads" in refusal(replace(KEY, num_q_heads=30))
    assert "sinks together with a softcap" in refusal(replace(KEY, has_sinks=True, softcap=3.0))
    assert "latent" in refusal(replace(KEY, value_in_key=True))


@pytest.mark.parametrize("dim", [80, 96, 112, 160, 192])
def test_other_heads_take_our_own_kernel_and_say_so(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any batch and graphs alike; nothing is built for them."""
    monkeypatch.setattr("attention.backends.flashinfer.backend.LEAST_BYTES", 1)
    backend, key = FlashInferBackend(torch.device("cpu")), replace(KEY, head_dim_k=dim, head_dim_v=dim)
    for made in (
        backend.builder(group(key), key, torch.bfloat16),
        backend.fixed_builder(group(key), key, torch.bfloat16, 4, 6),
    ):
        assert isinstance(made, InvariantBuilder)
    assert start_building(key, torch.bfloat16, torch.bfloat16, torch.device("cpu")) == ()
    route = backend.route(group(key), key, torch.bfloat16)
    assert route == f"Triton kernel, bfloat16, head dim {dim} (FlashInfer has head dims 64, 128, 256)"


def test_which_kernels_serve_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """fa3 serves what it was measured on: Hopper, bfloat16, head dim 128, plain full attention."""

    def served(key: AttentionSpec = KEY, dtype: torch.dtype = torch.bfloat16, cache: torch.dtype | None = None) -> int:
        return len(routes(key, dtype, cache or dtype, torch.device("cuda")))

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert routes(KEY, torch.bfloat16, torch.bfloat16, torch.device("cuda")) == ("fa2", "fa3")
    assert served(cache=FP8) == served(dtype=torch.float16) == served(replace(KEY, head_dim_k=64, head_dim_v=64)) == 1
    assert served(replace(KEY, window=9)) == served(replace(KEY, softcap=9.0)) == 1
    assert served(replace(KEY, has_sinks=True)) == 1
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert served() == 1
    name = kernel_name(FP8, replace(KEY, window=9, has_sinks=True), torch.float16, "fa2")
    assert name == "fa2, float16, head dim 128, cache float8_e4m3fn, window, sinks"


def metadata(query_lens: list[int]) -> CommonAttentionMetadata:
    start = np.arange(len(query_lens)) * 5
    table = np.arange(1, len(query_lens) * 8 + 1, dtype=np.int32).reshape(len(query_lens), 8)
    batch = rows_batch(np.concatenate([[0], np.cumsum(query_lens)]), start, table, 16)
    return stage(batch, *single_batch_arena(batch.num_reqs, batch.num_tokens, 8, torch.device("cpu")))


@pytest.mark.parametrize("query_lens", [[1, 6, 16], [17, 40], [17, 1, 3]])
def test_one_kind_of_rows_is_one_part(query_lens: list[int]) -> None:
    (part,) = split_batch(metadata(query_lens))
    assert (part.start, part.stop) == (0, sum(query_lens))


@pytest.mark.parametrize(("query_lens", "cut"), [([1, 6, 40], 2), ([4, 20, 2, 30], 1)])
def test_rows_before_the_first_long_one_are_planned_apart(query_lens: list[int], cut: int) -> None:
    batch = metadata(query_lens)
    short, long = split_batch(batch)
    assert (short.start, short.stop, long.start) == (0, sum(query_lens[:cut]), sum(query_lens[:cut]))
    assert long.stop == sum(query_lens)
    for part, rows in ((short, slice(0, cut)), (long, slice(cut, None))):
        assert np.diff(part.query_start_loc).tolist() == query_lens[rows]
        assert part.query_start_loc[0] == 0
        assert part.seq_lens.tolist() == batch.host.seq_lens[rows].tolist()
        assert part.device_query_start_loc.tolist() == part.query_start_loc.tolist()
        assert part.device_page_indptr.tolist() == part.page_indptr.tolist()
        pages = [
            part.device_page_indices[a:b].tolist()
            for a, b in zip(part.page_indptr[:-1], part.page_indptr[1:], strict=True)
        ]
        counts = batch.host.page_counts[rows]
        table = batch.host.block_table[rows]
        assert pages == [row[:n].tolist() for row, n in zip(table, counts, strict=True)]
