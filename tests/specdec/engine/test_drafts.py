"""The draft oracle over the engine: every round's draft ids equal those of a head without a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import eagle3_head, random_prompts, scheduler_of, table_head, tiny_llama, wrap, wrong_rounds

from drafters.base import Head
from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))
PARAMS = SamplingParams(max_new_tokens=24, return_drafts=True)
AUX_LAYERS = (1, 2, 3)


def head_of(kind: str) -> Head:
    model = tiny_llama()
    return eagle3_head(model, draft_vocab_size=32) if kind == "eagle3" else table_head(model, aux_layers=AUX_LAYERS)


SIZES: list[dict[str, int]] = [
    {"max_num_seqs": 6, "max_num_batched_tokens": 36, "page_size": 3},
    {"max_num_batched_tokens": 18, "page_size": 1},
    {"kv_cache_tokens": 104},
    {"kv_cache_tokens": 88, "max_num_seqs": 6, "max_num_batched_tokens": 36},
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("table", {}),
        pytest.param("table", SIZES[1], marks=pytest.mark.slow),
        *(pytest.param("table", options, marks=pytest.mark.long) for options in (SIZES[0], *SIZES[2:])),
        pytest.param("eagle3", SIZES[-1], marks=pytest.mark.slow),
        *(pytest.param("eagle3", options, marks=pytest.mark.long) for options in ({}, *SIZES[:-1])),
    ],
)
@pytest.mark.cases(1)
def test_drafts_equal_the_oracle_round_by_round(kind: str, options: dict[str, int]) -> None:
    head = head_of(kind)
    wrapped = wrap(tiny_llama(), head, num_speculative_tokens=5, **options)
    completions = wrapped.generate(PROMPTS, PARAMS)
    assert [wrong_rounds(head, c) for c in completions] == [[]] * len(PROMPTS)
    assert any(c.stats.preemptions for c in completions) == ("kv_cache_tokens" in options)


@pytest.mark.slow
def test_drafts_of_requests_with_different_k_equal_the_oracle() -> None:
    head = head_of("table")
    params = [replace(PARAMS, num_speculative_tokens=k) for k in (5, 1, 3, 0, 2, 5)]
    wrapped = wrap(tiny_llama(), head, num_speculative_tokens=5, max_num_seqs=6, max_num_batched_tokens=48)
    assert [wrong_rounds(head, c) for c in wrapped.generate(PROMPTS, params)] == [[]] * len(PROMPTS)


@pytest.mark.slow
def test_greedy_drafts_beside_sampled_rows_equal_the_oracle() -> None:
    head = head_of("table")
    params = [replace(PARAMS, temperature=0.8 * (i % 2), seed=i) for i in range(6)]
    wrapped = wrap(tiny_llama(), head, num_speculative_tokens=3, max_num_seqs=6, max_num_batched_tokens=48)
    completions = wrapped.generate(PROMPTS, params)
    assert [wrong_rounds(head, c) for c in completions[::2]] == [[]] * 3


def zero_slot(wrapped: Any, position: int) -> None:
    """Zero the head's K and V of one position of the first running row."""
    scheduler = scheduler_of(wrapped)
    row, pages = scheduler.running[0].row, scheduler.head_pages
    page, offset = pages.table[row, position // pages.page_size], position % pages.page_size
    layer = wrapped.runners[1].layers[0]
    assert layer.keys[page, offset].any()
    layer.keys[page, offset] = 0
    layer.values[page, offset] = 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["table", pytest.param("eagle3", marks=pytest.mark.long)])
@pytest.mark.thorough
def test_one_zeroed_slot_of_the_heads_cache_fails_the_oracle(kind: str) -> None:
    """Planted defect. The tokens stay right: only the drafts show it."""
    head = head_of(kind)
    prompts = random_prompts([9] * 6, seed=4)
    wrapped, spoiled, right = wrap(tiny_llama(), head, num_speculative_tokens=5), 0, []
    for prompt in prompts:
        (good,) = wrapped.generate(prompt, PARAMS)
        right.append(good.token_ids)
        for turn, update in enumerate(wrapped.stream(prompt, PARAMS)):
            if turn == 2:
                zero_slot(wrapped, 3)
            completion = update.completion
        assert completion is not None and completion.token_ids == good.token_ids
        wrong = wrong_rounds(head, completion)
        assert not set(wrong) & {0, 1}, "rounds before the defect are right"
        spoiled += bool(wrong)
    assert spoiled >= 2


@pytest.mark.long
def test_reading_the_neighbours_true_states_fails_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted defect: the draft prefill reads the target's states one row too late."""
    import drafters.loops.prefill

    real = drafters.loops.prefill.accepted_rows

    def one_late(qsl: Any, drafts: Any, accepted: Any, rows: Any) -> Any:
        found = real(qsl, drafts, accepted, rows)
        found.token_indices[:-1] = found.token_indices[1:]
        return found

    monkeypatch.setattr(drafters.loops.prefill, "accepted_rows", one_late)
    head = head_of("table")
    wrapped = wrap(tiny_llama(), head, num_speculative_tokens=3)
    assert any(wrong_rounds(head, c) for c in wrapped.generate(PROMPTS, PARAMS))
