"""Metrics: what they count, as numbers and as Prometheus text, and that they wait for no round."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
from fakes import random_prompts, table_head, tiny_llama, wrap

from specdec import ClosedModelError, RequestFailedError
from specdec.engine.stats import LATELY, Counters
from specdec.extensions.service.monitoring import METRICS
from specdec.requests.request import Update
from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((5, 9, 3, 7, 6, 4))


@pytest.fixture
def model() -> Any:
    target = tiny_llama()
    return wrap(target, table_head(target), num_speculative_tokens=3)


def test_they_agree_with_what_was_served(model: Any) -> None:
    done = model.generate(PROMPTS, max_new_tokens=12)
    found = model.metrics()
    assert list(found) == list(METRICS) and len(found) == len(METRICS)
    assert (
        found["requests_finished_total"] == 6 == sum(found[f"requests_ended_by_{r}_total"] for r in ("eos", "length"))
    )
    assert found["generated_tokens_total"] == sum(len(c.token_ids) for c in done)
    assert found["emitted_tokens_total"] == sum(c.pooled.emitted for c in done)
    assert found["acceptance_length"] == model.engine_stats.tau
    assert found["rounds_total"] == model.engine_stats.rounds
    assert (
        found["requests_running"] == found["requests_waiting"] == found["rows_used"] == found["target_pages_used"] == 0
    )
    assert found["rows"] == 3 and found["target_pages_free"] == 100 and found["windowed_pages_free"] == 0
    assert found["prefix_query_tokens_total"] == sum(map(len, PROMPTS))
    assert found["decode_seconds_total"] == pytest.approx(sum(c.stats.decode_s for c in done))
    assert 0 < found["lifetime_tokens_per_second"] < 1e6 and found["uptime_seconds"] > 0
    assert "rows=3" in repr(found)
    assert found["round_age_seconds"] == 0.0


def test_a_round_that_does_not_end_is_seen(model: Any) -> None:
    """By its age: a request waits, and no round has ended for ten seconds."""
    ages, counters = [], model.engine.counters

    for _ in model.stream(PROMPTS[0], max_new_tokens=4):
        if not ages:
            counters.last -= 10.0
            next(iter(model.engine.scheduler.running)).times.submitted -= 10.0
            ages.append(model.metrics()["round_age_seconds"])
    assert len(ages) == 1 and 10.0 <= ages[0] < 15.0
    assert model.metrics()["round_age_seconds"] == 0.0


def test_rates_are_of_a_second(model: Any) -> None:
    """Over the last seconds, and since the model was loaded."""
    counters, now = model.engine.counters, time.perf_counter()
    counters.made = now - 100.0
    counters.add_reported([Update(0, [1] * 5000, "")], now - 2.0)
    found = model.metrics()
    assert found["tokens_per_second"] == 5000 / LATELY
    assert found["lifetime_tokens_per_second"] == pytest.approx(50.0, rel=0.1)
    assert found["uptime_seconds"] == pytest.approx(100.0, rel=0.1)


def test_running_cancelled_dropped_and_failed_requests(model: Any) -> None:
    def faulty(ids: Any, scores: Any) -> Any:
        raise ValueError("planted")

    stream = model.stream(PROMPTS[:5], SamplingParams(200, ignore_eos=True))
    next(stream)
    found = model.metrics()
    assert (found["requests_running"], found["requests_waiting"], found["rows_used"]) == (3, 2, 3)
    assert found["target_pages_used"] == model.usage().target_pages > 0
    assert found["head_pages_used"] == model.usage().head_pages > 0
    stream.cancel(0)
    for update in stream:
        if update.completion is not None:
            break
    stream.close()
    with pytest.raises(RequestFailedError):
        model.generate(PROMPTS[5], logits_processor=[faulty])
    found = model.metrics()
    ended = ("finished", "ended_by_cancelled", "dropped", "failed")
    assert [found[f"requests_{each}_total"] for each in ended] == [1, 1, 4, 1]
    assert found["generated_tokens_total"] > 0 == found["requests_running"]


def test_they_wait_for_no_round(model: Any) -> None:
    inside, go_on, own = threading.Event(), threading.Event(), model.engine.step

    def step() -> Any:
        inside.set()
        assert go_on.wait(60)
        return own()

    model.engine.step = step
    caller = threading.Thread(target=model.generate, args=(PROMPTS[:4], SamplingParams(4)))
    caller.start()
    assert inside.wait(60)
    assert model.metrics()["requests_waiting"] == 4
    go_on.set()
    caller.join()
    model.close()
    with pytest.raises(ClosedModelError):
        model.metrics()


def test_the_text_is_what_prometheus_reads(model: Any) -> None:
    before = model.metrics().prometheus()
    assert "specdec_acceptance_length NaN\n" in before and before.endswith("\n")
    model.generate(PROMPTS, max_new_tokens=4)
    found = model.metrics()
    lines = found.prometheus().splitlines()
    assert len(lines) == 3 * len(METRICS)
    for help, kind, value in zip(*(lines[i::3] for i in range(3)), strict=True):
        name = value.split(" ")[0]
        assert re.fullmatch(rf"# HELP {name} [A-Z].*\.", help) and kind.split(" ")[:3] == ["#", "TYPE", name]
        assert re.fullmatch(r"specdec_[a-z_]+ (NaN|[0-9.e+-]+)", value)
        assert name.endswith("_total") == (kind.split(" ")[3] == "counter")


def test_the_text_by_its_own_parser(model: Any) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    model.generate(PROMPTS, max_new_tokens=4)
    found = model.metrics()
    families = list(parser.text_string_to_metric_families(found.prometheus()))
    assert len(families) == len(METRICS)
    read = {sample.name.removeprefix("specdec_"): sample.value for family in families for sample in family.samples}
    assert read == dict(found)
    assert all(family.documentation and family.type in ("counter", "gauge") for family in families)


def test_the_rate_is_of_the_last_whole_seconds() -> None:
    counters = Counters()
    for second in range(30):
        counters.add_reported([Update(0, [1] * 3, ""), Update(1, [2], "")], second + 0.1)
        counters.add_reported([Update(0, [1], "")], second + 0.7)
    assert counters.reported == 150
    assert counters.lately(29.5) == 5 * LATELY, "the last second has only begun"
    assert (
        counters.lately(30.2) == 5 * LATELY and counters.lately(35.0) == 5 * (LATELY - 5) and counters.lately(99.0) == 0
    )
