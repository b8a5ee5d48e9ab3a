"""What the statistics count: tokens after a stop nowhere, the prompt's own token in no round."""

from __future__ import annotations

import math

import pytest
from fakes import hf_greedy, random_prompts, table_head, tiny_llama, wrap
from hypothesis import given
from hypothesis import strategies as st

from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import RequestStats, RoundRecord, pool, pool_requests

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))


def test_worked_example() -> None:
    """Three rounds of 3, 3 and 1 drafts with 1, 3 and 1 accepted."""
    s = pool([RoundRecord(3, 1, 2), RoundRecord(3, 3, 4), RoundRecord(1, 1, 2)])
    assert (s.rounds, s.emitted, s.drafted, s.accepted, s.tau) == (3, 8, 7, 5, 8 / 3)
    assert (s.accepted_at, s.reached, s.offered) == ((3, 1, 1), (3, 2, 1), (3, 2, 2))
    assert s.conditional == (1.0, 0.5, 1.0)
    assert s.unconditional == (1.0, 0.5, 0.5)


def test_a_round_that_ends_at_a_stop_counts_only_what_was_kept() -> None:
    """Five drafts, four accepted, the stop is the second: as if two had been offered and accepted."""
    assert RoundRecord(5, 4, 2).trimmed == RoundRecord(2, 2, 2)
    assert RoundRecord(5, 2, 2).trimmed == RoundRecord(2, 2, 2), "the bonus token was cut"
    assert RoundRecord(5, 2, 3).trimmed == RoundRecord(5, 2, 3)
    assert pool([RoundRecord(5, 4, 2)]).accepted_at == (1, 1)


@st.composite
def records(draw: st.DrawFn) -> RoundRecord:
    drafted = draw(st.integers(0, 6))
    accepted = draw(st.integers(0, drafted))
    return RoundRecord(drafted, accepted, draw(st.integers(1, accepted + 1)))


@given(st.lists(records(), max_size=20))
def test_identities(rounds: list[RoundRecord]) -> None:
    s = pool(rounds)
    assert s.emitted == sum(r.emitted for r in rounds)
    assert sum(s.accepted_at) == s.accepted and sum(s.offered) == s.drafted
    assert all(a <= r <= o for a, r, o in zip(s.accepted_at, s.reached, s.offered, strict=True))
    cut = sum(r.emitted <= r.accepted for r in rounds)
    assert s.emitted == s.accepted + s.rounds - cut
    if rounds:
        assert 1 <= s.tau <= max(r.drafted for r in rounds) + 1
    else:
        assert math.isnan(s.tau)


def test_without_rounds_there_is_no_rate() -> None:
    assert math.isnan(pool([]).tau) and pool([]).conditional == ()
    assert pool([RoundRecord(0, 0, 1)]).tau == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [pytest.param(0, marks=pytest.mark.long), 4])
def test_the_engines_rounds_add_up(num_drafts: int) -> None:
    model = tiny_llama()
    wrapped = wrap(model, table_head(model), num_speculative_tokens=num_drafts)
    completions = wrapped.generate(PROMPTS, SamplingParams(max_new_tokens=20, return_drafts=True))
    for prompt, c in zip(PROMPTS, completions, strict=True):
        assert (c.stats.prompt_tokens, c.stats.new_tokens) == (len(prompt), 20)
        assert c.stats.new_tokens == 1 + sum(r.emitted for r in c.stats.rounds)
        assert all(r.emitted == r.accepted + 1 <= r.drafted + 1 <= num_drafts + 1 for r in c.stats.rounds)
        at = 1
        for drafts, r in zip(c.drafts, c.stats.rounds, strict=True):
            kept = c.token_ids[at : at + r.emitted]
            assert list(drafts[: r.accepted]) == kept[: r.accepted]
            assert r.accepted == r.drafted or drafts[r.accepted] != kept[-1]
            at += r.emitted
        assert min(c.stats.queue_s, c.stats.prefill_s, c.stats.decode_s) >= 0 and c.stats.decode_s > 0
    assert pool_requests([c.stats for c in completions]).rounds == sum(len(c.stats.rounds) for c in completions)


def test_one_token_asked_is_no_round() -> None:
    model = tiny_llama()
    (c,) = wrap(model, table_head(model), num_speculative_tokens=3).generate(
        PROMPTS[1], SamplingParams(max_new_tokens=1)
    )
    assert c.token_ids == hf_greedy(PROMPTS[1], 1)
    assert c.stats.rounds == () and c.stats.new_tokens == 1 and c.finish_reason == "length"


def test_a_stop_inside_a_round_is_trimmed_in_the_rate() -> None:
    model = tiny_llama()
    wrapped = wrap(model, table_head(model, disturbance=0.0), num_speculative_tokens=5)
    for prompt in PROMPTS:
        right = hf_greedy(prompt, 24)
        for stop in dict.fromkeys(right[2:20]):
            (c,) = wrapped.generate(prompt, SamplingParams(max_new_tokens=24, stop_token_ids=(stop,)))
            last = c.stats.rounds[-1:] or (RoundRecord(0, 0, 1),)
            if last[0].accepted >= last[0].emitted:
                assert c.token_ids[-1] == stop
                assert c.pooled.emitted == len(c.token_ids) - 1
                assert c.pooled.accepted_at[0] <= c.pooled.rounds
                assert pool(last).accepted == last[0].emitted
                return
    raise AssertionError("no stop fell inside a round")


def test_requests_pool_their_rounds() -> None:
    one, two = RequestStats(rounds=(RoundRecord(2, 1, 2),)), RequestStats(rounds=(RoundRecord(2, 2, 3),))
    assert pool_requests([one, two]) == pool([RoundRecord(2, 1, 2), RoundRecord(2, 2, 3)])


def test_the_acceptance_length_counts_what_was_emitted() -> None:
    """A round that ended at a stop inside its drafts gave no token of the target's own."""
    assert pool([RoundRecord(5, 4, 2)]).tau == 2.0 and pool([RoundRecord(5, 4, 2), RoundRecord(5, 1, 2)]).tau == 2.0
