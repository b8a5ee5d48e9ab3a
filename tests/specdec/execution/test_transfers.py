"""Host-to-device copies of rounds from graphs: two, three with sampled rows, whatever else is in the round.

The graphs are those of test_graphs.py. What a GPU does in such rounds beside them: tests/gpu/test_graph_rounds.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from fakes import VOCAB, count_calls, engine_of, free_everywhere, table_head, tiny_llama

from benchmarks.mixed import mixed_rounds
from benchmarks.workload import Load
from specdec.execution.graphs import GraphExecutor
from specdec.execution.ragged import RaggedPrefill
from specdec.execution.readback import HostReads
from tests.sampled_rounds import kernels_by_reference
from tests.specdec.execution.test_graphs import Replayed, graphs_on_cpu, recorded_on_cpu, with_graphs  # noqa: F401

pytest.importorskip("triton", reason="Triton is not installed")

ROUNDS = 8


def transfers_a_round(monkeypatch: pytest.MonkeyPatch, sampled_rows: float, sampled_prompts: float) -> float:
    """Of ROUNDS rounds that read prompts beside two rows that decode; each has one read, and drafts before it."""
    sizes: dict[str, Any] = {"num_speculative_tokens": 3, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    graphed = with_graphs(table_head(tiny_llama()), **sizes, max_num_prefill_tokens=6)
    rows = Load(2, (5, 9), (100, 100), sampled_share=sampled_rows).arrivals(VOCAB)
    prompts = Load(1, (70, 70), (2, 2), sampled_share=sampled_prompts).arrivals(VOCAB)
    with kernels_by_reference(), mixed_rounds(engine_of(graphed), rows, prompts, ROUNDS) as go_on:
        reads, prefills = count_calls(monkeypatch, HostReads, "start"), count_calls(monkeypatch, RaggedPrefill, "run")
        before = graphed.executor.transfers
        assert go_on() == len(reads) == len(prefills) == ROUNDS
        sent = graphed.executor.transfers - before
    assert free_everywhere(graphed)
    return float(sent / ROUNDS)


@pytest.mark.parametrize(("rows", "prompts", "copies"), [(0, 0, 2.0), (1, 1, 3.0), (1, 0, 3.0)])
def test_mixed_rounds(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    rows: float,
    prompts: float,
    copies: float,
) -> None:
    assert transfers_a_round(monkeypatch, rows, prompts) == copies


def test_a_copy_more_is_seen(graphs_on_cpu: list[Replayed], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Planted: every round is sent twice; its draft steps are not."""
    plain = GraphExecutor.send
    monkeypatch.setattr(GraphExecutor, "send", lambda *args: (plain(*args), plain(*args))[1])
    assert transfers_a_round(monkeypatch, 0, 0) == 3.0
