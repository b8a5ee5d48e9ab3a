"""Log-probabilities of new tokens: those of a plain forward over the same tokens, drafted or not, in every pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fakes import VOCAB, count_calls, table_head, tiny_llama, wrap

from specdec.errors import HandoffMismatchError, InvalidInputError
from specdec.execution.ragged import RaggedTarget
from specdec.extensions.handoff.moved import Leaving
from specdec.extensions.handoff.moving import moving_requests
from specdec.logits.logprobs import Logprobs
from specdec.requests.logprobs import TokenLogprobs
from specdec.requests.sampling import SamplingParams
from specdec.rounds.extras import Decision, RoundExtra
from specdec.rounds.fixed import FixedTarget
from tests.specdec.execution.test_graphs import graphs_on_cpu, recorded_on_cpu  # noqa: F401
from tests.specdec.logits.test_requests import processors_of
from tests.specdec.rounds.test_extras import NEW, PROMPTS, answers, engine_with

RAW: list[dict[str, Any]] = [
    {"logprobs": 5},
    {},
    {"logprobs": 0, "temperature": 1.1, "top_k": 9},
    {"logprobs": 3, "repetition_penalty": 1.6},
    {"logprobs": VOCAB, "temperature": 0.7},
    {"logprobs": 1, "logits_processor": lambda ids, scores: scores.index_fill(1, ids[0, -2:], float("-inf"))},
]
PROCESSED: list[dict[str, Any]] = [
    {"logprobs": 4, "temperature": 0.9, "top_k": 12, "top_p": 0.8},
    {"logprobs": 4, "temperature": 0.9, "top_p": 0.8, "typical_p": 0.9},
    {"logprobs": 2, "temperature": 1.4, "typical_p": 0.7, "repetition_penalty": 1.3},
    {"logprobs": 0, "no_repeat_ngram_size": 2},
    {"logprobs": 3, "temperature": 1.2, "min_p": 0.05, "suppress_tokens": [6, 9]},
    {},
]
CLOSE = {"rtol": 0.0, "atol": 2e-5}


def said(options: Sequence[dict[str, Any]], mode: Any, drafts: int, graphs: bool, *more: Any, **own: Any) -> list[Any]:
    engine = engine_with(drafts, graphs, RoundExtra(), **own)
    params = [SamplingParams(NEW, seed=i, logprobs_mode=mode, **each) for i, each in enumerate(options)]
    return answers(engine, params, *more)


@torch.no_grad()
def expected(prompt: list[int], tokens: list[int], options: dict[str, Any], mode: str) -> torch.Tensor:
    """[T, V] log-probabilities by transformers alone."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = tiny_llama()(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    if mode == "processed":
        own = processors_of(options, prompt)
        rows = [own(ids[:, : len(prompt) + i], logits[i : i + 1].clone()) for i in range(len(tokens))]
        logits = torch.cat(rows)
    return logits.log_softmax(1)


def check(completions: Sequence[Any], options: Sequence[dict[str, Any]], mode: str) -> int:
    """Returns how many tokens were compared."""
    compared = 0
    for prompt, completion, own in zip(PROMPTS, completions, options, strict=True):
        if "logprobs" not in own:
            assert completion.logprobs is None
            continue
        given, right = completion.logprobs, expected(prompt, completion.token_ids, own, mode)
        assert [each.token_id for each in given] == completion.token_ids
        for each, row in zip(given, right, strict=True):
            torch.testing.assert_close(torch.tensor(each.logprob), row[each.token_id], **CLOSE)
            assert each.rank == int((row > row[each.token_id] + 1e-4).sum()) or _near(row, each.token_id)
            values = torch.tensor([value for _, value in each.top])
            torch.testing.assert_close(values, row.topk(own["logprobs"]).values, **CLOSE)
            torch.testing.assert_close(row[[token for token, _ in each.top]], values, **CLOSE)
            compared += 1
    return compared


def _near(row: torch.Tensor, token: int) -> bool:
    return int(((row - row[token]).abs() < 1e-4).sum()) > 1


@pytest.mark.parametrize(
    ("drafts", "graphs"),
    [
        (0, False),
        (3, False),
        pytest.param(0, True, marks=pytest.mark.long),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("mode", "options"), [("raw", RAW), ("processed", PROCESSED)], ids=["raw", "processed"])
@pytest.mark.cases(1)
def test_they_are_those_of_a_plain_forward(
    mode: str, options: list[dict[str, Any]], drafts: int, graphs: bool, request: Any
) -> None:
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    completions = said(options, mode, drafts, graphs)
    assert check(completions, options, mode) == 5 * NEW
    if drafts:
        assert any(r.accepted for c in completions for r in c.stats.rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "graphs"),
    [(3, False), (0, True), *(pytest.param(*own, marks=pytest.mark.long) for own in ((0, False), (3, True)))],
)
@pytest.mark.thorough
def test_rows_that_are_opened_again_tell_theirs(drafts: int, graphs: bool, request: Any) -> None:
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    completions = said(RAW, "raw", drafts, graphs, (4, 5, 9), kv_cache_tokens=88, max_num_seqs=6)
    assert check(completions, RAW, "raw") == 5 * NEW
    assert sum(completion.stats.preemptions for completion in completions) > 3


def test_plain_greedy_rounds_keep_the_fixed_shape(graphs_on_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Log-probabilities do not make a round one of any shape, where nothing else does."""
    fixed, ragged = count_calls(monkeypatch, FixedTarget, "send"), count_calls(monkeypatch, RaggedTarget, "logits")
    options = [{"logprobs": 2}] * 6
    assert check(said(options, "raw", 3, True), options, "raw") == 6 * NEW
    assert len(fixed) > 3 * len(ragged)


@pytest.mark.slow
def test_a_filter_of_the_options_that_is_off_leaves_the_rounds_own() -> None:
    options = [{"logprobs": VOCAB, "temperature": 1.1, "top_p": 0.7, "typical_p": 1.0}] * 6
    completions = said(options, "processed", 3, False)
    assert check(completions, [{**own, "typical_p": 1.0 - 1e-6} for own in options], "processed") == 6 * NEW
    assert all(each.top[-1][1] == -math.inf for c in completions for each in c.logprobs[:1])


def test_streams_tell_them_with_their_tokens() -> None:
    model = wrap(tiny_llama(), table_head(tiny_llama()), num_speculative_tokens=3)
    told: dict[int, list[TokenLogprobs]] = {0: [], 1: []}
    done = {}
    for update in model.stream(PROMPTS[:2], SamplingParams(NEW, logprobs=2, stop_token_ids=(3, 9))):
        assert update.logprobs is not None and len(update.logprobs) == len(update.token_ids)
        told[update.index] += update.logprobs
        if update.completion is not None:
            done[update.index] = update.completion
    assert all(tuple(told[i]) == done[i].logprobs and len(told[i]) == len(done[i].token_ids) for i in done)


def test_a_token_without_a_probability_has_none() -> None:
    """A processed distribution may leave nothing else."""
    engine = engine_with(0, False, RoundExtra())
    params = [SamplingParams(3, logprobs=2, logprobs_mode="processed", allowed_token_ids=(7,))] * 6
    for completion in answers(engine, params):
        assert [each.logprob for each in completion.logprobs] == [0.0] * 3
        assert completion.logprobs[0].top[0] == (7, 0.0) and completion.logprobs[0].top[1][1] == -math.inf


def _one_later(own: Logprobs, arrays: Any, decision: Decision) -> torch.Tensor:
    return NOTES(own, arrays, Decision(decision.logits, decision.adjusted, decision.index.roll(1, 1), decision.tokens))


def _of_changed_logits(own: Logprobs, arrays: Any, decision: Decision) -> torch.Tensor:
    return NOTES(own, arrays, Decision(decision.adjusted, decision.adjusted, decision.index, decision.tokens))


NOTES = Logprobs.notes


@pytest.mark.long
@pytest.mark.parametrize("defect", [_one_later, _of_changed_logits])
def test_planted_defects_are_seen(defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Logprobs, "notes", defect)
    with pytest.raises(AssertionError):
        check(said(RAW, "raw", 3, False), RAW, "raw")


@pytest.mark.parametrize("given", [{"logprobs": -1}, {"logprobs": 2000}, {"logprobs": 1.5}, {"logprobs_mode": "both"}])
def test_bad_values_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(given))):
        SamplingParams(**given)


def test_they_do_not_move_to_another_engine() -> None:
    engine = engine_with(0, False, RoundExtra())
    with pytest.raises(HandoffMismatchError, match="logprobs"):
        moving_requests(engine).check_leaving(Leaving(PROMPTS[0], SamplingParams(logprobs=1), 0, (), 1.0))


def test_of_equal_log_probabilities_the_smaller_id_comes_first_whatever_others_ask_for() -> None:
    """`topk` alone chooses among equal ones by the largest number that a row of the batch asks for."""
    model = tiny_llama()
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        weight[20:60] = weight[20:30].repeat(4, 1)  # every one of ten is there four times
    with wrap(model, backend="batch_invariant", kv_cache_tokens=1200) as wrapped:
        alone = [wrapped.generate([p], SamplingParams(NEW, logprobs=3, prompt_logprobs=3))[0] for p in PROMPTS]
        asked = [SamplingParams(NEW, logprobs=count, prompt_logprobs=count) for count in (3, VOCAB, 3, 9)]
        together = wrapped.generate([*PROMPTS[:1], *PROMPTS[:3]], asked)
    compared = 0
    for own, other, params in zip([alone[0], *alone], together, asked, strict=False):
        of_prompts = zip(own.prompt_logprobs or (), other.prompt_logprobs or (), strict=True)
        pairs = [*zip(own.logprobs or (), other.logprobs or (), strict=True), *of_prompts]
        for left, right in [(a, b) for a, b in pairs if a is not None]:
            assert left.top == right.top[:3], params
            assert list(right.top) == sorted(right.top, key=lambda each: (-each[1], each[0]))
            compared += len({value for _, value in right.top}) < len(right.top)
    assert compared > 20
