"""Attention between the graphs of a launch: it writes what the next graph reads, and calls no operator of torch per
layer but those that its kernel needs. Kernels are replaced by plain torch, which is not counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed")

from fakes import check_mode

import attention.kernels.cache_write
import attention.kernels.invariant_kernel
import attention.kernels.packed_kernel
from attention.backends.base import AttentionBackend
from attention.backends.flashinfer.backend import FlashInferBackend
from attention.backends.flashinfer.mla import MlaKernel, MlaPlan
from attention.backends.invariant import InvariantBackend
from attention.backends.reference import TorchBackend
from attention.backends.reference import attend as dense_attend
from attention.batch.host import rows_batch
from attention.batch.metadata import CommonAttentionMetadata, single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup
from attention.runner import GroupRunner, PlannedBatch
from attention.spec import AttentionSpec
from specdec.execution.segments import Between, SegmentedGraph, record_segments

CPU = torch.device("cpu")
PAGE, LAYERS, PADDED = 16, 3, 64
KEY = AttentionSpec(4, 2, 128, 128, scale=0.1)
MLA = AttentionSpec(16, 1, 576, 512, scale=0.1, value_in_key=True)


class Operators(TorchDispatchMode):
    """The operators of torch that are called, but for those of what stands for a kernel."""

    kernels = 0

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not Operators.kernels:
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for a kernel."""

    def run(*args: Any, **options: Any) -> Any:
        Operators.kernels += 1
        try:
            return function(*args, **options)
        finally:
            Operators.kernels -= 1

    return run


class Launched:
    """A Triton kernel: kernel[grid](…)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return kernel(partial(self._function, grid[0]))


def written(
    tokens: int, key: Any, value: Any, keys: Any, values: Any, slots: Any, *_: Any, HAS_VALUES: bool, **__: Any
) -> None:
    """What the write kernel of keys and values does, NHD."""
    for pages, states in ((keys, key), (values, value)) if HAS_VALUES else ((keys, key),):
        pages.flatten(0, 1)[slots[:tokens]] = states[:tokens]


def packed(_: int, query: Any, keys: Any, values: Any, out: Any, *arrays: Any, **__: Any) -> None:
    """What the packed kernel does, NHD."""
    pages, starts, last, *_scratch, query_len = arrays[:11]
    for row in range(len(last)):
        own = slice(row * query_len, (row + 1) * query_len)
        attended(query, (keys, values), out, own, pages[starts[row] : starts[row + 1]], int(last[row]))


def attended(query: Any, pages: Any, out: Any, own: slice, places: Any, last: int) -> None:
    """The tokens `own` over the keys on these pages, causally."""
    length = (len(places) - 1) * PAGE + last
    k, v = (x[places].flatten(0, 1)[:length].transpose(0, 1)[None] for x in pages)
    q = query[own].transpose(0, 1)[None]
    mask = torch.arange(length) <= torch.arange(length - q.shape[2], length)[:, None]
    out[own] = dense_attend(q, k, v, mask[None, None], KEY)[0].transpose(0, 1).to(out.dtype)


class Wrapper:
    """FlashInfer's: it refuses a query that does not end where its plan does, and attends by the plan alone."""

    def __init__(self, workspace: torch.Tensor, layout: str, **_: Any) -> None:
        self._float_workspace_buffer = self._int_workspace_buffer = workspace
        self._pin_memory_int_workspace_buffer, self._plan_info = workspace, [0]
        self._cached_module = SimpleNamespace(plan=lambda *args: [0])

    def reset_workspace_buffer(self, *_: Any) -> None: ...

    def plan(self, *_: Any, **__: Any) -> None: ...

    @kernel
    def run(self, query: torch.Tensor, pages: Any, out: torch.Tensor, **_: float) -> None:
        assert query.size(0) == self._qo_indptr_last and out.shape == query.shape
        starts, firsts = self._qo_indptr_buf.tolist(), self._paged_kv_indptr_buf.tolist()
        for row, last in enumerate(self._paged_kv_last_page_len_buf.tolist()):
            places = self._paged_kv_indices_buf[firsts[row] : firsts[row + 1]]
            attended(query, pages, out, slice(starts[row], starts[row + 1]), places, last)

    _qo_indptr_last: int
    _qo_indptr_buf: torch.Tensor
    _paged_kv_indptr_buf: torch.Tensor
    _paged_kv_indices_buf: torch.Tensor
    _paged_kv_last_page_len_buf: torch.Tensor


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends for a GPU, with kernels in plain torch; those of other routes than FlashInfer's do nothing."""
    device = SimpleNamespace(multi_processor_count=132)
    event = SimpleNamespace(record=lambda: None, query=lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: device)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr("attention.backends.flashinfer.backend.split_bytes", lambda *_: 0)
    monkeypatch.setattr("attention.backends.flashinfer.backend.LEAST_BYTES", 1)
    monkeypatch.setattr(attention.kernels.cache_write, "_write_kernel", Launched(written))
    monkeypatch.setattr(attention.kernels.packed_kernel, "_packed_kernel", Launched(packed))
    nothing = Launched(lambda *_, **__: None)
    monkeypatch.setattr(attention.kernels.invariant_kernel, "_invariant_attention_kernel", nothing)
    built = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr("attention.backends.flashinfer.wrapper.building", lambda *_: built)
    monkeypatch.setattr("attention.backends.flashinfer.mla.building_latent", lambda *_: built)
    mla = SimpleNamespace(_module=SimpleNamespace(run=kernel(lambda *_: None)))
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))
    modes = SimpleNamespace(CAUSAL=SimpleNamespace(value=1))
    utilities = SimpleNamespace(MaskMode=modes, is_sm90a_supported=lambda _: True)
    monkeypatch.setitem(sys.modules, "flashinfer.utils", utilities)
    common = SimpleNamespace(get_batch_mla_module=lambda *_: mla)
    monkeypatch.setitem(sys.modules, "flashinfer.mla._batch_mla._backends._fa_common", common)


def metadata_of(query_lens: list[int], start: int) -> CommonAttentionMetadata:
    rows = len(query_lens)
    table = np.random.default_rng(0).permutation(np.arange(1, rows * 8 + 1, dtype=np.int32)).reshape(rows, 8)
    batch = rows_batch(np.concatenate([[0], np.cumsum(query_lens)]), np.full(rows, start), table, PAGE)
    return stage(batch, *single_batch_arena(rows, batch.num_tokens, 8, CPU))


def runner_of(backend: AttentionBackend, key: AttentionSpec, dtype: torch.dtype = torch.bfloat16) -> GroupRunner:
    runner = GroupRunner(backend, CacheGroup("test", (key,) * LAYERS, 60, PAGE), dtype, CPU)
    generator = torch.Generator().manual_seed(3)
    for layer in runner.layers:
        for pages in (layer.keys, layer.values):
            pages.copy_(torch.randn(pages.shape, generator=generator))
    return runner


def planned_by(runner: GroupRunner, metadata: CommonAttentionMetadata) -> PlannedBatch:
    """A plan; that of MLA is made in pinned memory, so here one stands for it."""
    if MLA not in runner.group.attention_specs:
        return runner.plan(metadata)
    work: Any = SimpleNamespace(remote=None, generation=0)
    kernel = MlaKernel(torch.zeros(1), runner.group, MLA, torch.bfloat16)
    return PlannedBatch(metadata, {MLA: MlaPlan(kernel, work, 0, (), metadata.page_indices)})


class Graph:
    """Stands for a CUDA graph: it notes what becomes of it."""

    events: list[str]

    def capture_begin(self, **_: Any) -> None:
        self.events.append("begin")

    def capture_end(self) -> None:
        self.events.append("end")

    def replay(self) -> None:
        self.events.append("graph")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What becomes of graphs, which hold nothing."""
    monkeypatch.setattr(Graph, "events", [], raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    return Graph.events


def segments_of(key: AttentionSpec, dtype: torch.dtype) -> tuple[SegmentedGraph, list[SimpleNamespace]]:
    """A launch of attentions on slices of a fused projection with padding, cut into graphs; and its attentions."""

    def launch(attend: Callable[..., torch.Tensor], _: Any) -> list[SimpleNamespace]:
        generator, calls = torch.Generator().manual_seed(5), []
        heads = [key.num_q_heads, key.num_kv_heads, key.num_kv_heads]
        for layer in range(LAYERS):
            fused = torch.randn(PADDED, sum(heads), key.head_dim_k, generator=generator).to(dtype)
            states = fused.split(heads, 1)
            out = attend(layer, *states, None).fill_(7)
            calls.append(SimpleNamespace(layer=layer, states=states, out=out))
        return calls

    return record_segments(launch, None)


VERIFICATIONS, CHUNK, MIXED = [4, 4, 4, 1], [40], [4, 4, 30, 2]
SPLIT = ["aten::slice.Tensor"] * 2
CASES = {
    "verifications": (FlashInferBackend, KEY, VERIFICATIONS, []),
    "verifications of one length": (FlashInferBackend, KEY, [4, 4, 4], []),
    "a chunk": (FlashInferBackend, KEY, CHUNK, []),
    "both: the second kernel's rows begin further on": (FlashInferBackend, KEY, MIXED, SPLIT),
    "MLA: the kernel takes the two parts of a query": (FlashInferBackend, MLA, MIXED, SPLIT),
    "batch-invariant": (lambda _: InvariantBackend(), KEY, MIXED, []),
}


@pytest.mark.parametrize("case", CASES)
def test_no_operators_but_those_that_the_kernels_need(case: str, kernels: None, events: list[str]) -> None:
    make, key, query_lens, needed = CASES[case]
    runner = runner_of(make(CPU), key)
    planned, (graph, _) = planned_by(runner, metadata_of(query_lens, 50)), segments_of(key, torch.bfloat16)
    attend = partial(runner.attend, planned)
    graph.replay(lambda: Between(attend))  # what is made once a layer
    with check_mode(False), torch.inference_mode(), Operators() as operators:
        graph.replay(lambda: Between(attend))
    assert operators.names == needed * LAYERS


def test_attentions_run_between_the_graphs_and_are_planned_while_the_first_one_runs(events: list[str]) -> None:
    graph, calls = segments_of(KEY, torch.float32)
    assert events == ["begin", "end"] * (LAYERS + 1) and graph.num_graphs == LAYERS + 1
    events.clear()

    def attend(layer: int, *states: Any) -> torch.Tensor:
        events.append(f"attention {layer}")
        own = calls[layer]
        assert all(x is y for x, y in zip(states, (*own.states, None, own.out), strict=True))
        return own.out

    def plan() -> Any:
        events.append("plan")
        return Between(attend)

    graph.replay(plan)
    assert events == ["graph", "plan", "attention 0", "graph", "attention 1", "graph", "attention 2", "graph"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "query_lens"),
    [
        pytest.param(backend, lens, id=f"{backend}-{lens}", marks=[pytest.mark.long] * ((i + j) % 2))
        for i, backend in enumerate(("torch", "flashinfer"))
        for j, lens in enumerate(([4, 4, 4], VERIFICATIONS, MIXED, CHUNK, [16] * 4, [4, 4, 30]))
    ],
)
def test_results_and_cache_are_those_without_padding(
    backend: str, query_lens: list[int], kernels: None, events: list[str]
) -> None:
    make, dtype = (TorchBackend, torch.float32) if backend == "torch" else (FlashInferBackend, torch.bfloat16)
    metadata, tokens = metadata_of(query_lens, 50), sum(query_lens)
    runner, plain, reference = (runner_of(m(CPU), KEY, dtype) for m in (make, make, TorchBackend))
    graph, calls = segments_of(KEY, dtype)
    graph.replay(lambda: Between(partial(runner.attend, runner.plan(metadata))))
    for call, layer, other in zip(calls, runner.layers, plain.layers, strict=True):
        states = [x[:tokens] for x in call.states]
        alone = plain.attend(plain.plan(metadata), call.layer, *states)
        expected = reference.attend(reference.plan(metadata), call.layer, *states)
        assert torch.equal(call.out[:tokens], alone) and (call.out[tokens:] == 7).all()
        assert torch.allclose(alone.float(), expected.float(), atol=2e-2 if backend == "flashinfer" else 1e-6)
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)


def test_recurrences_run_between_the_graphs_as_attentions_do(events: list[str]) -> None:
    x = torch.ones(4, 3)

    def recur(name: str, call: int, *inputs: Any) -> torch.Tensor:
        events.append(f"recurrence {call}")
        assert name == "short_conv" and inputs == (x, None, True)
        return torch.full((4, 3), 2.0)

    def launch(_: Any, serve: Any) -> torch.Tensor:
        return serve("short_conv", 5, x, None, True)

    def noted(note: Any) -> Any:
        def call(name: str, number: int, *inputs: Any) -> torch.Tensor:
            out = torch.full((4, 3), 7.0)
            note(name, number, inputs, out)
            return out

        return call

    others: Any = SimpleNamespace(blank=lambda: lambda *_: torch.zeros(4, 3), noted=noted)
    graph, out = record_segments(launch, None, others=others)
    events.clear()
    graph.replay(lambda: Between(lambda *_: pytest.fail("no attention"), recur))
    assert events == ["graph", "recurrence 5", "graph"] and (out == 2).all()
