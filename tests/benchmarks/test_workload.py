"""The serving benchmark's requests and numbers, and a run of it over a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import VOCAB, engine_of, free_everywhere, table_head, tiny_llama, wrap

from benchmarks.bench_serving import summary, workload
from benchmarks.document import publish
from benchmarks.serving import Rounds, as_they_arrive
from benchmarks.synthetic import DrawnAcceptance, decide
from benchmarks.workload import (
    Load,
    Timeline,
    arrival_times,
    between_updates,
    milliseconds,
    until_first_token,
    waits,
)
from tests.specdec.execution.mixed import mixed_rounds, until

LOAD = Load(requests=400, prompt=(64, 1024), output=(32, 384))


def test_lengths_are_uniform_and_the_same_at_any_rate_and_share() -> None:
    plain = LOAD.arrivals(100)
    other = Load(400, (64, 1024), (32, 384), sampled_share=0.5, rate=3.0).arrivals(100)
    for request in plain:
        assert 64 <= len(request.token_ids) <= 1024 and 32 <= request.new_tokens <= 384
        assert not request.at and not request.sampled and min(request.token_ids) >= 0 and max(request.token_ids) < 100
    assert np.mean([len(r.token_ids) for r in plain]) == pytest.approx(544, rel=0.05)
    assert np.mean([r.new_tokens for r in plain]) == pytest.approx(208, rel=0.05)
    assert [(r.token_ids, r.new_tokens) for r in plain] == [(r.token_ids, r.new_tokens) for r in other]
    assert sum(r.sampled for r in other) == 200 and any(r.at for r in other)
    assert plain == LOAD.arrivals(100)


def test_a_run_has_prompts_of_its_own_behind_what_all_share() -> None:
    load = Load(5, (4, 9), (3, 3), shared_prefix=30)
    first, second = load.arrivals(100), load.arrivals(100, run=1)
    (prefix,) = {tuple(request.token_ids[:30]) for request in (*first, *second)}
    assert len(set(prefix)) > 10
    assert [len(r.token_ids) for r in first] == [len(r.token_ids) for r in second]
    assert all(a.token_ids != b.token_ids for a, b in zip(first, second, strict=True))


def test_arrivals_are_a_poisson_process_that_begins_at_once() -> None:
    times = arrival_times(4000, 5.0, np.random.default_rng(0))
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=0.05) and gaps.std() == pytest.approx(0.2, rel=0.05)
    assert not arrival_times(3, 0.0, np.random.default_rng(0)).any()


def line(arrived: float, *updates: tuple[float, int]) -> Timeline:
    made = Timeline(arrived)
    for moment, tokens in updates:
        made.add(moment, tokens)
    return made


def test_waits_by_update_and_by_token() -> None:
    by_update, by_token = waits([line(0, (1.0, 1), (1.4, 4), (1.5, 0), (2.0, 1)), line(0, (9.0, 1))])
    assert by_update == pytest.approx([0.4, 0.6])
    assert by_token == pytest.approx([0.1] * 4 + [0.6])


def test_numbers_of_timelines() -> None:
    lines = [line(0.5, (1.0, 1), (1.2, 2)), line(0.0, (1.1, 1), (2.1, 2))]
    assert until_first_token(lines)["first_token_ms_median"] == pytest.approx(800)
    found = between_updates(lines)
    assert found["update_ms_median"] == pytest.approx(600) and found["token_ms_median"] == pytest.approx(300)
    assert found["updates"] == 2 and found["tokens_an_update"] == 2


def test_percentiles() -> None:
    found = milliseconds("x", np.arange(101) / 1e3)
    assert found == {"x_ms_median": pytest.approx(50), "x_ms_p99": pytest.approx(99)}
    assert milliseconds("x", np.zeros(0)) == {"x_ms_median": None, "x_ms_p99": None}
    assert between_updates([])["tokens_an_update"] == 0


def tiny_pair(prefix_caching: bool) -> Any:
    target = tiny_llama()
    wrapped = wrap(target, table_head(target), num_speculative_tokens=2, enable_prefix_caching=prefix_caching)
    decide(wrapped, DrawnAcceptance(0.8, VOCAB, np.random.default_rng(0), torch.device("cpu")))
    return wrapped


@pytest.fixture
def model() -> Any:
    return tiny_pair(prefix_caching=False)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 500.0])
@pytest.mark.cases(1)
def test_a_workload_end_to_end(model: Any, rate: float, tmp_path: Path) -> None:
    load = Load(6, (2, 30), (3, 12), sampled_share=0.5, rate=rate)
    asked = load.arrivals(VOCAB)
    found = workload(model, load, VOCAB, repeats=2)
    assert found["output_tokens"] == sum(r.new_tokens for r in asked)
    assert found["prompt_tokens"] == sum(len(r.token_ids) for r in asked)
    assert len(found["seconds_runs"]) == 2 and found["output_tokens_per_s"] > 0
    assert 1 < found["tokens_an_update"] < 3 and found["update_ms_p99"] >= found["update_ms_median"]
    assert "output tokens/s" in summary(found)
    for _ in range(2):
        publish(found, tmp_path / "out.jsonl", append=True)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == 2 and all(found.items() <= line.items() and line["torch"] for line in lines)
    assert free_everywhere(model)


@pytest.mark.slow
@pytest.mark.parametrize("caching", [False, True])
def test_prompts_that_begin_alike_end_to_end(caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cache, all requests but the first find the pages of what they share, and no more."""
    model, taken = tiny_pair(prefix_caching=caching), []
    step = model.engine.step

    def noted() -> Any:
        updates = step()
        taken.extend(u.completion.stats.cached_tokens for u in updates if getattr(u, "completion", None) is not None)
        return updates

    monkeypatch.setattr(model.engine, "step", noted)
    found = workload(model, Load(3, (6, 6), (3, 3), rate=50.0, shared_prefix=41), VOCAB, repeats=1)
    assert found["prompt_tokens"] == 3 * 47 and found["first_token_ms_median"] > 0
    assert taken[1:] == [40 if caching else 0] * 5


@pytest.mark.slow
def test_a_request_joins_no_earlier_than_it_is_due(model: Any) -> None:
    requests = Load(4, (5, 5), (3, 3), rate=20.0).arrivals(VOCAB)
    lines = as_they_arrive(engine_of(model), requests)
    assert [each.arrived - lines[0].arrived for each in lines] == pytest.approx([r.at for r in requests])
    assert all(each.moments[0] >= each.arrived for each in lines)


def test_rounds_without_prompts_are_no_mixed_trace(model: Any) -> None:
    """Planted: prompts of one token are read at once."""
    rows = Load(1, (4, 4), (60, 60)).arrivals(VOCAB)
    prompts = Load(1, (1, 1), (1, 1)).arrivals(VOCAB)
    engine_of(model).config = replace(engine_of(model).config, max_num_prefill_tokens=1)
    with mixed_rounds(engine_of(model), rows, prompts, 9) as go_on, pytest.raises(ValueError, match="reads no prompt"):
        go_on()
    assert free_everywhere(model)


def test_a_row_that_ends_too_early_is_no_measurement(model: Any) -> None:
    rounds = Rounds(engine_of(model))
    (request,) = Load(1, (4, 4), (3, 3)).arrivals(VOCAB)
    with pytest.raises(ValueError, match="no 9 updates"):
        until(rounds, [rounds.submit(request, 0.0)], 9)
