"""Host-to-device copies of rounds from graphs: two, three with sampled rows, whatever else is in the round.

The graphs are those of test_graphs.py. What a GPU does in such rounds beside them: tests/gpu/test_graph_rounds.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from fakes import VOCAB, count_calls, engine_of, free_everywhere, table_head, tiny_llama

from benchmarks.serving import Rounds
from benchmarks.workload import Arrival, Load
from specdec.execution.graphs import GraphExecutor
from specdec.execution.ragged import RaggedPrefill, RaggedTarget
from specdec.execution.readback import HostReads
from specdec.requests.sampling import SamplingParams
from specdec.rounds.fixed import FixedSampling, FixedTarget
from specdec.rounds.transfer import AheadTransfer
from tests.sampled_rounds import kernels_by_reference
from tests.specdec.execution.mixed import mixed_rounds, until
from tests.specdec.execution.test_graphs import Replayed, graphs_on_cpu, recorded_on_cpu, with_graphs  # noqa: F401

pytest.importorskip("triton", reason="Triton is not installed")

ROUNDS = 8
Some = Callable[[Any, Sequence[Arrival], Sequence[Arrival], int], AbstractContextManager[Callable[[], int]]]
"""`mixed_rounds` or `full_rounds`."""


@contextmanager
def full_rounds(
    engine: Any, rows: Sequence[Arrival], prompts: Sequence[Arrival], count: int
) -> Iterator[Callable[[], int]]:
    """As `mixed_rounds`, but nothing arrives: every row verifies."""
    made = Rounds(engine)
    until(made, [made.submit(row, 0.0) for row in rows], 4)

    def go_on() -> int:
        for _ in range(count):
            made.step()
        return count

    try:
        yield go_on
    finally:
        engine.abort(list(made.lines))


def transfers_a_round(
    monkeypatch: pytest.MonkeyPatch, some: Some, sampled_rows: float, sampled_prompts: float = 0.0
) -> float:
    """Of ROUNDS rounds in which two rows decode; each has one read, and the draft prefill before it."""
    sizes: dict[str, Any] = {"num_speculative_tokens": 3, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    graphed = with_graphs(table_head(tiny_llama()), **sizes, max_num_prefill_tokens=6)
    rows = Load(2, (5, 9), (100, 100), sampled_share=sampled_rows).arrivals(VOCAB)
    prompts = Load(1, (70, 70), (2, 2), sampled_share=sampled_prompts).arrivals(VOCAB)
    with kernels_by_reference(), some(engine_of(graphed), rows, prompts, ROUNDS) as go_on:
        reads, prefills = count_calls(monkeypatch, HostReads, "start"), count_calls(monkeypatch, RaggedPrefill, "run")
        before = graphed.engine.executor.transfers
        assert go_on() == len(reads) == ROUNDS
        assert len(prefills) == (ROUNDS if some is mixed_rounds else 0)
        sent = graphed.engine.executor.transfers - before
    assert free_everywhere(graphed)
    return float(sent / ROUNDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "prompts", "copies"),
    [(0, 0, 3.0), pytest.param(1, 1, 4.0, marks=pytest.mark.long), pytest.param(1, 0, 4.0, marks=pytest.mark.slow)],
)
@pytest.mark.cases(1)
def test_mixed_rounds(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    rows: float,
    prompts: float,
    copies: float,
) -> None:
    """One more than where every row verifies: that of the draft prefill, made while the device verifies."""
    assert transfers_a_round(monkeypatch, mixed_rounds, rows, prompts) == copies


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "copies"),
    [(0, 2.0), pytest.param(0.5, 3.0, marks=pytest.mark.long), pytest.param(1, 3.0, marks=pytest.mark.slow)],
)
@pytest.mark.cases(1)
def test_rounds_in_which_every_row_verifies(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    rows: float,
    copies: float,
) -> None:
    assert transfers_a_round(monkeypatch, full_rounds, rows) == copies


@pytest.mark.slow
@pytest.mark.parametrize("planted", [False, pytest.param(True, marks=pytest.mark.long)])
def test_sampling_is_laid_out_while_the_device_verifies(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    planted: bool,
) -> None:
    """Between a round's arrays and the launch of its verification the device may wait. Planted: it is sent before."""
    graphed = with_graphs(table_head(tiny_llama()), num_speculative_tokens=3, max_num_seqs=4, max_num_batched_tokens=24)
    order: list[str] = []
    launches = ((AheadTransfer, "send"), (RaggedTarget, "logits"), (FixedTarget, "send"), (Replayed, "replay"))
    for owner, name in (*launches, (FixedSampling, "send")):
        plain, tag = getattr(owner, name), f"{owner.__name__}.{name}"

        def noted(*args: Any, plain: Any = plain, tag: str = tag) -> Any:
            order.append(tag)
            return plain(*args)

        monkeypatch.setattr(owner, name, noted)
    if planted:
        send = GraphExecutor.send

        def early(self: GraphExecutor, draft: Any, target: Any, sampling: Any) -> Any:
            if sampling is not None:
                self._send_sampling(sampling)
            return send(self, draft, target, sampling)

        monkeypatch.setattr(GraphExecutor, "send", early)
    params = SamplingParams(max_new_tokens=20, temperature=0.8, seed=1)
    graphed.generate([[1, 2, 3]], params)
    sent = [i for i, tag in enumerate(order) if tag == "FixedSampling.send"]
    before = [tuple(order[max(i - 2, 0) : i]) for i in sent]
    launched = {("AheadTransfer.send", "RaggedTarget.logits"), ("FixedTarget.send", "Replayed.replay")}
    assert len(before) > 4 and (set(before) == launched) == (not planted)


@pytest.mark.long
def test_a_copy_more_is_seen(graphs_on_cpu: list[Replayed], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Planted: every round is sent twice; its draft steps are not."""
    plain = GraphExecutor.send
    monkeypatch.setattr(GraphExecutor, "send", lambda *args: (plain(*args), plain(*args))[1])
    assert transfers_a_round(monkeypatch, mixed_rounds, 0) == 4.0
