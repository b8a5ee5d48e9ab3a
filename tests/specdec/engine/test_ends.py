"""How requests end in an engine: at an eos id, at a limit, by a fault of their own, of a round, or by an abort."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import engine_of, free_everywhere, hf_greedy, random_prompts, tiny_llama, wrap

from specdec.errors import RequestFailedError, RoundFailedError
from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((5, 9, 7))
PARAMS = SamplingParams(max_new_tokens=8)


@pytest.fixture
def model() -> Any:
    return wrap(tiny_llama(), max_num_seqs=2)


def finished(engine: Any, rounds: int = 40) -> dict[int, Any]:
    """What each request that ends within so many rounds ends with."""
    ends: dict[int, Any] = {}
    for _ in range(rounds):
        for update in engine.step():
            if update.last:
                assert update.request_id not in ends, "reported twice"
                ends[update.request_id] = update.error or update.completion
    return ends


def test_an_eos_id_at_the_limit_is_the_reason(model: Any) -> None:
    engine, tokens = engine_of(model), hf_greedy(PROMPTS[0], 8)
    place = next(i for i in range(1, 8) if tokens[i] not in tokens[:i])
    for new in (place + 1, place + 2):
        engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=new), 0, [tokens[place]])
    engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=place), 0, [tokens[place]])
    ends = finished(engine)
    assert [(ends[n].finish_reason, len(ends[n].token_ids)) for n in range(3)] == [
        ("eos", place + 1),
        ("eos", place + 1),
        ("length", place),
    ]
    assert free_everywhere(model)


def test_a_round_of_aborted_requests_is_not_read(model: Any) -> None:
    engine = engine_of(model)
    first = [engine.submit(prompt, PARAMS) for prompt in PROMPTS[:2]]
    engine.step()
    engine.abort(first)
    reads = engine.stats.device_to_host
    assert engine.step() == [] and engine.stats.device_to_host == reads
    assert free_everywhere(model)
    number = engine.submit(PROMPTS[2], PARAMS)
    assert finished(engine)[number].token_ids == hf_greedy(PROMPTS[2], 8)


def test_a_failed_round_ends_those_that_were_in_it_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    numbers = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
    engine.step()

    left = [1, 2]

    def broken(*_: Any) -> Any:
        left.pop()
        if not left:  # a fault is what comes again as the round is run once more
            monkeypatch.undo()
        raise ArithmeticError("of a kernel")

    monkeypatch.setattr(engine.executor, "verify", broken)
    ends = finished(engine)
    assert [type(ends[n]) for n in numbers[:2]] == [RoundFailedError] * 2
    assert ends[numbers[2]].token_ids == hf_greedy(PROMPTS[2], 8) and free_everywhere(model)


def test_a_request_whose_parameters_do_not_fit_fails_once_and_alone(model: Any) -> None:
    engine = engine_of(model)
    numbers = [engine.submit(prompt, PARAMS) for prompt in PROMPTS[:2]]
    engine.scheduler.waiting.first.key = -(2**70)
    ends = finished(engine)
    assert type(ends[numbers[0]]) is RequestFailedError and ends[numbers[1]].token_ids == hf_greedy(PROMPTS[1], 8)
    assert free_everywhere(model)


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.cases(1)
def test_an_interrupt_loses_no_token_and_reports_none_twice(model: Any, rounds: int) -> None:
    """Requests go on after what was reported, in order of their turns, and know that they were read again."""
    engine = engine_of(model)
    numbers = [engine.submit(prompt, PARAMS) for prompt in PROMPTS[:2]]
    engine.arrange(numbers)  # as those of one call are
    numbers.append(engine.submit(PROMPTS[2], PARAMS))
    streamed: dict[int, list[int]] = {n: [] for n in numbers}
    texts = dict.fromkeys(numbers, "")

    def interrupt() -> None:
        engine.meanwhile.clear()
        raise KeyboardInterrupt

    ends = {}
    for number in range(40):
        if number == rounds:
            engine.meanwhile.append(interrupt)
        try:
            updates = engine.step()
        except KeyboardInterrupt:
            continue
        for update in updates:
            streamed[update.request_id] += update.token_ids
            texts[update.request_id] += update.text
            if update.completion is not None:
                ends[update.request_id] = update.completion
    for n, prompt in zip(numbers, PROMPTS, strict=True):
        assert streamed[n] == ends[n].token_ids == hf_greedy(prompt, 8) and texts[n] == ends[n].text
    assert [ends[n].stats.preemptions for n in numbers] == [1, 1, 0]
    assert engine.stats.preemptions == 0 and engine.stats.interrupted == 2, "nothing was short of pages"
    assert list(ends) == [0, 1, 2] and free_everywhere(model)


def test_copies_are_counted_once(model: Any) -> None:
    """One to the device for each round, and one back."""
    engine = engine_of(model)
    for prompt in PROMPTS[:2]:
        engine.submit(prompt, PARAMS)
    finished(engine, 12)
    stats = engine.stats
    assert stats.rounds == stats.host_to_device >= 8 and stats.device_to_host <= stats.rounds
