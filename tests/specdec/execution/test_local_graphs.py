"""Llama 4 in rounds from graphs: attention in chunks as virtual rows of one fixed shape, queries scaled by position.

The graphs are those of test_graphs.py: launches that run again on the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import TableHead, backend_of_ours, free_everywhere, launch_ahead, random_prompts, table_head, wrap

import attention.batch.transforms.local_attention as fixed_local
from attention.batch.host import HostBatch
from attention.batch.transforms.local_attention import fixed_local_attention
from attention.runner import FixedPlanner
from specdec.compiler.compiling import compiler_settings
from specdec.execution.graphs import GraphExecutor
from specdec.requests.sampling import SamplingParams
from tests.public.test_llama4 import llama4
from tests.specdec.execution.test_graphs import (  # noqa: F401 (fixtures)
    FixedPlaceBackend,
    Replayed,
    graphs_on_cpu,
    recorded_on_cpu,
    traced_graphs,
)

CHUNK = 8
PROMPTS = random_prompts((5, 33, 1, 17, 50, 9))
LENGTHS = (24, 14, 28, 3, 12, 9)
PARAMS = [SamplingParams(max_new_tokens=n, return_drafts=True) for n in LENGTHS]
SIZES = {"num_speculative_tokens": 3, "max_num_seqs": 4, "max_num_batched_tokens": 24}
"""Prompts come in pieces, beside verifications, and rows join and leave."""
EAGER: dict[str, Any] = {}
"""Answers of eager rounds, which no test of this file changes: most ask for the same ones."""


def local_head(target: Any) -> TableHead:
    """A head that attends in chunks, too, and scales its queries as a layer of the target does."""
    head = table_head(target)
    (spec,) = head.attention_specs
    head.attention_specs = (replace(spec, chunk_size=4),)
    return head


def answers(
    target: Any, head: Any, graphs: bool | str, prompts: Any = PROMPTS, params: Any = PARAMS, **sizes: Any
) -> Any:
    """(tokens, drafts, rounds) of every request."""
    with backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
        model = wrap(target, head, cuda_graphs=graphs, **{**SIZES, **sizes})
    assert isinstance(model.engine.executor, GraphExecutor) == bool(graphs)
    launch_ahead(model, bool(graphs))
    with model:
        completions = model.generate(prompts, params)
        assert free_everywhere(model)
    return [(c.token_ids, c.drafts, c.stats.rounds) for c in completions]


def differing(make: Callable[[Any], Any] = table_head, chunk: int = CHUNK, **options: Any) -> list[int]:
    """The requests whose tokens, drafts or rounds from graphs are not those of eager rounds."""
    target = llama4(False, chunk)
    head = make(target)
    asked = f"{make} {chunk} {options}"
    if asked not in EAGER:
        EAGER[asked] = answers(target, head, False, **options)
    eager, graphed = EAGER[asked], answers(target, head, True, **options)
    return [i for i, (one, other) in enumerate(zip(eager, graphed, strict=True)) if one != other]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "options"),
    [
        pytest.param(CHUNK, {}, marks=pytest.mark.long),
        # Up to three chunks in a verification, and preemption.
        (4, {"num_speculative_tokens": 5, "kv_cache_tokens": 88}),
        pytest.param(
            CHUNK, {"num_speculative_tokens": 1, "page_size": 2, "kv_cache_layout": "HND"}, marks=pytest.mark.long
        ),
    ],
)
@pytest.mark.thorough
def test_tokens_drafts_and_rounds_are_those_of_eager_rounds(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    options: dict[str, Any],
) -> None:
    """Past several chunks; verifications lie in one chunk or over its end, steps of the draft loop in one."""
    across: list[bool] = []

    def noted(batch: HostBatch, chunk_size: int, each: int) -> HostBatch:
        across.append(bool((batch.num_computed_tokens // chunk != (batch.seq_lens - 1) // chunk).any()))
        return fixed_local_attention(batch, chunk_size, each)

    monkeypatch.setattr(fixed_local, "fixed_local_attention", noted)
    assert differing(chunk=chunk, **options) == []
    assert sum(graph.replays for graph in graphs_on_cpu) > 20
    assert across.count(True) > 5


@pytest.mark.slow
def test_without_drafts(graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    assert differing(lambda _: None, num_speculative_tokens=0) == []
    assert any(graph.replays for graph in graphs_on_cpu)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_head_that_attends_in_chunks(graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    """The draft prefill lies over the end of chunks, every step in one."""
    assert differing(local_head, num_speculative_tokens=5) == []
    assert any(graph.replays for graph in graphs_on_cpu)


@pytest.mark.slow
@pytest.mark.thorough
def test_sampled_rows(graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    params = [replace(own, temperature=(0.9, 0.0)[i % 2], seed=i) for i, own in enumerate(PARAMS)]
    assert differing(params=params) == []


@pytest.mark.long
def test_the_target_is_one_compiled_graph(
    recorded_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced without a break, for rounds of every shape; what it computes is that of eager rounds."""
    traced = traced_graphs(monkeypatch)
    with compiler_settings():  # a real replay compiles nothing anew
        assert differing() == []
    assert len(traced) == 1


def changed(batch: HostBatch, **arrays: np.ndarray) -> HostBatch:
    """The batch with these arrays, and what is derived from them."""
    return HostBatch(**{field.name: getattr(batch, field.name) for field in fields(HostBatch)} | arrays)


def second_rows_empty(batch: HostBatch, chunk_size: int, each: int) -> HostBatch:
    """Every virtual row after a row's first is as if it were not needed; the first holds all queries."""
    right = fixed_local_attention(batch, chunk_size, each)
    starts = np.repeat(right.query_start_loc[::each][1:], each)
    starts[::each] = right.query_start_loc[::each][1:]
    lens = np.diff(np.concatenate([[0], starts]))
    seqs = np.where(lens > 0, np.maximum(right.num_computed_tokens + lens, 1), 1).astype(np.int32)
    width = int(-(-seqs.max() // batch.page_size))
    table = np.zeros((len(seqs), width), np.int32)
    table[:, : right.block_table.shape[1]] = right.block_table[:, :width]
    table[lens == 0] = 0
    return changed(
        right,
        query_start_loc=np.concatenate([[0], starts]).astype(np.int32),
        seq_lens=seqs,
        num_computed_tokens=(seqs - lens).astype(np.int32),
        block_table=table,
    )


def chunks_a_page_late(batch: HostBatch, chunk_size: int, each: int) -> HostBatch:
    """Chunks begin a page late, where there is one more."""
    right = fixed_local_attention(batch, chunk_size, each)
    late = (right.num_computed_tokens >= batch.page_size) & (right.query_lens > 0)
    table = np.concatenate([right.block_table, np.zeros_like(right.block_table[:, :1])], 1)
    table = np.where(late[:, None], table[:, 1:], table[:, :-1])
    shift = np.where(late, batch.page_size, 0).astype(np.int32)
    return changed(
        right,
        seq_lens=right.seq_lens - shift,
        num_computed_tokens=right.num_computed_tokens - shift,
        block_table=table,
    )


PLANTED = {"the second virtual row is always empty": second_rows_empty, "chunks begin a page late": chunks_a_page_late}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["the second virtual row is always empty", pytest.param("chunks begin a page late", marks=pytest.mark.long)],
)
@pytest.mark.thorough
def test_planted_virtual_rows_are_seen(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(fixed_local, "fixed_local_attention", PLANTED[name])
    monkeypatch.setattr(HostBatch, "validate", lambda self: None)
    assert differing()


@pytest.mark.long
def test_virtual_rows_that_are_not_sent_anew_are_seen(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: layers in chunks are planned for the rows of the capture."""
    replan = FixedPlanner.replan

    def stale(self: FixedPlanner, host: HostBatch) -> None:
        kept, self.builders = self.builders, {k: b for k, b in self.builders.items() if k.chunk_size is None}
        replan(self, host)
        self.builders = kept

    monkeypatch.setattr(FixedPlanner, "replan", stale)
    assert differing()


class WrittenOnce(dict[Any, torch.Tensor]):
    """What was there first stays."""

    def __setitem__(self, key: Any, value: torch.Tensor) -> None:
        self.setdefault(key, value)


@pytest.mark.long
def test_factors_of_the_capture_are_seen(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: queries are scaled by the positions that the graph was captured with."""
    plan = FixedPlanner.plan
    monkeypatch.setattr(
        FixedPlanner, "plan", lambda self, metadata: replace(plan(self, metadata), temperatures=WrittenOnce())
    )
    assert differing()
