"""Offsets into pools of more than 2**32 numbers, in Triton's interpreter: a pool of which only the last pages exist.

Kernels are given page ids from 2**32 / page stride on. Wherever a kernel adds an offset to the pool's pointer, the
interpreter takes 2**32 off again; what lies outside the pages that exist reads and writes their first number. So an
offset that wraps in 32 bits gives wrong numbers here, where a GPU would read foreign memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu/test_large_pools.py has real pools", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl
from triton.runtime import interpreter

from attention.backends.invariant import InvariantBackend
from attention.backends.reference import TorchBackend
from attention.batch.host import rows_batch
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup, KVLayout, LayerKV, allocate
from attention.kernels.cache_write import write_kv
from attention.kernels.packed_kernel import Scratch, Tiling, launch_packed
from attention.runner import GroupRunner
from attention.spec import AttentionSpec

CPU = torch.device("cpu")
BEFORE = 1 << 32
"""Numbers of the pool before the first page that exists."""
SPEC, PAGE = AttentionSpec(4, 2, 64, 64, 0.125), 16
LATENT = AttentionSpec(4, 1, 64, 32, 1.0, value_in_key=True)
LENGTHS, QUERY_LEN = np.array([300, 65, 40]), 4


@contextmanager
def existing(*pools: torch.Tensor) -> Iterator[None]:
    """Inside, these tensors are the last pages of pools that begin 2**32 numbers before."""
    plain = interpreter.InterpreterBuilder.create_addptr
    sizes = {pool.data_ptr(): pool.numel() for pool in reversed(pools)}  # MLA's values are a view of its keys

    def create_addptr(self: Any, ptr: Any, offset: Any) -> Any:
        base = int(np.ravel(ptr.data)[0])
        if base in sizes and (ptr.data == base).all():
            place = offset.data.astype(np.int64) - BEFORE
            inside = (place >= 0) & (place < sizes[base])
            offset = interpreter.TensorHandle(np.where(inside, place, 0), tl.int64)
        return plain(self, ptr, offset)

    with patch.object(interpreter.InterpreterBuilder, "create_addptr", create_addptr):
        yield


def pool(key: AttentionSpec, layout: KVLayout = "NHD", pages: int = 40) -> tuple[LayerKV, int]:
    """A layer whose pages are the last ones, and the id of the first of them."""
    torch.manual_seed(0)
    layer = allocate(CacheGroup("test", (key,), pages, PAGE, layout), torch.float16, CPU)[0]
    layer.keys.normal_()
    layer.values.normal_()
    stride = layer.keys.stride(0)
    assert BEFORE % stride == 0
    return layer, BEFORE // stride


def batch(first: int) -> Any:
    """Verifications of rows on scrambled pages from `first` + 1 on."""
    counts = -(-LENGTHS // PAGE)
    table = np.zeros((len(counts), counts.max()), np.int32)
    table[np.arange(counts.max()) < counts[:, None]] = np.random.default_rng(1).permutation(counts.sum()) + 1 + first
    return rows_batch(np.arange(len(counts) + 1) * QUERY_LEN, LENGTHS - QUERY_LEN, table, PAGE)


def staged(first: int) -> Any:
    host = batch(first)
    arena, bucket = single_batch_arena(host.num_reqs, host.num_tokens, host.block_table.shape[1], CPU)
    return stage(host, arena, bucket)


def states() -> list[torch.Tensor]:
    tokens = len(LENGTHS) * QUERY_LEN
    torch.manual_seed(2)
    return [torch.randn(tokens, n, SPEC.head_dim_k, dtype=torch.float16) for n in (4, 2, 2)]


def error(kernel: str, layout: KVLayout) -> float:
    """Of attention over the last pages of a large pool, against the reference over the same pages alone."""
    layer, first = pool(SPEC, layout)
    query, keys, values = states()
    reference = GroupRunner(TorchBackend(CPU), CacheGroup("test", (SPEC,), 40, PAGE, layout), torch.float16, CPU)
    reference.layers[0].keys.copy_(layer.keys)
    reference.layers[0].values.copy_(layer.values)
    expected = reference.attend(reference.plan(staged(0)), 0, query.float(), keys, values)
    metadata, out = staged(first), torch.zeros_like(query)
    with existing(layer.keys, layer.values):
        if kernel == "packed":
            write_kv(layer, keys, values, metadata.slot_mapping)
            scratch = Scratch.on(CPU, 2 * QUERY_LEN, 64)
            pages = metadata.page_indptr, metadata.page_indices, metadata.last_page_len
            launch_packed(query, layer, SPEC, *pages, out, scratch, QUERY_LEN)
        else:
            backend = InvariantBackend()
            plan = backend.builder(CacheGroup("test", (SPEC,), 40, PAGE, layout), SPEC, torch.float16).build(metadata)
            backend.run(plan, SPEC, query, keys, values, layer, metadata, None, out)
    return float((out - expected).norm() / expected.norm())


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split-KV of every row of several tiles."""
    monkeypatch.setattr("attention.kernels.packed_kernel.tiling", lambda *_: Tiling(32, 2, 5, 64, 40))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kernel", ["packed", "invariant"])
@pytest.mark.cases(1)
def test_attention(kernel: str, layout: KVLayout, in_parts: None) -> None:
    assert error(kernel, layout) <= 4e-3


@triton.jit
def places_in_32_bits(  # type: ignore[no-untyped-def]
    page_indices_ptr, first_page, position, inside, page_stride, slot_stride, PAGE_SIZE: tl.constexpr
):
    page = tl.load(page_indices_ptr + first_page + position // PAGE_SIZE, mask=inside, other=0)
    return page * page_stride + (position % PAGE_SIZE) * slot_stride


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("kernel", ["packed", "invariant"])
def test_offsets_of_32_bits_would_be_noticed(kernel: str, in_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: `key_places` without its int64."""
    monkeypatch.setattr(f"attention.kernels.{kernel}_kernel.key_places", places_in_32_bits)
    assert error(kernel, "NHD") > 0.1


def written(slots: torch.dtype, latent: bool) -> bool:
    """Whether new keys come to stand in their slots, and all others stay, for slots of this dtype."""
    layer, first = pool(LATENT if latent else SPEC)
    own = torch.tensor([33, 17, 250, 639])
    keys = torch.randn(4, *layer.keys.shape[2:], dtype=torch.float16)
    values = torch.randn(4, *layer.values.shape[2:], dtype=torch.float16)
    expected = layer.keys.clone().flatten(0, 1)
    expected[own] = keys
    given = (own + first * PAGE).to(slots)
    with existing(layer.keys, layer.values):
        write_kv(layer, keys, keys if latent else values, given)
    return torch.equal(layer.keys.flatten(0, 1), expected)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("latent", [False, True], ids=["keys and values", "latents"])
def test_writes(latent: bool) -> None:
    assert written(torch.int64, latent)
    assert not written(torch.int32, latent), "slots of 32 bits must be noticed"
