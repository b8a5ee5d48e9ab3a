"""The Blackwell route with a fake of FlashInfer's two functions: their contract, and the attention it comes to.

No such GPU is here. The fakes have the signatures of flashinfer 0.7.2.post1 (a test in tests/gpu compares them with the
installed package), check what the real ones need, and attend from the block tables that they are given.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attention.backends.base import PrefersLayout
from attention.backends.flashinfer.backend import FlashInferBackend, start_building
from attention.backends.flashinfer.trtllm import TrtllmBuilder, keys_of, serves, tables_of
from attention.batch.host import rows_batch
from attention.batch.metadata import BatchSection, stage
from attention.batch.transforms.windowed import windowed_batch
from attention.cache.kv_cache import FP8, CacheGroup, KVFormat, LayerKV, write
from attention.runner import GroupRunner
from attention.spec import AttentionSpec
from attention.staging import StagingArena, bucket_of
from specdec.loading.cache_format import kv_layout
from tests.attention.batches import small_size
from tests.attention.oracle import Rig, Variant, expected_row

CPU = torch.device("cpu")
KEY = AttentionSpec(8, 2, 64, 64, scale=0.125)
HALF = torch.bfloat16
SMS = 148


class Fakes:
    """The two functions; what they were called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def trtllm_batch_decode_with_kv_cache(
        self,
        query: Any,
        kv_cache: Any,
        workspace_buffer: Any,
        block_tables: Any,
        seq_lens: Any,
        max_seq_len: Any,
        bmm1_scale: Any = 1.0,
        bmm2_scale: Any = 1.0,
        window_left: Any = -1,
        out: Any = None,
        out_dtype: Any = None,
        o_sf_scale: Any = None,
        o_sf_vec_size: Any = None,
        sinks: Any = None,
        kv_layout: Any = "HND",
        enable_pdl: Any = None,
        backend: Any = "auto",
        q_len_per_req: Any = 1,
        o_scale: Any = 1.0,
        mask: Any = None,
        max_q_len: Any = None,
        cum_seq_lens_q: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
        kv_cache_sf: Any = None,
        uses_shared_paged_kv_idx: Any = True,
        lse: Any = None,
        return_lse: Any = False,
        bmm1_scale_log2: Any = None,
        multi_ctas_kv_counter_buffer: Any = None,
        enable_block_sparse_attention: Any = False,
        cp_world: Any = 1,
        cp_rank: Any = 0,
        causal_seqlens_kv_global: Any = None,
        bf16q_fp8kv_transform_mode: Any = None,
        request_order: Any = None,
        request_order_plan: Any = None,
    ) -> torch.Tensor:
        given = dict(locals())
        if q_len_per_req is None:
            assert max_q_len is not None and cum_seq_lens_q is not None
            starts = cum_seq_lens_q
        else:
            assert max_q_len is None and cum_seq_lens_q is None
            assert len(query) == q_len_per_req * len(seq_lens), "the function counts rows by it"
            max_q_len, starts = q_len_per_req, torch.arange(len(seq_lens) + 1, dtype=torch.int32) * q_len_per_req
        return self._attend(given, starts, max_q_len, max_seq_len)

    def trtllm_batch_context_with_kv_cache(
        self,
        query: Any,
        kv_cache: Any,
        workspace_buffer: Any,
        block_tables: Any,
        seq_lens: Any,
        max_q_len: Any,
        max_kv_len: Any,
        bmm1_scale: Any,
        bmm2_scale: Any,
        batch_size: Any,
        cum_seq_lens_q: Any,
        cum_seq_lens_kv: Any,
        window_left: Any = -1,
        out: Any = None,
        out_dtype: Any = None,
        o_sf_scale: Any = None,
        o_sf_vec_size: Any = None,
        kv_layout: Any = "HND",
        enable_pdl: Any = None,
        sinks: Any = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
        uses_shared_paged_kv_idx: Any = True,
        causal: Any = True,
        lse: Any = None,
        return_lse: Any = False,
        multi_ctas_kv_counter_buffer: Any = None,
        use_fp16_softmax: Any = None,
        uses_spcompress: Any = None,
        backend: Any = "trtllm-gen",
    ) -> torch.Tensor:
        given = dict(locals())
        assert batch_size == len(seq_lens) and causal
        assert cum_seq_lens_kv.dtype == torch.int32
        assert cum_seq_lens_kv.tolist() == [0, *np.cumsum(seq_lens.numpy()).tolist()]
        return self._attend(given, cum_seq_lens_q, max_q_len, max_kv_len)

    def _attend(self, given: dict[str, Any], starts: torch.Tensor, most_queries: int, most_keys: int) -> torch.Tensor:
        self.calls.append(given)
        query, out, tables, lens = (given[name] for name in ("query", "out", "block_tables", "seq_lens"))
        check_contract(given, starts, most_queries, most_keys)
        pages = [x if given["kv_layout"] == "NHD" else x.transpose(1, 2) for x in given["kv_cache"]]
        heads = (query.shape[1], pages[0].shape[2])
        window = None if given["window_left"] < 0 else given["window_left"] + 1
        key = AttentionSpec(*heads, query.shape[2], query.shape[2], given["bmm1_scale"], window)
        for row, length in enumerate(lens.tolist()):
            keys, values = (x[tables[row].long()].flatten(0, 1)[:length] for x in pages)
            tokens = slice(int(starts[row]), int(starts[row + 1]))
            out[tokens] = expected_row(key, query[tokens], keys, values, given["sinks"]).to(out.dtype)
        return out


def check_contract(given: dict[str, Any], starts: torch.Tensor, most_queries: int, most_keys: int) -> None:
    """What flashinfer/decode.py, prefill.py and csrc/trtllm_fmha_kernel_launcher.cu check or take for granted."""
    query, out, tables, lens = (given[name] for name in ("query", "out", "block_tables", "seq_lens"))
    assert given["backend"] == "trtllm-gen" and given["bmm2_scale"] == 1.0
    assert tables.dtype == lens.dtype == starts.dtype == torch.int32
    assert tables.ndim == 2 and len(tables) == len(lens) == len(starts) - 1 and tables.stride(1) == 1
    assert int(starts[0]) == 0 and int(starts[-1]) == len(query) and out.shape == query.shape
    assert query.stride(-1) == 1 and out.is_contiguous() and out.dtype == query.dtype
    assert isinstance(most_queries, int) and isinstance(most_keys, int), "maxima are the host's"
    assert most_queries >= int(starts.diff().max()) and most_keys >= int(lens.max())
    assert given["sinks"] is None or given["sinks"].dtype == torch.float32
    counters = given["multi_ctas_kv_counter_buffer"]
    assert counters.dtype == torch.uint8 and counters.is_contiguous() and not counters.any()
    assert len(counters) >= 4 * -(-max(len(lens) * query.shape[1], SMS) // 8) * 8
    assert not given["workspace_buffer"].any()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """A Blackwell GPU, as far as the backend can tell, over CPU tensors."""
    fakes = Fakes()
    module = "attention.backends.flashinfer.trtllm"
    monkeypatch.setattr(f"{module}.capability", lambda device: (10, 0))
    monkeypatch.setattr(f"{module}.multiprocessors", lambda device: SMS)
    monkeypatch.setattr("attention.backends.flashinfer.backend.LEAST_BYTES", 1)
    monkeypatch.setattr("attention.backends.flashinfer.backend.WORKSPACE_BYTES", 64)
    decode = SimpleNamespace(trtllm_batch_decode_with_kv_cache=fakes.trtllm_batch_decode_with_kv_cache)
    prefill = SimpleNamespace(trtllm_batch_context_with_kv_cache=fakes.trtllm_batch_context_with_kv_cache)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(decode=decode, prefill=prefill))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", prefill)

    def written(layer: LayerKV, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        write(layer, key[: len(slots)], value[: len(slots)], slots)

    monkeypatch.setattr("attention.kernels.cache_write.write_kv", written)
    return fakes


VARIANTS = {
    "HND": Variant(KEY, layout="HND"),
    "NHD": Variant(KEY),
    "pages of 32, window": Variant(replace(KEY, window=9), 32, "HND"),
    "sinks": Variant(replace(KEY, has_sinks=True, window=20), 64, "HND"),
    "head dim 128": Variant(replace(KEY, head_dim_k=128, head_dim_v=128), layout="HND"),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["decode, medium", "verify, q = 5", "prefill", "mixed", "single long"])
def test_every_batch(name: str, variant: str, fakes: Fakes) -> None:
    rig = Rig(VARIANTS[variant], small_size()[name], HALF, CPU)
    runner = rig.runner(FlashInferBackend(CPU))
    assert max(rig.errors(rig.attended(runner))) <= 3e-3
    rig.assert_written(runner)
    assert [("cum_seq_lens_kv" in call) for call in fakes.calls] == {"prefill": [True], "mixed": [False, True]}.get(
        name, [False]
    )
    assert {call["kv_layout"] for call in fakes.calls} == {VARIANTS[variant].layout}


def test_padding_is_neither_written_nor_attended(fakes: Fakes) -> None:
    rig = Rig(VARIANTS["HND"], small_size()["mixed"], HALF, CPU)
    runner, tokens = rig.runner(FlashInferBackend(CPU)), rig.host.num_tokens
    padded = [torch.cat([x, x.new_full((9, *x.shape[1:]), float("nan"))]) for x in rig.new_states()]
    out = torch.full_like(padded[0], 7.0)
    assert runner.attend(runner.plan(rig.metadata()), 0, *padded, None, out) is out
    assert rig.errors(out[:tokens])[0] <= 3e-3 and bool((out[tokens:] == 7).all())


def test_tables_from_the_flat_list_of_pages(fakes: Fakes) -> None:
    """Rounds of a fixed shape and attention in chunks send no block table."""
    metadata = Rig(VARIANTS["HND"], small_size()["mixed"], HALF, CPU).metadata()
    width = int(metadata.host.page_counts.max())
    assert torch.equal(tables_of(metadata), torch.from_numpy(metadata.host.block_table[:, :width]))
    assert torch.equal(keys_of(metadata), metadata.seq_lens)
    rig = Rig(Variant(replace(KEY, chunk_size=32), 16, "HND"), small_size()["mixed"], HALF, CPU)
    runner = rig.runner(FlashInferBackend(CPU))
    rig.attended(runner)
    assert len(fakes.calls) == 2


@pytest.mark.parametrize("kind", [{"window": 20}, {"chunk_size": 128}])
def test_lists_of_windowed_groups_are_as_long_as_they_are(kind: dict[str, int], fakes: Fakes) -> None:
    """On the device lengths are those of whole rows: tokens 300 and 700 see keys from 256 and 640 on."""
    spec = replace(KEY, **kind)
    runner = GroupRunner(FlashInferBackend(CPU), CacheGroup("near", (spec,), 120, 16, "HND"), HALF, CPU)
    whole = rows_batch(np.array([0, 2, 4]), np.array([300, 700]), np.arange(1, 101, dtype=np.int32).reshape(2, 50), 16)
    assert spec.reach is not None
    batch = replace(whole, other_groups=(windowed_batch(whole, whole.block_table, np.arange(2), spec.reach),))
    section = BatchSection("batch", 1)
    bucket = bucket_of(**section.sizes(2, 4, 50, groups=(64,)))
    metadata = stage(batch, StagingArena(section.fields, bucket, CPU), bucket, section)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(4, heads, 64, generator=generator, dtype=HALF) for heads in (8, 2, 2)]
    for tensor in (runner.layers[0].keys, runner.layers[0].values):
        tensor.normal_(generator=generator)
    right = runner.attend(runner.plan(metadata), 0, *states)
    assert torch.equal(runner.attend(runner.plan(metadata.other_groups[0]), 0, *states), right)
    assert fakes.calls[-1]["seq_lens"].tolist() == [302 - 256, 702 - 640]


@pytest.mark.parametrize("name", ["decode, medium", "verify, q = 5"])
def test_a_fixed_shape_is_one_launch_over_buffers_that_stay(name: str, fakes: Fakes) -> None:
    """What a CUDA graph holds: the addresses of the first plan; a replan writes tables, and lengths arrive by
    themselves."""
    rig = Rig(VARIANTS["HND"], small_size()[name], HALF, CPU)
    runner = rig.runner(FlashInferBackend(CPU))
    rows, query_len = rig.host.num_reqs, rig.batch.query_lens[0]
    planner = runner.fixed_planner(rows, query_len)
    metadata = rig.metadata()
    plan = planner.plan(metadata)
    assert rig.errors(runner.attend(plan, 0, *rig.new_states()))[1] <= 3e-3
    assert fakes.calls[0]["q_len_per_req"] == query_len
    other = Rig(VARIANTS["HND"], rig.batch, HALF, CPU, seed=3)
    other.store(runner.layers[0], other.batch.computed)
    planner.replan(other.host)
    metadata.slot_mapping.copy_(torch.from_numpy(other.host.slot_mapping))
    assert other.errors(runner.attend(plan, 0, *other.new_states()))[1] <= 3e-3
    first, second = fakes.calls
    assert all(first[n].data_ptr() == second[n].data_ptr() for n in ("block_tables", "seq_lens", "workspace_buffer"))
    assert first["max_seq_len"] == second["max_seq_len"] >= max(other.batch.seq_lens)


def test_tables_are_sent_when_they_change(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(VARIANTS["HND"], small_size()["decode, medium"], HALF, CPU)
    planner = rig.runner(FlashInferBackend(CPU)).fixed_planner(rig.host.num_reqs, 1)
    planner.plan(rig.metadata())
    copies = []
    monkeypatch.setattr(np, "copyto", lambda *args: copies.append(args))
    planner.replan(rig.host)
    assert not copies
    table = rig.host.block_table.copy()
    table[0, 0] += 1
    planner.replan(replace(rig.host, block_table=table))
    assert len(copies) == 1


def test_chosen_by_capability_and_said(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    group = CacheGroup("target", (KEY,), 8, 16, "HND")
    backend = FlashInferBackend(CPU)
    assert isinstance(backend, PrefersLayout) and kv_layout("auto", backend) == "HND"
    assert kv_layout("NHD", backend) == "NHD"
    assert isinstance(backend.builder(group, KEY, HALF), TrtllmBuilder)
    assert backend.route(group, KEY, HALF) == "FlashInfer trtllm-gen, bfloat16, head dim 64, HND pages"
    assert start_building(KEY, HALF, HALF, CPU) == ()
    for capability in ((9, 0), (12, 0), None):
        monkeypatch.setattr("attention.backends.flashinfer.trtllm.capability", lambda device, c=capability: c)
        assert not serves(group, KEY, HALF, CPU) and kv_layout("auto", backend) == "NHD"


@pytest.mark.parametrize(
    ("group", "key", "dtype"),
    [
        ({}, {"softcap": 3.0}, HALF),
        ({}, {"head_dim_k": 80, "head_dim_v": 80}, HALF),
        ({}, {"head_dim_k": 576, "head_dim_v": 512, "num_kv_heads": 1, "value_in_key": True}, HALF),
        ({"page_size": 1}, {}, HALF),
        ({"format": KVFormat(FP8)}, {}, HALF),
        ({}, {}, torch.float32),
    ],
    ids=["softcap", "head dim", "MLA", "page size", "8 bits", "float32"],
)
def test_all_else_goes_on_to_the_planned_kernels(
    group: dict[str, Any], key: dict[str, Any], dtype: torch.dtype, fakes: Fakes
) -> None:
    assert serves(CacheGroup("target", (KEY,), 8, 16), KEY, HALF, CPU)
    spec = replace(KEY, **key)
    changed = replace(CacheGroup("target", (), 8, 16), **group)
    assert not serves(changed, spec, dtype, CPU)


def test_several_groups_share_the_workspace(fakes: Fakes) -> None:
    backend = FlashInferBackend(CPU)
    runners = [GroupRunner(backend, CacheGroup(name, (KEY,), 40, 16, "HND"), HALF, CPU) for name in ("target", "head")]
    rig = Rig(VARIANTS["HND"], small_size()["decode, small"], HALF, CPU)
    for runner in runners:
        runner.attend(runner.plan(rig.metadata()), 0, *rig.new_states())
    assert len({call["workspace_buffer"].data_ptr() for call in fakes.calls}) == 1
    assert len({call["multi_ctas_kv_counter_buffer"].data_ptr() for call in fakes.calls}) == 2
