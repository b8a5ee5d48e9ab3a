"""What a shell shows: one line with the acceptance length, a bar."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fakes import hf_greedy, random_prompts, table_head, tiny_llama, wrap

from specdec import SamplingParams

PROMPTS = random_prompts([9, 12, 7])


@pytest.fixture(scope="module")
def model() -> Any:
    target = tiny_llama()
    return wrap(target, table_head(target), num_speculative_tokens=3)


def in_a_line(thing: Any) -> str:
    shown = repr(thing)
    assert "\n" not in shown and len(shown) <= 120, shown
    return shown


def test_parameters_show_what_differs() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    given = SamplingParams(temperature=0.7, stop="x", logit_bias={3: 1.0}, ignore_eos=True)
    assert repr(given) == "SamplingParams(logit_bias=((3, 1.0),), temperature=0.7, stop=('x',), ignore_eos=True)"
    assert eval(repr(given)) == given


def test_completions_and_statistics_fit_a_line(model: Any) -> None:
    completion = model.generate(PROMPTS[0], max_new_tokens=30)[0]
    tau = f"τ={completion.pooled.tau:.2f}"
    shown = in_a_line(completion)
    assert shown.startswith(f"Completion({completion.text[:9]!r}"[:-1]) and shown.endswith(f"30 tokens, length, {tau})")
    assert tau in in_a_line(completion.stats) and tau in in_a_line(completion.pooled)
    short = model.generate(PROMPTS[0], max_new_tokens=1)[0]
    assert "no rounds" in in_a_line(short) and "no rounds" in in_a_line(short.stats)


def test_the_model_shows_what_it_is_and_its_acceptance() -> None:
    target = tiny_llama()
    with wrap(target, table_head(target), num_speculative_tokens=3) as model:
        assert in_a_line(model).endswith("K=3, float32 on cpu, torch, no requests yet)")
        done = model.generate(PROMPTS, max_new_tokens=20)
        rounds, emitted = (sum(getattr(c.pooled, name) for c in done) for name in ("rounds", "emitted"))
        stats = model.engine_stats
        assert (stats.requests, stats.new_tokens, stats.verified, stats.emitted) == (3, 60, rounds, emitted)
        assert stats.tau == emitted / rounds and f"τ={stats.tau:.2f}" in in_a_line(stats)
        assert in_a_line(model).endswith(f"τ={stats.tau:.2f} in 3 requests)")
    assert in_a_line(model).endswith(f"closed, τ={stats.tau:.2f} in 3 requests)")


def test_a_bar_counts_completions(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = model.generate(PROMPTS, max_new_tokens=6, progress=True)
    assert [c.token_ids for c in found] == [hf_greedy(prompt, 6) for prompt in PROMPTS]
    shown = capsys.readouterr().err
    assert "3/3" in shown and "18 tokens" in shown and re.search(r"τ=\d", shown)
    model.generate(PROMPTS, max_new_tokens=2)
    assert capsys.readouterr().err == ""
