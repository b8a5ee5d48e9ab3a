"""The engine says what transformers' own greedy generate says, whatever the batch does around a request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes import eagle3_head, engine_of, free_everywhere, hf_greedy, random_prompts, table_head, tiny_llama, wrap

from specdec.errors import RoundFailedError
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import pool_requests

LENGTHS = (5, 33, 1, 17, 60, 9)
PROMPTS = random_prompts(LENGTHS)
GREEDY = SamplingParams(max_new_tokens=24)


@pytest.mark.parametrize("num_drafts", [0, *(pytest.param(k, marks=pytest.mark.long) for k in (1, 3)), 5])
@pytest.mark.cases(1)
def test_tokens_are_those_of_transformers_greedy_generate(num_drafts: int) -> None:
    model = tiny_llama()
    wrapped = wrap(model, table_head(model), num_speculative_tokens=num_drafts)
    completions = wrapped.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24) for p in PROMPTS]
    assert {c.finish_reason for c in completions} == {"length"}
    tau = pool_requests([c.stats for c in completions]).tau
    assert tau == 1.0 if num_drafts == 0 else tau > 1.3, "the head must be right often enough to test something"
    assert free_everywhere(wrapped)


@pytest.mark.slow
@pytest.mark.parametrize("context", [pytest.param(0.35, marks=pytest.mark.long), 1.0])
@pytest.mark.thorough
def test_tokens_are_right_when_attention_decides_most_of_them(context: float) -> None:
    model = tiny_llama(context=context)
    wrapped = wrap(model, eagle3_head(model), num_speculative_tokens=3)
    completions = wrapped.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24, context=context) for p in PROMPTS]


@pytest.mark.slow
def test_a_reduced_draft_vocabulary_changes_no_token() -> None:
    model = tiny_llama()
    head = table_head(model, known=range(0, 64, 2))
    completions = wrap(model, head, num_speculative_tokens=3).generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24) for p in PROMPTS]
    drafted = wrap(tiny_llama(), head, num_speculative_tokens=3).generate(PROMPTS, replace(GREEDY, return_drafts=True))
    assert {d % 2 for c in drafted for r in c.drafts for d in r} == {0}


@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        pytest.param({"max_num_batched_tokens": 12}, False, marks=pytest.mark.long),
        pytest.param({"max_num_seqs": 1, "max_num_batched_tokens": 7}, False, marks=pytest.mark.slow),
        pytest.param({"max_num_seqs": 6, "max_num_batched_tokens": 64}, False, marks=pytest.mark.long),
        pytest.param({"kv_cache_tokens": 104}, True, marks=pytest.mark.long),
        ({"kv_cache_tokens": 88, "max_num_seqs": 6, "max_num_batched_tokens": 24}, True),
        ({"page_size": 1}, False),
        pytest.param({"page_size": 64, "kv_cache_tokens": 640}, False, marks=pytest.mark.long),
    ],
)
@pytest.mark.cases(1)
def test_chunks_pages_and_preemption_change_no_token(options: dict[str, int], preempts: bool) -> None:
    model = tiny_llama()
    wrapped = wrap(model, table_head(model), num_speculative_tokens=3, **options)
    completions = wrapped.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24) for p in PROMPTS]
    preemptions = sum(c.stats.preemptions for c in completions)
    assert (preemptions > 0) == preempts
    assert wrapped.engine_stats.preemptions == preemptions
    assert free_everywhere(wrapped)


@pytest.mark.slow
def test_each_request_may_have_its_own_k() -> None:
    model = tiny_llama()
    params = [replace(GREEDY, num_speculative_tokens=k, return_drafts=True) for k in (0, 5, 2, None, 1, 3)]
    completions = wrap(model, table_head(model), num_speculative_tokens=5).generate(PROMPTS, params)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24) for p in PROMPTS]
    assert [max(map(len, c.drafts)) for c in completions] == [0, 5, 2, 5, 1, 3]


@pytest.mark.slow
def test_requests_join_and_leave_between_rounds() -> None:
    model = tiny_llama()
    wrapped = wrap(model, table_head(model), num_speculative_tokens=3, max_num_seqs=4, max_num_batched_tokens=32)
    engine, done, ids = engine_of(wrapped), {}, {}
    for turn in range(200):
        if turn % 3 == 0 and len(ids) < len(PROMPTS):
            index = len(ids)
            new = 5 + 3 * index
            ids[engine.submit(PROMPTS[index], SamplingParams(max_new_tokens=new))] = index
        if len(ids) == len(PROMPTS) and not engine.has_work:
            break
        for update in engine.step():
            if update.completion is not None:
                done[ids[update.request_id]] = update.completion.token_ids
    assert [done[i] for i in range(len(PROMPTS))] == [hf_greedy(p, 5 + 3 * i) for i, p in enumerate(PROMPTS)]
    assert free_everywhere(wrapped)


@pytest.mark.slow
def test_one_copy_each_way_a_round() -> None:
    model = tiny_llama()
    wrapped = wrap(model, table_head(model), num_speculative_tokens=3)
    wrapped.generate(PROMPTS, GREEDY)
    stats = wrapped.engine_stats
    assert stats.host_to_device == stats.device_to_host == stats.rounds


def test_an_idle_engine_does_nothing() -> None:
    wrapped = wrap(tiny_llama())
    assert engine_of(wrapped).step() == []
    assert wrapped.engine_stats.rounds == 0


@pytest.mark.slow
@pytest.mark.parametrize("neighbour", [{"max_new_tokens": 2}, {"max_new_tokens": 30}])
@pytest.mark.cases(1)
def test_a_limit_shortens_only_its_own_row(neighbour: dict[str, int]) -> None:
    """Rows at max_new_tokens or max_model_len draft less; their neighbours draft as when they are alone."""
    model = tiny_llama()
    options = {"num_speculative_tokens": 5, "max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 64}
    wrapped = wrap(model, table_head(model), **options)
    long_row = SamplingParams(max_new_tokens=40, return_drafts=True)
    prompts = [PROMPTS[0], PROMPTS[4], PROMPTS[3]]  # 5, 60 (stops at max_model_len) and 17 tokens
    alone = wrapped.generate(prompts[0], long_row)[0]
    own = SamplingParams(**neighbour, return_drafts=True)
    together = wrapped.generate(prompts, [long_row, long_row, own])
    assert together[0].drafts == alone.drafts
    assert together[0].token_ids == alone.token_ids
    assert len(together[1].token_ids) == 4, "60 of 64 positions are taken by the prompt"
    for completion, limit in zip(together, (40, 4, neighbour["max_new_tokens"]), strict=True):
        left = limit - 1
        for drafts, round_ in zip(completion.drafts, completion.stats.rounds, strict=True):
            assert len(drafts) == min(5, left - 1)
            left -= round_.emitted


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.thorough
def test_a_last_prompt_chunk_of_one_token_is_still_a_prompt(temperature: float) -> None:
    """How a prompt is cut into chunks decides nothing: its last is no bonus token, the first token in no round."""
    prompts = random_prompts([25] * 12, seed=3)
    params = SamplingParams(max_new_tokens=8, return_drafts=True, temperature=temperature, seed=5)
    head = table_head(tiny_llama())
    outcomes = []
    for budget in (64, 24):
        wrapped = wrap(tiny_llama(), head, num_speculative_tokens=3, max_num_batched_tokens=budget)
        completions = [wrapped.generate(p, params)[0] for p in prompts]
        assert all(c.stats.new_tokens == 1 + sum(r.emitted for r in c.stats.rounds) for c in completions)
        outcomes.append([(c.token_ids, c.drafts, c.stats.rounds) for c in completions])
    assert outcomes[0] == outcomes[1]


@pytest.mark.slow
def test_an_error_in_a_round_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    wrapped = wrap(model, table_head(model), num_speculative_tokens=3)
    real, calls = wrapped.target.forward, []

    def failing(*args: object) -> object:
        calls.append(1)
        if len(calls) in (4, 5):
            raise torch.OutOfMemoryError("planted")
        return real(*args)

    monkeypatch.setattr(wrapped.target, "forward", failing)
    with pytest.raises(RoundFailedError, match="OutOfMemoryError: planted; the 3 requests") as caught:
        wrapped.generate(PROMPTS, GREEDY)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert free_everywhere(wrapped)
    assert wrapped.generate(PROMPTS[1], GREEDY)[0].token_ids == hf_greedy(PROMPTS[1], 24)
