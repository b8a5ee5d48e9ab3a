"""The order in which the requests of one call get rows: as they came, but for those that would end last."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import pytest
from fakes import engine_of, free_everywhere, guests_of, hf_greedy, random_prompts, tiny_llama, wrap
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.admission import admission_order
from specdec.engine.engine import Engine
from specdec.extensions.handoff.moved import Leaving
from specdec.requests.sampling import SamplingParams

LENGTHS = st.lists(st.integers(1, 40), max_size=40)
UNEVEN = [3, 3, 3, 3, 12]


def ends(lengths: Sequence[int], order: Sequence[int], rows: int) -> list[int]:
    """When each request ends if whichever row is free first takes the next one."""
    free, found = [0] * rows, [0] * len(lengths)
    for i in order:
        found[i] = heapq.heapreplace(free, free[0] + lengths[i]) + lengths[i]
    return found


@given(LENGTHS, st.integers(1, 8))
def test_every_request_has_one_place(lengths: list[int], rows: int) -> None:
    assert sorted(admission_order(lengths, rows)) == list(range(len(lengths)))


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 8))
def test_requests_of_equal_lengths_stay_as_they_came(length: int, count: int, rows: int) -> None:
    assert admission_order([length] * count, rows) == list(range(count))


@given(LENGTHS, st.integers(1, 8))
def test_equal_lengths_among_others_are_never_swapped(lengths: list[int], rows: int) -> None:
    place = np.argsort(admission_order(lengths, rows), kind="stable")
    for length in set(lengths):
        assert (np.diff(place[np.array(lengths) == length]) > 0).all()


def test_a_full_queue_ends_earlier_and_the_mean_end_hardly_moves() -> None:
    came, ordered = [], []
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(32, 385, 128).tolist()
        bound = max(sum(lengths) / 32, max(lengths))
        for order, found in ((list(range(128)), came), (admission_order(lengths, 32), ordered)):
            each = ends(lengths, order, 32)
            found.append((max(each) / bound, np.mean(each) / bound))
    (last_before, mean_before), (last, mean) = np.mean(came, 0), np.mean(ordered, 0)
    assert last_before > 1.2 and last < 1.06
    assert mean < 1.02 * mean_before


def test_a_call_of_other_lengths_gets_its_rows_in_that_order_and_its_answers_in_its_own() -> None:
    prompts, lengths = random_prompts((5, 6, 7, 5, 9)), UNEVEN
    wrapped = wrap(tiny_llama(), max_num_seqs=2)
    first: dict[int, None] = {}
    found: list[list[int]] = [[] for _ in prompts]
    for update in wrapped.stream(prompts, [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lengths]):
        first.setdefault(update.index)
        found[update.index] += update.token_ids
    assert list(first) == [4, 0, 1, 2, 3] == admission_order(lengths, 2)
    assert found == [hf_greedy(prompt, n) for prompt, n in zip(prompts, lengths, strict=True)]
    assert free_everywhere(wrapped)


def test_a_call_waits_behind_those_that_came_before_it() -> None:
    wrapped = wrap(tiny_llama(), max_num_seqs=2)
    before, after = random_prompts((5, 6, 5, 6)), random_prompts((7, 8, 9, 7, 8))
    first = wrapped.stream(before, [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (2, 3, 2, 3)])
    next(first)
    second = wrapped.stream(after, [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (2, 2, 2, 2, 9)])
    assert next(second).index == 4
    assert [request.id for request in engine_of(wrapped).scheduler.waiting] == [5, 6, 7]
    for stream in (second, first):
        stream.close()
    assert free_everywhere(wrapped)


@pytest.fixture
def queued() -> Engine:
    """Two rows, and a queue of five requests, the last of them the longest."""
    engine = engine_of(wrap(tiny_llama(), max_num_seqs=2))
    prompts = random_prompts((5, 6, 7, 5, 9))
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in UNEVEN]
    engine.arrange([engine.submit(*each) for each in zip(prompts, params, strict=True)])
    return engine


def test_an_interrupt_leaves_everybody_their_turn(queued: Engine) -> None:
    """Who was let in early is not sent behind those that have not begun."""

    def interrupt() -> None:
        queued.meanwhile.clear()
        raise KeyboardInterrupt

    queued.step()
    before = [request.id for request in queued.scheduler.running]
    queued.meanwhile.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        queued.step()
    queued.step()
    assert [request.id for request in queued.scheduler.running] == before == [4, 0]
    assert [request.id for request in queued.scheduler.waiting] == [1, 2, 3]


def test_requests_that_leave_with_their_first_token_stay_as_they_came() -> None:
    wrapped = wrap(tiny_llama(), max_num_seqs=2)
    engine, guests = engine_of(wrapped), guests_of(wrapped)
    params = [SamplingParams(max_new_tokens=n) for n in UNEVEN]
    ids = [guests.submit_leaving(Leaving([1, 2, 3], own, 0, (), 5.0)) for own in params]
    engine.arrange(ids)
    assert [request.id for request in engine.scheduler.waiting] == ids
    engine.abort(ids)


def test_the_order_does_not_change_what_unseeded_requests_draw() -> None:
    """Their uniforms depend on their ids, which are given in the order of the call."""
    prompts = random_prompts((5, 6, 7, 5, 9))
    drawn = []
    for longest in (3, 12):
        params = [SamplingParams(max_new_tokens=n, temperature=1.0, ignore_eos=True) for n in (3, 3, 3, 3, longest)]
        answers = wrap(tiny_llama(), max_num_seqs=2).generate(prompts, params)
        drawn.append([answer.token_ids[:3] for answer in answers])
    assert drawn[0] == drawn[1]


def test_a_request_as_long_as_the_rows_share_of_all_begins_at_once() -> None:
    """Two rows, 5 + 1 + 1 + 1 tokens: shared evenly all is done at 4, but nothing is before 5, whoever begins when."""
    assert admission_order([1, 1, 1, 5], 2) == [3, 0, 1, 2]
    assert admission_order([1, 1, 1, 3], 2) == [3, 0, 1, 2]
    assert admission_order([1, 1, 6, 9], 3) == [3, 0, 1, 2], (
        "all is done at 9 at best: 6 may wait, though 17/3 are less"
    )
