"""Processors that are declared to treat each row by that row alone and to keep nothing: one call a round for the rows
of all requests that were given the object, with the tokens and the errors of one call for each position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import VOCAB
from transformers.generation import logits_process as hf

from specdec.errors import InvalidInputError, RequestFailedError
from specdec.requests.sampling import SamplingParams
from specdec.requests.user_code import RequestProcessors, row_wise
from specdec.rounds.extras import RoundExtra
from tests.specdec.execution.test_graphs import graphs_on_cpu, recorded_on_cpu  # noqa: F401
from tests.specdec.logits.test_user_code import failing, tokens
from tests.specdec.rounds.test_extras import NEW, PROMPTS, answers, engine_with


class Near:
    """Favours tokens near the last one and the one before it, and notes the shapes of its calls."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.fails_at = fails_at

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(ids.shape))
        assert int(ids.min()) >= 0
        before = ids[:, -2] if ids.shape[1] > 1 else ids[:, -1]
        if self.fails_at is not None and bool((before == self.fails_at).any()):
            raise ValueError("planted")
        return scores - (torch.arange(VOCAB) - ((ids[:, -1] + before) % VOCAB)[:, None]).abs() / 4


def said(own: Any, others: Any, drafts: int, graphs: bool) -> tuple[list[list[int]], Any]:
    """Requests 0, 2 and 4 have the one, 1 the other, 3 and 5 none. Their tokens, and the engine's numbers."""
    engine = engine_with(drafts, graphs, RoundExtra())
    params = [
        SamplingParams(NEW, **({} if code is None else {"logits_processor": code}))
        for code in (own, others, own, None, own, None)
    ]
    return tokens(answers(engine, params)), engine.stats


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "graphs"), [(3, False), (0, False), pytest.param(3, True, marks=pytest.mark.thorough)]
)
def test_one_call_a_round_gives_the_tokens_of_one_for_each_position(drafts: int, graphs: bool, request: Any) -> None:
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    together, other = Near(), Near()
    expected, _ = said(Near(), Near(), drafts, graphs)
    found, stats = said(row_wise(together, batched=True), row_wise(other, batched=True), drafts, graphs)
    assert found == expected and found != said(None, None, drafts, graphs)[0]
    assert len(together.shapes) <= stats.rounds
    assert max(rows for rows, _ in together.shapes) == 2 * (drafts + 1), "of two requests"
    assert max(rows for rows, _ in other.shapes) == drafts + 1
    assert max(width for _, width in together.shapes) > min(map(len, PROMPTS)) + NEW, "padded to the longest"


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, pytest.param(3, marks=pytest.mark.thorough)])
def test_an_error_ends_the_requests_in_whose_rows_it_was_alone(drafts: int) -> None:
    reference, _ = said(Near(), None, drafts, False)
    prompt = PROMPTS[2] + reference[2]
    token = next(t for t in prompt[len(PROMPTS[2]) + 3 : -2] if all(t not in PROMPTS[i] + reference[i] for i in (0, 4)))
    code = row_wise(Near(fails_at=token), batched=True)
    params = [SamplingParams(NEW, **({"logits_processor": code} if i in (0, 2, 4) else {})) for i in range(6)]
    completions, errors = failing(engine_with(drafts, False, RoundExtra()), params)
    assert isinstance(errors[2], RequestFailedError) and "planted" in str(errors[2])
    assert [error for i, error in enumerate(errors) if i != 2] == [None] * 5
    assert [completions[i].token_ids for i in (0, 4)] == [reference[i] for i in (0, 4)]


def test_a_wrong_shape_and_no_truth_value_are_named() -> None:
    params = [SamplingParams(NEW, logits_processor=row_wise(lambda ids, scores: scores[:1, :-1], batched=True))] * 6
    _, errors = failing(engine_with(3, False, RoundExtra()), params)
    assert all("in place of scores (1, " in str(error) for error in errors)
    with pytest.raises(InvalidInputError, match="batched='yes'"):
        row_wise(Near(), batched="yes")  # type: ignore[arg-type]


def test_which_code_is_called_for_several_requests_at_once() -> None:
    both = (row_wise(hf.TopKLogitsWarper(5), batched=True), row_wise(len, batched=True))
    assert RequestProcessors(both).together == both and not RequestProcessors(both).not_copied
    for undeclared in (hf.NoRepeatNGramLogitsProcessor(2), hf.TopKLogitsWarper(5), row_wise(len), Near()):
        assert not RequestProcessors((both[0], undeclared)).together


def test_calls_for_one_request_go_on_after_rounds_without_them() -> None:
    """Where the code raised for another request, twice."""
    own = RequestProcessors((row_wise(lambda ids, scores: scores + ids[:, -1:], batched=True),))
    ids, scores = torch.arange(12).expand(2, 12), torch.zeros(2, 3)
    for length in (5, 9):
        own.apply(ids, (length, length + 1), scores)
    assert scores.tolist() == [[12.0] * 3, [14.0] * 3]
