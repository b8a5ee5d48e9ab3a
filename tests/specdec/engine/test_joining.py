"""Requests that come during a draft loop on a CPU: they join the verification after it, and change nothing in it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import (
    engine_of,
    examples,
    free_everywhere,
    hf_greedy,
    launch_ahead,
    random_prompts,
    results_of,
    table_head,
    tiny_llama,
    wrap,
    wrong_rounds,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import Grammar
from specdec.engine.launcher import Launcher
from specdec.requests.sampling import SamplingParams
from tests.drafters.test_conformance import nearly_bigram
from tests.hybrids import tiny_hybrid
from tests.mtp_cases import tiny
from tests.specdec.extensions.grammars.spelled import END, tokenizer

NEW = 14
PROMPTS = random_prompts((5, 33, 1, 17, 40, 9, 12, 3))


def half(engine: Any) -> Any:
    """A step while a call is about to be queued."""
    engine.coming = ["a call"]
    updates = engine.step()
    engine.coming = []
    return updates


def made(num_drafts: int = 3, rows: int = 3, **options: Any) -> Any:
    model = tiny_llama()
    return wrap(
        model,
        table_head(model, disturbance=0.2, aux_layers=(1, 2, 3)),
        num_speculative_tokens=num_drafts,
        max_num_seqs=rows,
        page_size=4,
        **options,
    )


def params(i: int, temperature: float) -> SamplingParams:
    own = {"temperature": temperature * (i % 2), "seed": i}
    return SamplingParams(max_new_tokens=NEW, ignore_eos=True, return_drafts=True, **own)


@functools.cache
def alone(i: int, temperature: float, num_drafts: int) -> list[int]:
    if not temperature * (i % 2):
        return hf_greedy(PROMPTS[i], NEW)
    (completion,) = made(num_drafts).generate([PROMPTS[i]], params(i, temperature))
    return list(completion.token_ids)


def decoding(wrapped: Any, *places: int) -> Any:
    """The engine with these prompts running, before the draft loop of a round in which all of them have drafts."""
    engine = engine_of(wrapped)
    for i in places:
        engine.submit(PROMPTS[i], params(i, 0))
    while (
        engine.scheduler.waiting
        or not (engine.table.drafts > 0).sum()
        or engine.inflight.schedule.num_drafts.min() == 0
    ):
        engine.step()
    return engine


def test_a_request_is_in_the_verification_after_the_draft_loop_in_which_it_came() -> None:
    engine = decoding(made(), 0, 3)
    before = engine.stats
    assert half(engine) == []
    new = engine.submit(PROMPTS[5], params(5, 0))
    updates = {update.request_id: list(update.token_ids) for update in engine.step()}
    assert updates[new] == hf_greedy(PROMPTS[5], 1) and len(updates) == 3
    engine.step()
    after = engine.stats
    assert (after.rounds - before.rounds, after.host_to_device - before.host_to_device) == (2, 3)


def test_a_round_that_nobody_joins_is_sent_once() -> None:
    engine = decoding(made(), 0, 3)
    before = engine.stats
    assert half(engine) == []
    assert len(engine.step()) == 2
    after = engine.stats
    assert (after.rounds - before.rounds, after.host_to_device - before.host_to_device) == (1, 1)


def test_where_the_verification_is_queued_nobody_is_waited_for() -> None:
    wrapped = made()
    launch_ahead(wrapped)
    engine = decoding(wrapped, 0, 3)
    assert half(engine)


@pytest.mark.parametrize("ends", ["abort", "cancel"])
def test_nobody_takes_the_row_of_a_round_that_is_launched(ends: str) -> None:
    """The page and the number of the row would be of two requests in one verification."""
    wrapped = made(rows=2)
    engine = decoding(wrapped, 0, 3)
    gone, left = engine.scheduler.running
    if ends == "cancel":  # it is reported, and its row closed, at the end of the first half
        engine.deadlines.cancel([gone.id])
    assert [update.request_id for update in half(engine)] == [gone.id] * (ends == "cancel")
    if ends == "abort":
        engine.abort([gone.id])
    new = engine.submit(PROMPTS[5], params(5, 0))
    assert [update.request_id for update in engine.step()] == [left.id]
    found: dict[int, list[int]] = {new: []}
    while engine.has_work:
        for update in engine.step():
            found.setdefault(update.request_id, []).extend(update.token_ids)
    assert (
        found[new] == hf_greedy(PROMPTS[5], NEW)
        and hf_greedy(PROMPTS[3], NEW)[-len(found[left.id]) :] == found[left.id]
    )
    assert free_everywhere(wrapped)


@pytest.mark.slow
@settings(max_examples=examples(6), deadline=None)
@given(
    num_drafts=st.sampled_from([1, 3, 5]),
    temperature=st.sampled_from([0.0, 0.8]),
    prefill=st.sampled_from([8, 64]),
    caching=st.booleans(),
    pages=st.sampled_from([None, 120]),
    seed=st.integers(0, 2**16),
)
def test_answers_are_as_alone_whenever_requests_come(
    num_drafts: int, temperature: float, prefill: int, caching: bool, pages: int | None, seed: int
) -> None:
    options = {"max_num_prefill_tokens": prefill, "enable_prefix_caching": caching, "kv_cache_tokens": pages}
    wrapped, pick = made(num_drafts, **options), np.random.default_rng(seed)
    engine = engine_of(wrapped)
    places, found, left = dict[int, int](), dict[int, list[int]](), [*range(len(PROMPTS))]
    while left or engine.has_work:
        if left and pick.random() < 0.4:
            i = left.pop(int(pick.integers(len(left))))
            places[engine.submit(PROMPTS[i], params(i, temperature))] = i
        for update in half(engine) if pick.integers(2) else engine.step():
            found.setdefault(places[update.request_id], []).extend(update.token_ids)
            if update.completion is not None and not temperature:
                assert wrong_rounds(wrapped.head, update.completion) == []
    assert found == {i: alone(i, temperature, num_drafts) for i in range(len(PROMPTS))}
    assert free_everywhere(wrapped)


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "options": {"repetition_penalty": 1.3, "logprobs": 2},
    "code": {"logits_processor": [lambda ids, scores: scores + (ids[:, -1:] % 7 == 0) * torch.arange(64) / 9]},
    "grammar": {"grammar": Grammar.regex("[a-z]{3,20}"), "stop_token_ids": (END,)},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mamba2", "qwen3_next"])
def test_rows_of_every_kind_are_sent_again_as_they_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With log-probabilities, processors, grammars and recurrent states, whose arrays are made once more."""
    pytest.importorskip("llguidance")
    model = tiny_llama() if kind == "llama" else tiny_hybrid(kind)
    own = {"num_speculative_tokens": 3, "max_num_seqs": 4, "tokenizer": tokenizer()}
    wrapped, other = (wrap(model, table_head(model, 0.2, (1, 2)), **own) for _ in range(2))
    engine, asked = engine_of(wrapped), [(p, o) for p in PROMPTS[:4] for o in OPTIONS.values()]
    each = [
        (p, SamplingParams(**{"max_new_tokens": NEW, "ignore_eos": True, "return_drafts": True} | o)) for p, o in asked
    ]
    left, places, found = [*range(len(each))], dict[int, int](), dict[int, Any]()
    sent = results_of(monkeypatch, Launcher, "joined")
    while left or engine.has_work:
        for update in half(engine) if engine.has_work else ():
            found[places[update.request_id]] = update.completion
        if left:
            (request,), _ = wrapped.stream(*each[left[0]]).hand_over()
            places[request.submit_to(engine)] = left.pop(0)
    assert len({len(launched.schedule.rows) for launched in sent}) > 1
    for (prompt, params), completion in zip(each, (found[i] for i in range(len(each))), strict=True):
        (right,) = other.generate([prompt], params)
        assert (completion.token_ids, completion.drafts) == (right.token_ids, right.drafts)
    assert free_everywhere(wrapped)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("modules", [0, 1, pytest.param(3, marks=pytest.mark.thorough)])
def test_modules_and_a_small_model_draft_as_alone(
    modules: int, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their loops read what a round sends in other ways. modules: 0, a small draft model."""
    if modules:
        case = nearly_bigram(tiny("deepseek_v3", modules=modules, context=0.02))
        model, draft = case.model, case.write(tmp_path)
    else:
        model, draft = tiny_llama(), tmp_path
        tiny_llama(context=0.1).save_pretrained(tmp_path)
    own = {"num_speculative_tokens": 3, "max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": 4}
    wrapped, other = (wrap(model, str(draft), **own) for _ in range(2))
    engine, left = engine_of(wrapped), [*range(len(PROMPTS))]
    places, found = dict[int, int](), dict[int, Any]()
    sent = results_of(monkeypatch, Launcher, "joined")
    while left or engine.has_work:
        for update in [*(half(engine) if engine.has_work else ()), *engine.step()]:
            found[places[update.request_id]] = update.completion
        if left:
            i = left.pop(0)
            places[engine.submit(PROMPTS[i], params(i, temperature))] = i
    assert sent
    for i, prompt in enumerate(PROMPTS):
        (right,) = other.generate([prompt], params(i, temperature))
        assert (found[i].token_ids, found[i].drafts) == (right.token_ids, right.drafts), i
    assert free_everywhere(wrapped)
