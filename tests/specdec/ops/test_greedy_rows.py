"""Placing and accepting drafts of greedy rows by kernels, in Triton's interpreter, against their torch reference."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from fakes import Operators, examples, table_head, tiny_llama
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import specdec.acceptance.judge
from drafters.loops.base import Draft
from specdec.acceptance.judge import (
    accept_equal,
    fill_drafts,
    fill_from_loop,
    in_order,
    judge_from_loop,
    judge_greedy,
)
from specdec.ops.greedy_kernel import launch_acceptance
from specdec.requests.sampling import SamplingParams
from specdec.rounds.transfer import DeviceRound
from tests.specdec.execution.test_graphs import (  # noqa: F401 (fixtures)
    PROMPTS,
    graphs_on_cpu,
    recorded_on_cpu,
    with_graphs,
)

TOKENS = 3
"""Of the vocabulary: drafts are often right."""


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdec.acceptance.judge, "_has_kernels", lambda x: True)


@dataclass(frozen=True)
class Verified:
    """A round, the drafts that the loop keeps, and the target's arg max."""

    round: DeviceRound
    draft: Draft | None
    greedy: torch.Tensor


def verified(counts: list[int], width: int, drafting: int, seed: int, kind: str) -> Verified:
    """A round of rows with so many drafts, at most `width`, some in the first `drafting` rows.

    kind: "fixed" as `FixedTarget` sends it (every row has all places and a source), "ragged" as `TargetArrays.inputs`
    does, "in order" the same without sources, "none" without drafts.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = len(counts)
    kept = torch.randint(TOKENS, (rows + 2, width + 2), generator=generator)
    permutation = torch.randperm(rows, generator=generator)
    num_drafts = torch.tensor([n if row < drafting else 0 for row, n in enumerate(counts)])
    if kind == "none":
        num_drafts.zero_()
    places = torch.full((rows,), width) if kind == "fixed" else num_drafts
    starts = (places + 1).cumsum(0) - places - 1
    index = starts[:, None] + torch.minimum(torch.arange(width + 1), places[:, None])
    drafted = torch.arange(1, width + 1) <= places[:, None]
    if kind == "fixed":
        sources: torch.Tensor | None = torch.cat([permutation[:drafting], torch.arange(drafting, rows)])
        draft: Draft | None = Draft(kept, None)
    else:
        sources = permutation[:drafting] if kind == "ragged" else None
        draft = Draft(kept[:, : width + 1] if kind == "ragged" else kept[:drafting, :width].contiguous(), None)
    shuffled = torch.randperm(int(places.sum()) + rows, generator=generator)  # logits stand in another order
    greedy = torch.randint(TOKENS, (len(shuffled),), generator=generator)
    round_ = DeviceRound(
        metadata=None,  # type: ignore[arg-type]
        token_ids=torch.full((len(shuffled),), -9),
        draft_places=(starts[:, None] + torch.arange(1, width + 1))[drafted],
        draft_sources=drafted.reshape(-1).nonzero()[:, 0],
        logits_indices=torch.arange(len(shuffled)),
        logit_index=shuffled[index],
        num_drafts=num_drafts,
        sources=sources,
        sampling=None,
    )
    return Verified(round_, None if kind == "none" else draft, greedy)


@st.composite
def rounds(draw: Any) -> Verified:
    width = draw(st.integers(0, 17))
    counts = draw(st.lists(st.integers(0, width), min_size=1, max_size=6))
    kind = draw(st.sampled_from(["fixed", "ragged", "in order", "none"]))
    drafting = draw(st.integers(0, len(counts)))
    return verified(counts, width, drafting, draw(st.integers(0, 2**32 - 1)), kind)


@given(rounds())
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.thorough
def test_kernels_place_and_accept_as_torch_does(by_kernels: None, case: Verified) -> None:
    """Rows of any number of drafts, in any order, beside rows without."""
    round_, draft, greedy = case.round, case.draft, case.greedy
    before = round_.token_ids.clone()
    ours, result = fill_from_loop(round_, draft).clone(), judge_from_loop(greedy, round_, draft)
    round_.token_ids.copy_(before)
    ordered = in_order(draft, round_)
    assert ours.tolist() == fill_drafts(round_, ordered).tolist()
    right = judge_greedy(greedy[round_.logit_index], round_, ordered)
    assert result.packed.tolist() == right.packed.tolist() and result.packed.is_contiguous()
    result.num_accepted.fill_(-7)
    result.tokens.fill_(-7)
    accept_equal(greedy[round_.logit_index].reshape(-1), round_.num_drafts, result)
    assert result.packed.tolist() == right.packed.tolist()


def test_all_and_none_and_a_few_are_accepted(by_kernels: None) -> None:
    """Written out: the last row has a fourth draft that would be right, but does not exist."""
    drafts = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4], [9, 9, 9, 9]])
    case = verified([4, 4, 3], 4, 3, 0, "fixed").round
    index = torch.arange(15).view(3, 5)
    greedy = torch.tensor([1, 2, 3, 4, 50, 8, 2, 3, 4, 60, 5, 6, 0, 8, 70])
    num_drafts = torch.tensor([4, 4, 1])
    round_ = DeviceRound(
        **{**vars(case), "logit_index": index, "num_drafts": num_drafts, "sources": torch.tensor([1, 2, 0])}
    )
    result = judge_from_loop(greedy, round_, Draft(drafts, None))
    assert result.num_accepted.tolist() == [4, 0, 1]
    assert result.tokens.tolist() == [[1, 2, 3, 4, 50], [8, 9, 9, 9, 0], [5, 6, 7, 8, 0]]
    assert result.drafts.tolist() == [[1, 2, 3, 4], [9, 9, 9, 9], [5, 6, 7, 8]]


def test_no_more_drafts_are_accepted_than_there_are_places() -> None:
    """Whatever the count says: what a rehearsal finds there is any number. The last target's token is 0, as what stands
    where there is no draft."""
    greedy, drafts = torch.tensor([4, 5, 0]), torch.tensor([[4, 5]])
    out = torch.full((1,), -1), torch.full((1, 3), -1), torch.full((1, 2), -1)
    launch_acceptance(greedy, torch.arange(3)[None], torch.tensor([99]), drafts, torch.tensor([0]), out)
    assert [each.tolist() for each in out] == [[2], [[4, 5, 0]], [[4, 5]]]


def test_a_round_without_decided_rows(by_kernels: None) -> None:
    case = verified([0], 0, 0, 0, "none").round
    empty = torch.zeros(0, dtype=torch.int64)
    round_ = DeviceRound(**{**vars(case), "logit_index": empty.view(0, 1), "num_drafts": empty})
    assert judge_from_loop(empty, round_, None).packed.shape == (0, 2)


def launches(case: Verified, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Launches before the forward and after the arg max; a kernel of ours counts as one, whatever the interpreter does.

    (It replaces nothing here: what the kernels write is tested above.)
    """
    kernels: list[str] = []
    monkeypatch.setattr("specdec.ops.greedy_kernel.launch_placing", lambda *args: kernels.append("placing"))
    monkeypatch.setattr("specdec.ops.greedy_kernel.launch_acceptance", lambda *args: kernels.append("acceptance"))
    with Operators() as placed:
        fill_from_loop(case.round, case.draft)
    before = sum(placed.counts.values()) + len(kernels)
    kernels.clear()
    with Operators() as accepted:
        judge_from_loop(case.greedy, case.round, case.draft)
    return before, sum(accepted.counts.values()) + len(kernels)


def test_one_launch_before_the_forward_and_one_after_the_arg_max(
    by_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = verified([5], 5, 1, 0, "fixed")
    assert launches(case, monkeypatch) == (1, 1)
    monkeypatch.setattr(specdec.acceptance.judge, "_has_kernels", lambda x: False)
    assert min(launches(case, monkeypatch)) >= 3, "torch's own"


@pytest.mark.slow
@pytest.mark.thorough
def test_rounds_from_graphs_by_kernels_are_those_by_torch(
    graphs_on_cpu: list[Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that join and end in turn, so that drafts stand in another order than the rows they belong to."""
    answers = []
    for kernels in (False, True):
        monkeypatch.setattr(specdec.acceptance.judge, "_has_kernels", lambda x, kernels=kernels: kernels)
        model = with_graphs(table_head(tiny_llama()), num_speculative_tokens=3, max_num_seqs=3)
        params = [SamplingParams(max_new_tokens=6 + 3 * i, return_drafts=True) for i in range(len(PROMPTS))]
        answers.append([(c.token_ids, c.drafts) for c in model.generate(PROMPTS, params)])
    assert answers[0] == answers[1]
