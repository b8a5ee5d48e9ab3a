"""The simulation of serving: its clock, and what it says about prompt chunks."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks.simulate_serving import RoundTime, Simulated, full_queue, interference, main
from specdec.config import MAX_NUM_PREFILL_TOKENS


def test_every_request_gets_its_tokens_and_the_clock_is_the_sum_of_the_rounds() -> None:
    engine = Simulated(RoundTime(), most_prefill=64, drafts=3, acceptance=0.8, rows=2)
    lines = [engine.submit(prompt, new) for prompt, new in ((100, 20), (5, 1), (300, 7))]
    rounds = 0
    while engine.busy:
        before = engine.now
        engine.step()
        assert engine.now - before >= RoundTime().ms(1, 0, 3) / 1e3 - 1e-9
        rounds += 1
    assert [sum(line.counts) for line in lines] == [20, 1, 7] and rounds >= 6
    assert engine.now == max(line.moments[-1] for line in lines)


def test_all_drafts_or_none_are_accepted_where_the_probability_says_so() -> None:
    for acceptance, counts in ((0.0, [1] * 9), (1.0, [1, 4, 4])):
        engine = Simulated(RoundTime(), most_prefill=64, drafts=3, acceptance=acceptance)
        line = engine.submit(10, 9)
        while engine.busy:
            engine.step()
        assert line.counts == counts


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_the_default_keeps_both_promises_of_the_simulation() -> None:
    """A p99 of at most three times the median, and within 5 % of the throughput of larger chunks."""
    unlimited, default = (full_queue(RoundTime(), most, repeats=4) for most in (2048, MAX_NUM_PREFILL_TOKENS))
    assert default["output_tokens_per_s"] == pytest.approx(unlimited["output_tokens_per_s"], rel=0.05)
    assert default["update_ms_p99"] < unlimited["update_ms_p99"] / 2
    assert interference(RoundTime(), MAX_NUM_PREFILL_TOKENS, updates=100)["update_p99_over_alone"] <= 3
    assert interference(RoundTime(), 640, updates=100)["update_p99_over_alone"] > 3


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_the_full_queue_gives_what_was_measured() -> None:
    """7,127 tokens a second on an H200 (2026-11-23); only the times of single rounds went in."""
    assert full_queue(RoundTime(), 512, repeats=2)["output_tokens_per_s"] == pytest.approx(7127, rel=0.03)
    assert full_queue(RoundTime(scale=1.1), 512, repeats=1)["output_tokens_per_s"] != pytest.approx(7127, rel=0.03)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_the_command() -> None:
    done = CliRunner().invoke(main, ["--prefill-tokens", "256"], catch_exceptions=False)
    assert done.exit_code == 0 and done.output.splitlines()[1].split("|")[0].strip() == "256"
