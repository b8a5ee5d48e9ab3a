"""Rounds with short prompts from the graphs of verifications: tokens, drafts and rounds of eager ones, no segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import (
    count_calls,
    eagle3_head,
    engine_of,
    free_everywhere,
    hf_greedy,
    random_prompts,
    table_head,
    tiny_llama,
    wrap,
    wrong_rounds,
)

import specdec.execution.fixed
from specdec.execution.fixed import FixedRounds
from specdec.execution.ragged import RaggedPrefill, RaggedTarget
from specdec.requests.sampling import SamplingParams
from specdec.rounds.static import FixedTarget, _TargetPlace
from specdec.rounds.virtual_rows import VirtualRows, virtual_rows
from tests.drafters.loops.modules.test_graphs import found
from tests.specdec.execution.test_graphs import Replayed, graphs_on_cpu, recorded_on_cpu, with_graphs  # noqa: F401

PROMPTS = random_prompts((5, 33, 1, 17, 29, 9))
GREEDY = SamplingParams(max_new_tokens=20, return_drafts=True)
SIZES: dict[str, Any] = {"num_speculative_tokens": 3, "max_num_seqs": 16, "max_num_batched_tokens": 64}


def head_of(kind: str) -> Any:
    return eagle3_head(tiny_llama()) if kind == "eagle3" else table_head(tiny_llama(), aux_layers=(1, 2, 3))


def arriving(wrapped: Any, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Completions of two requests, and of the others, which arrive while these decode."""
    engine, completions = engine_of(wrapped), {}
    waiting, ids = list(zip(prompts, params, strict=True)), []
    while waiting or engine.has_work:
        if len(ids) in (0, 4):
            ids += [engine.submit(*waiting.pop(0)) for _ in range(len(waiting) if ids else 2)]
        elif waiting:
            ids += [-1]  # a round more
        for update in engine.step():
            if update.completion is not None:
                completions[update.request_id] = update.completion
    return [completions[i] for i in ids if i >= 0]


def sampled_and_greedy(count: int) -> list[SamplingParams]:
    temperatures = [0.9 * (i % 2) for i in range(count)]
    return [replace(GREEDY, temperature=t, seed=i, top_p=0.9) for i, t in enumerate(temperatures)]


@pytest.mark.parametrize("kind", ["table", pytest.param("eagle3", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"num_speculative_tokens": 1, "max_num_seqs": 64}, marks=pytest.mark.slow),
        pytest.param({"num_speculative_tokens": 5, "max_num_seqs": 21}, marks=pytest.mark.slow),
        pytest.param({"page_size": 1}, marks=pytest.mark.slow),
        pytest.param({"kv_cache_layout": "HND", "page_size": 16, "kv_cache_tokens": 640}, marks=pytest.mark.slow),
    ],
)
def test_tokens_drafts_and_rounds_are_those_of_the_eager_path(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    options: dict[str, Any],
) -> None:
    """Prompts alone, in pieces, and beside rows that decode; greedy rows and sampled ones."""
    sizes = SIZES | {"max_num_seqs": 32, "max_num_batched_tokens": 128, "max_num_prefill_tokens": 21} | options
    params = sampled_and_greedy(len(PROMPTS))
    ragged, chosen = count_calls(monkeypatch, RaggedTarget, "logits"), count_calls(monkeypatch, FixedRounds, "choose")
    eager = wrap(tiny_llama(), head_of(kind), **sizes).generate(PROMPTS, params)
    graphed = with_graphs(head_of(kind), **sizes)
    completions = arriving(graphed, PROMPTS, params)
    assert found(completions) == found(eager)
    for prompt, completion in list(zip(PROMPTS, completions, strict=True))[::2]:
        assert completion.token_ids == hf_greedy(prompt, 20)
        assert wrong_rounds(graphed.head, completion) == []
    prompts = [target for (target,) in chosen if not target.only_bonus_tokens]
    assert len(prompts) >= 4 and not ragged, "rounds with prompts from one graph"
    assert any(len(target.decided) < len(target.start) for target in prompts), "a prompt that is read on"
    assert any(target.num_drafting for target in prompts), "beside rows that verify"
    assert free_everywhere(graphed)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_left_of_a_cached_prompt(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
) -> None:
    """A long beginning is cached, a few tokens are new: no round by segments, three copies, four with sampled rows."""
    common = random_prompts((50,), seed=5)[0]
    prompts = [common + own for own in random_prompts((9, 9, 4), seed=6)]
    params = replace(GREEDY, temperature=temperature, seed=3)
    alone = wrap(tiny_llama(), head_of("table"), **SIZES).generate(prompts, params)
    sizes = SIZES | {"max_num_batched_tokens": 128, "max_num_seqs": 12}
    graphed = with_graphs(head_of("table"), **sizes, enable_prefix_caching=True, kv_cache_tokens=800)
    graphed.generate(prompts[:1], params)
    ragged = count_calls(monkeypatch, RaggedTarget, "logits")
    prefills = count_calls(monkeypatch, RaggedPrefill, "run")
    following = count_calls(monkeypatch, FixedRounds, "send_following")
    for prompt, expected in zip(prompts[1:], alone[1:], strict=True):
        before, rounds = graphed.executor.transfers, len(following)
        (completion,) = graphed.generate([prompt], params)
        assert completion.stats.cached_tokens == 48
        assert found([completion]) == found([expected])
        virtual = sum(round_.following is not None for (round_,) in following[rounds:])
        assert virtual == 1
        each = 2 if temperature == 0 else 3
        sent = graphed.executor.transfers - before
        last = len(completion.stats.rounds) + 1
        assert sent <= each * last + virtual
    assert not ragged and not prefills
    assert free_everywhere(graphed)


@pytest.mark.parametrize("limit", ["", "keys", "pages", "tokens"])
def test_longer_prompts_go_by_segments(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
) -> None:
    """17 tokens: one, and four virtual rows from 0, 4, 8 and 12 on, which read 24 keys before their own."""
    monkeypatch.setattr(specdec.execution.fixed, "MOST_KEYS", 23 if limit == "keys" else 24)
    monkeypatch.setattr(specdec.execution.fixed, "TILE_TOKENS", 16 if limit == "tokens" else 20)
    sizes = {"num_speculative_tokens": 3, "max_num_seqs": 5, "max_num_batched_tokens": 64}
    graphed = with_graphs(head_of("table"), **sizes)
    if limit == "pages":
        monkeypatch.setattr(FixedTarget, "holds", lambda *_: False)
    ragged = count_calls(monkeypatch, RaggedTarget, "logits")
    (completion,) = graphed.generate([PROMPTS[3]], replace(GREEDY, max_new_tokens=8))
    assert completion.token_ids == hf_greedy(PROMPTS[3], 8)
    assert len(ragged) == (limit != "")


def lost_following(target: Any, query_len: int) -> VirtualRows:
    """Planted: the token after the last one of a virtual row is lost."""
    rows = virtual_rows(target, query_len)
    rows.following[:, -1] = 0
    return rows


def one_position_back(target: Any, query_len: int) -> VirtualRows:
    """Planted: virtual rows stand one position too far back."""
    rows, own = virtual_rows(target, query_len), len(target.start)
    start = rows.target.start.copy()
    start[own:] -= start[own:] > 0
    return VirtualRows(replace(rows.target, start=start), rows.following)


def moved_for_good(place: Any, virtual: slice, elsewhere: int) -> None:
    """Planted: rows that were virtual once get no drafts again."""
    place.draft_places[virtual] = elsewhere
    place.has_virtual = True


@pytest.mark.parametrize("planted", ["", "following", "places", "places left", "position"])
def test_planted_defects_are_noticed(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    planted: str,
) -> None:
    head, sizes = head_of("table"), SIZES | {"max_num_seqs": 8}
    defects = {"following": lost_following, "position": one_position_back}
    if planted in defects:
        monkeypatch.setattr(specdec.execution.fixed, "virtual_rows", defects[planted])
    if planted == "places":
        monkeypatch.setattr(_TargetPlace, "place_drafts", lambda *_: None)
    if planted == "places left":
        monkeypatch.setattr(_TargetPlace, "place_drafts", moved_for_good)
    graphed = with_graphs(head, **sizes)
    prompts = [PROMPTS[i] for i in (3, 5, 2, 0, 2)]
    completions = arriving(graphed, prompts, [GREEDY] * 5)  # five rows verify where virtual ones stood
    same_tokens = [c.token_ids for c in completions] == [hf_greedy(p, 20) for p in prompts]
    same_drafts = [wrong_rounds(head, c) for c in completions] == [[]] * 5
    assert (same_tokens and same_drafts) == (not planted)
