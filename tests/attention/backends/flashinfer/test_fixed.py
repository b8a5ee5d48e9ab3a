"""Fixed plans for CUDA graphs: planned anew exactly when the launch that a graph holds would divide its work otherwise.

FlashInfer's wrapper is replaced by one that notes what it is planned with; tests/gpu/test_local_graphs.py runs its own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attention.backends.flashinfer.backend import FlashInferBackend
from attention.backends.flashinfer.short_queries import PackedKernel
from attention.batch.host import HostBatch, rows_batch
from attention.batch.metadata import CommonAttentionMetadata, single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup
from attention.errors import UnsupportedAttentionError
from attention.runner import FixedPlanner, GroupRunner
from attention.spec import AttentionSpec

CPU = torch.device("cpu")
PLAIN = AttentionSpec(4, 2, 128, 128, scale=0.1)
LOCAL = replace(PLAIN, chunk_size=32)


@dataclass
class Planned:
    """What wrappers were made and planned with; plans: (query_start_loc, page_indptr, tokens, rows, tail)."""

    first: list[dict[str, Any]] = field(default_factory=list)
    plans: list[tuple[list[int], list[int], int, int, tuple[Any, ...]]] = field(default_factory=list)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """FlashInfer on a GPU of 132 multiprocessors, without its kernels."""
    noted = Planned()

    def plan(_float: Any, _int: Any, _pinned: Any, starts: Any, pages: Any, _seqs: Any, *rest: Any) -> list[int]:
        noted.plans.append((starts.tolist(), pages.tolist(), rest[0], rest[1], rest[2:]))
        return [0]

    class Wrapper:
        def __init__(self, workspace: torch.Tensor, layout: str, **_: Any) -> None:
            self._float_workspace_buffer = self._int_workspace_buffer = workspace
            self._pin_memory_int_workspace_buffer, self._plan_info = workspace, [0]
            self._cached_module = SimpleNamespace(plan=plan)

        def reset_workspace_buffer(self, *_: Any) -> None: ...

        def plan(self, *arguments: Any, **options: Any) -> None:
            noted.first.append({"starts": arguments[0].tolist(), **options})

    event = SimpleNamespace(record=lambda: None, query=lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr("attention.backends.flashinfer.backend.LEAST_BYTES", 1)
    monkeypatch.setattr("attention.staging._RING", 1)
    built = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr("attention.backends.flashinfer.wrapper.building", lambda *_: built)
    monkeypatch.setattr("attention.backends.flashinfer.backend.building", lambda *_: built)
    monkeypatch.setattr("attention.backends.flashinfer.short_queries.packed_scratch", lambda *_: None)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))
    return noted


def batch(*first: int, query_len: int = 4) -> HostBatch:
    """Rows of four tokens on pages of 16, from these positions on."""
    rows = len(first)
    table = np.arange(1, 8 * rows + 1, dtype=np.int32).reshape(rows, 8)
    return rows_batch(np.arange(0, query_len * rows + 1, query_len), np.array(first), table, 16)


def sent(host: HostBatch) -> CommonAttentionMetadata:
    return stage(host, *single_batch_arena(host.num_reqs, host.num_tokens, host.block_table.shape[1], CPU))


def planner_of(rows: int, query_len: int = 4, *specs: AttentionSpec) -> FixedPlanner:
    group = CacheGroup("g", specs or (LOCAL,), 8 * rows + 1, 16)
    return GroupRunner(FlashInferBackend(CPU), group, torch.float16, CPU).fixed_planner(rows, query_len)


def test_virtual_rows_are_planned_anew_when_their_tokens_change(planned: Planned) -> None:
    """Same pages in both rounds of the middle: but a token has gone over to the second virtual row."""
    planner = planner_of(2)
    first = planned.first[-1]
    assert first["starts"] == [0, 4, 8, 8, 8] and first["uniform_q_len"] is None and not first["disable_split_kv"]
    planner.plan(sent(batch(0, 0)))
    for start in (20, 29, 30, 30):
        planner.replan(batch(start, 3))
    starts = [[0, 4, 4, 8, 8], [0, 4, 4, 8, 8], [0, 3, 4, 8, 8], [0, 2, 4, 8, 8]]
    pages = [[0, 1, 2, 3, 4], [0, 2, 3, 4, 5], [0, 2, 3, 4, 5], [0, 2, 3, 4, 5]]
    assert [(p[0], p[1]) for p in planned.plans] == list(zip(starts, pages, strict=True))
    assert {(tokens, rows, tail[-1]) for _, _, tokens, rows, tail in planned.plans} == {(8, 4, 0)}


def test_the_same_lengths_are_not_planned_again(planned: Planned) -> None:
    planner = planner_of(2)
    planner.plan(sent(batch(0, 0)))
    before = len(planned.plans)
    for start in (1, 7, 12):
        planner.replan(batch(start, 3))
    assert len(planned.plans) == before


def test_without_split_kv_only_the_tokens_of_rows_decide(planned: Planned) -> None:
    """So many rows that the planner would split none: lengths change nothing, tokens of virtual rows do.

    Half of the virtual rows may be empty, so they count for half.
    """
    planner_of(80)
    assert not planned.first[-1]["disable_split_kv"]
    planner = planner_of(120)
    assert planned.first[-1]["disable_split_kv"]
    planner.plan(sent(batch(*[0] * 120)))
    planner.replan(batch(*[20] * 120))
    assert len(planned.plans) == 1
    planner.replan(batch(*[30] * 120))
    assert len(planned.plans) == 2


def test_virtual_rows_are_never_packed_and_single_tokens_may_be(planned: Planned) -> None:
    """The packed kernel takes rows of one length, as those of a draft step are: in one chunk each."""
    assert isinstance(kernel_of(planner_of(2, 4, PLAIN), PLAIN), PackedKernel)
    assert isinstance(kernel_of(planner_of(2, 1), LOCAL), PackedKernel)
    assert not isinstance(kernel_of(planner_of(2), LOCAL), PackedKernel)


def test_layers_that_are_not_causal_are_packed_whatever_their_width(planned: Planned) -> None:
    """A plan for each of a head's layers, rows of one length, and no more queries than the kernel's tile."""
    both = AttentionSpec(8, 2, 64, 64, 0.125, causal=False)
    keys = (replace(both, causal=True), both, replace(both, window=40))
    group = CacheGroup("head", keys, 17, 16)
    runner = GroupRunner(FlashInferBackend(CPU), group, torch.float16, CPU)
    assert runner.routes[1] == "specdec's packed kernel, float16, not causal"
    fixed = runner.fixed_planner(2, 16)
    assert all(isinstance(kernel_of(fixed, key), PackedKernel) for key in keys[1:])
    assert not isinstance(kernel_of(fixed, keys[0]), PackedKernel)
    builder: Any = FlashInferBackend(CPU).builder(group, both, torch.float16)
    plan = builder.build(sent(batch(3, 20, query_len=16)))
    assert isinstance(plan.parts[0][0], PackedKernel) and builder.build(sent(batch(3, query_len=7))).parts[0][1] == 1
    with pytest.raises(UnsupportedAttentionError, match="33 tokens of a row and 4 query heads of a KV head are 132"):
        runner.fixed_planner(2, 33)
    ragged = rows_batch(np.array([0, 2, 5]), np.array([0, 0]), np.ones((2, 8), np.int32), 16)
    with pytest.raises(UnsupportedAttentionError, match="has rows of one length"):
        builder.build(sent(ragged))


def kernel_of(planner: FixedPlanner, key: AttentionSpec) -> Any:
    builder: Any = planner.builders[key]
    return vars(builder)["_kernel"]


def test_latent_attention_in_chunks_is_refused(planned: Planned) -> None:
    key = AttentionSpec(16, 1, 576, 512, scale=0.1, value_in_key=True, chunk_size=64)
    with pytest.raises(UnsupportedAttentionError, match="MLA in chunks has no fixed plans"):
        FlashInferBackend(CPU).fixed_builder(CacheGroup("g", (key,), 9, 64), key, torch.bfloat16, 4, 3, tokens=6)
