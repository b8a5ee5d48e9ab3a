"""What is handed to acceptance: every row's own drafts, parameters and uniforms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec.acceptance.judge
from drafters.loops.base import Draft
from specdec.acceptance.accept import SampledInputs, VerificationResult
from specdec.acceptance.judge import DraftVocab, choose_sampled, fill_from_loop, in_order, judge
from specdec.requests.sampling import SamplingTensors
from specdec.requests.target_probs import draw, target_probs
from specdec.rounds.transfer import DeviceSampling

V, ROWS, K = 6, 2, 2


def sampling(*temperatures: float, seed: int = 0) -> DeviceSampling:
    """Rows that differ in temperature, with random uniforms."""
    rows, generator = len(temperatures), torch.Generator().manual_seed(seed)
    zeros, ones = torch.zeros(rows), torch.ones(rows)
    tensors = SamplingTensors(torch.tensor(temperatures), zeros.int(), ones, zeros, filters=False)
    draft, accept, following = (torch.rand(rows, n, generator=generator) for n in (K, K, K + 1))
    return DeviceSampling(accept, following, draft, tensors=tensors)


def round_of(logit_index: list[list[int]], num_drafts: list[int], **fields: Any) -> Any:
    index = torch.tensor(logit_index)
    own = {"sources": None, "sampling": None, **fields}
    return SimpleNamespace(logit_index=index, num_drafts=torch.tensor(num_drafts), **own)


def test_a_draft_is_drawn_by_its_own_uniform_and_at_its_rows_temperature() -> None:
    own = sampling(0.5, 2.0, 1.0)
    choose = choose_sampled(own, ROWS)
    logits = torch.randn(ROWS, V, generator=torch.Generator().manual_seed(1))
    for step in range(K):
        ids, q = choose(step, logits)
        assert q is not None
        for row in range(ROWS):
            right = (logits[row] / own.tensors.temperature[row]).softmax(-1)
            torch.testing.assert_close(q[row], right)
            assert ids[row] == draw(right[None], own.draft_uniform[row, step][None])[0]


def test_drafts_come_in_the_order_of_the_round_and_cut_to_its_width() -> None:
    """A loop that runs ahead drafts K for every row of the round before; this one has two rows and one place."""
    draft = Draft(torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), None)
    found = in_order(draft, round_of([[0, 1], [2, 3]], [1, 1], sources=torch.tensor([2, 0])))
    assert found is not None and found.token_ids.tolist() == [[7], [1]] and found.token_ids.is_contiguous()
    assert in_order(draft, round_of([[0, 1]], [1])) is draft


def test_drafts_are_filled_in_where_their_row_has_places() -> None:
    """Rows of two drafts and of one; flat sources count the round's own width."""
    draft = Draft(torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), None)
    round_ = round_of([[0, 1, 2], [3, 4, 4]], [2, 1], sources=torch.tensor([2, 0]))
    round_.token_ids = torch.tensor([50, 0, 0, 60, 0])
    round_.draft_places, round_.draft_sources = torch.tensor([1, 2, 4]), torch.tensor([0, 1, 2])
    assert fill_from_loop(round_, draft).tolist() == [50, 7, 8, 60, 1]


def test_greedy_rows_are_judged_by_their_own_logits() -> None:
    """Ragged: the second row has one draft, and rows after those that draft have none."""
    round_ = round_of([[0, 1, 2], [3, 4, 4], [5, 5, 5]], [2, 1, 0])
    greedy = torch.tensor([7, 8, 9, 7, 6, 5])
    result = judge(torch.eye(10)[greedy], round_, Draft(torch.tensor([[7, 1], [7, 0]]), None), None)
    assert result.num_accepted.tolist() == [1, 1, 0]
    assert result.tokens[:, :2].tolist() == [[7, 8], [7, 6], [5, 0]] and result.drafts.tolist() == [
        [7, 1],
        [7, 0],
        [0, 0],
    ]


def test_sampled_acceptance_is_given_each_rows_p_q_and_uniforms(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor, SampledInputs]] = []

    def noting(drafts: torch.Tensor, num_drafts: torch.Tensor, inputs: SampledInputs) -> VerificationResult:
        seen.append((drafts, num_drafts, inputs))
        return VerificationResult(torch.tensor([1, 0]), torch.tensor([3, 4]))

    monkeypatch.setattr(specdec.acceptance.judge, "accept_sampled", noting)
    generator = torch.Generator().manual_seed(2)
    logits, own = torch.randn(5, V, generator=generator), sampling(0.5, 2.0)
    round_ = round_of([[0, 1, 2], [3, 4, 4]], [2, 1], sampling=own)
    q, vocab = torch.rand(1, K, 3, generator=generator), DraftVocab(torch.tensor([5, 0, 2]), V)
    result = judge(logits, round_, Draft(torch.tensor([[5, 2]]), q), vocab)
    ((drafts, num_drafts, inputs),) = seen
    assert drafts.tolist() == [[5, 2], [0, 0]] and num_drafts.tolist() == [2, 1]
    for row, places in enumerate(([0, 1, 2], [3, 4, 4])):
        right = target_probs(logits[places], own.tensors.rows(torch.tensor([row] * 3)))
        torch.testing.assert_close(inputs.target_probs[row], right)
    assert inputs.draft_probs is not None
    torch.testing.assert_close(inputs.draft_probs[0][:, [5, 0, 2]], q[0])
    assert not inputs.draft_probs[0][:, [1, 3, 4]].any() and not inputs.draft_probs[1].any()
    assert inputs.accept_uniform is own.accept_uniform and inputs.next_uniform is own.next_uniform
    assert result.tokens.tolist() == [[5, 3, 0], [4, 0, 0]]
