"""Log-probabilities of prompts, and whole rows: those of a plain forward, in every pipeline, with few rows a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fakes import VOCAB, random_prompts, table_head, tiny_llama, wrap
from transformers.generation.logits_process import LogitNormalization

from specdec.engine.scheduler import Scheduler
from specdec.errors import HandoffMismatchError, InvalidInputError
from specdec.extensions.handoff.moved import Leaving
from specdec.extensions.handoff.moving import moving_requests
from specdec.logits import logprobs as module
from specdec.requests.sampling import SamplingParams
from specdec.rounds.extras import RoundExtra
from tests.specdec.execution.test_graphs import graphs_on_cpu, recorded_on_cpu  # noqa: F401
from tests.specdec.logits.test_requests import processors_of
from tests.specdec.rounds.test_extras import NEW, PROMPTS, answers, engine_with

CLOSE = {"rtol": 0.0, "atol": 2e-5}
ASKED: list[dict[str, Any]] = [
    {"prompt_logprobs": 2},
    {"prompt_logprobs": 0, "prompt_logprobs_start": 20},
    {"prompt_logprobs": 1},  # a prompt of one token: nothing stands before it
    {},
    {"prompt_logprobs": VOCAB, "repetition_penalty": 1.4},
    {"prompt_logprobs": 3, "logprobs": 1, "temperature": 0.9, "prompt_logprobs_start": 50},
]


@torch.no_grad()
def logits_of(tokens: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = tiny_llama()(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def check_prompt(prompt: Sequence[int], told: Any, count: int, start: int) -> int:
    """Returns how many tokens were compared."""
    right = logits_of(prompt).log_softmax(1)
    assert len(told) == len(prompt)
    assert [each is None for each in told] == [i < max(start, 1) for i in range(len(prompt))]
    for position, each in enumerate(told):
        if each is None:
            continue
        row = right[position - 1]
        assert each.token_id == prompt[position]
        torch.testing.assert_close(torch.tensor(each.logprob), row[each.token_id], **CLOSE)
        values = torch.tensor([value for _, value in each.top])
        torch.testing.assert_close(values, row.topk(count).values, **CLOSE)
        assert each.rank == int((row > row[each.token_id] + 1e-4).sum())
    return sum(each is not None for each in told)


def told(drafts: int, graphs: bool, *more: Any, most: int = 7, **own: Any) -> list[Any]:
    """With `most` rows of prompts a round, fewer than a chunk may have."""
    params = [SamplingParams(NEW, seed=i, **each) for i, each in enumerate(ASKED)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_PROMPT_ROWS", most)
        engine = engine_with(drafts, graphs, RoundExtra(), **own)
    return answers(engine, params, *more)


def check(completions: Sequence[Any]) -> int:
    compared = 0
    for prompt, completion, own in zip(PROMPTS, completions, ASKED, strict=True):
        if "prompt_logprobs" not in own:
            assert completion.prompt_logprobs is None
            continue
        start = own.get("prompt_logprobs_start", 0)
        compared += check_prompt(prompt, completion.prompt_logprobs, own["prompt_logprobs"], start)
    return compared


EXPECTED = 4 + 13 + 0 + 59 + 0


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.cases(1)
def test_they_are_those_of_a_plain_forward(drafts: int, graphs: bool, request: Any) -> None:
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    completions = told(drafts, graphs)
    assert check(completions) == EXPECTED
    for completion, other in zip(completions, told(drafts, graphs, most=1000), strict=True):
        assert completion.token_ids == other.token_ids
    if drafts:
        assert any(r.accepted for c in completions for r in c.stats.rounds)


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.cases(1)
def test_rows_that_are_opened_again_tell_theirs(graphs: bool, request: Any) -> None:
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    completions = told(3, graphs, (2, 3, 5, 9), kv_cache_tokens=88, max_num_seqs=6)
    assert check(completions) == EXPECTED
    assert sum(completion.stats.preemptions for completion in completions) > 3


@pytest.mark.slow
def test_a_round_has_no_more_rows_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, notes = [], module.Logprobs.notes

    def counted(own: Any, arrays: Any, decision: Any) -> Any:
        counts.append(len(arrays.more_logits))
        return notes(own, arrays, decision)

    monkeypatch.setattr(module.Logprobs, "notes", counted)
    assert check(told(3, False, max_num_batched_tokens=64, max_num_seqs=6)) == EXPECTED
    assert max(counts) == 7 and sum(counts) == EXPECTED


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.cases(1)
def test_positions_asked_for_are_read_and_others_taken_from_the_cache(drafts: int) -> None:
    target = tiny_llama()
    model = wrap(target, table_head(target) if drafts else None, num_speculative_tokens=drafts, max_num_seqs=4)
    (prompt,) = random_prompts((60,))
    model.generate(prompt, SamplingParams(4))
    for start, needed in ((0, 0), (30, 29), (58, 57), (59, 58), (200, 59)):
        (found,) = model.generate(prompt, SamplingParams(4, prompt_logprobs=1, prompt_logprobs_start=start))
        assert check_prompt(prompt, found.prompt_logprobs, 1, start) == max(60 - max(start, 1), 0)
        assert needed - 8 < found.stats.cached_tokens <= needed


def test_of_several_samples_the_first_tells_the_prompt() -> None:
    model = wrap(tiny_llama())
    (prompt,) = random_prompts((12,))
    first, *others = model.generate(prompt, SamplingParams(3, temperature=1.0, n=3, prompt_logprobs=1))
    assert check_prompt(prompt, first.prompt_logprobs, 1, 0) == 11
    assert [other.prompt_logprobs for other in others] == [None, None]


ROWS: list[dict[str, Any]] = [
    {"return_logits": True},
    {"return_scores": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9},
    {"return_logits": True, "return_scores": True, "repetition_penalty": 1.5},
    {},
    {"return_scores": True, "temperature": 1.3, "typical_p": 0.8, "min_p": 0.02, "logprobs": 1},
    {"return_scores": True, "suppress_tokens": [3, 5], "prompt_logprobs": 0},
]


def check_rows(completions: Sequence[Any]) -> None:
    for prompt, completion, own in zip(PROMPTS, completions, ROWS, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        raw = logits_of(ids[0].tolist())[len(prompt) - 1 : -1]
        assert (completion.logits is not None) == ("return_logits" in own)
        assert (completion.scores is not None) == ("return_scores" in own)
        if completion.logits is not None:
            assert completion.logits.dtype == np.float32
            torch.testing.assert_close(torch.from_numpy(completion.logits), raw, **CLOSE)
        if completion.scores is not None:
            options = {k: v for k, v in own.items() if k not in ("return_logits", "return_scores", "prompt_logprobs")}
            process = processors_of(options, prompt)
            each = [process(ids[:, : len(prompt) + i], raw[i : i + 1].clone()) for i in range(len(raw))]
            torch.testing.assert_close(torch.from_numpy(completion.scores), torch.cat(each), **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "graphs"),
    [(0, False), (3, True), *(pytest.param(*own, marks=pytest.mark.long) for own in ((3, False), (0, True)))],
)
@pytest.mark.cases(1)
def test_whole_rows_are_transformers(drafts: int, graphs: bool, request: Any) -> None:
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    engine = engine_with(drafts, graphs, RoundExtra(), kv_cache_tokens=120, max_num_seqs=6)
    params = [SamplingParams(NEW, seed=i, **each) for i, each in enumerate(ROWS)]
    completions = answers(engine, params, (4, 7))
    check_rows(completions)
    assert sum(completion.stats.preemptions for completion in completions) > 1


def test_rows_that_take_too_much_are_refused() -> None:
    model = wrap(tiny_llama())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.engine.admission.MOST_ROW_BYTES", 4 * VOCAB * 10)
        model.generate("ab", SamplingParams(10, return_scores=True))
        with pytest.raises(InvalidInputError, match=r"return_logits and return_scores of 6 new tokens take 0\.0 GiB"):
            model.generate("ab", SamplingParams(6, return_scores=True, return_logits=True))


@pytest.mark.parametrize(
    "given",
    [{"prompt_logprobs": -1}, {"prompt_logprobs": 1.5}, {"prompt_logprobs_start": -2}, {"return_logits": 3}],
)
def test_bad_values_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(given))):
        SamplingParams(**given)


@pytest.mark.parametrize("given", [{"prompt_logprobs": 1}, {"return_logits": True}, {"return_scores": True}])
def test_they_do_not_move_to_another_engine(given: dict[str, Any]) -> None:
    engine = engine_with(0, False, RoundExtra())
    with pytest.raises(HandoffMismatchError, match=next(iter(given))):
        moving_requests(engine).check_leaving(Leaving(PROMPTS[0], SamplingParams(**given), 0, (), 1.0))


def test_rows_without_room_for_prompt_tokens_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round's rows may go to another request's prompt: then a request is let in and reads in the next round."""
    schedules, schedule = [], Scheduler.schedule

    def noted(own: Any) -> Any:
        schedules.append(found := schedule(own))
        return found

    monkeypatch.setattr(Scheduler, "schedule", noted)
    assert check(told(0, False, max_num_batched_tokens=200, max_num_seqs=6)) == EXPECTED
    assert all((each.num_new > 0).all() for each in schedules if each is not None)


@pytest.mark.parametrize("own", [{"repetition_penalty": 1.5}, {"temperature": 0.8, "top_k": 9, "seed": 1}])
def test_renormalized_scores_are_log_probabilities(own: dict[str, Any]) -> None:
    """As transformers' LogitNormalization, the last of its processors, leaves them; logits stay the model's own."""
    model = wrap(tiny_llama())
    plain, found = (
        model.generate("ab", SamplingParams(5, return_scores=True, return_logits=True, renormalize_logits=on, **own))[0]
        for on in (False, True)
    )
    assert plain.scores is not None and found.scores is not None
    right = LogitNormalization()(None, torch.from_numpy(plain.scores)).numpy()
    assert np.allclose(found.scores, right, atol=1e-6) and not np.allclose(plain.scores, right, atol=0.1)
    assert found.token_ids == plain.token_ids and np.array_equal(found.logits, plain.logits)
