"""A request that loses its pages and comes back goes through the very rounds it would have gone through undisturbed.

So the same tokens, the same drafts and the same statistics as alone: greedy, and sampled with a seed. K, heads, how
prompts are cut into chunks, and who the neighbours are change nothing of that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import LetterTokenizer, eagle3_head, hf_greedy, random_prompts, table_head, tiny_llama

from specdec import SamplingParams, SpeculativeModel

PROMPTS = random_prompts((5, 33, 1, 17, 40, 9, 26, 13), seed=11)
ROOMY = {"kv_cache_tokens": 2000, "max_num_seqs": 1, "max_num_batched_tokens": 128}
TIGHT = {"kv_cache_tokens": 120, "max_num_seqs": 6, "max_num_batched_tokens": 36}


def load(target: Any, head: Any, **options: Any) -> SpeculativeModel:
    sizes = {"page_size": 4, "max_model_len": 96, "tokenizer": LetterTokenizer()}
    return SpeculativeModel.from_pretrained(target, head, **{**sizes, **options})


def params(i: int, drafts: int | None, temperature: float = 0.9) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=20 + i % 7,
        temperature=temperature,
        top_p=(1.0, 0.95)[i % 2],
        seed=100 + i,
        num_speculative_tokens=drafts,
        return_drafts=True,
    )


def lived(completion: Any) -> tuple[Any, ...]:
    """All that must not depend on the batch."""
    stats = completion.stats
    return completion.token_ids, completion.text, completion.finish_reason, completion.drafts, stats.rounds


FORWARDS, BACKWARDS = slice(None), slice(None, None, -1)
"""Orders of the requests of a batch."""


def assert_as_alone(
    alone: SpeculativeModel, together: SpeculativeModel, asked: list[SamplingParams], *orders: slice
) -> None:
    preempted = 0
    expected = [alone.generate(p, s)[0] for p, s in zip(PROMPTS, asked, strict=True)]
    for order in orders:
        completions = together.generate(PROMPTS[order], asked[order])
        pairs = enumerate(zip(completions, expected[order], strict=True))
        differing = [i for i, (c, e) in pairs if lived(c) != lived(e)]
        hit = [i for i, c in enumerate(completions) if c.stats.preemptions]
        assert not differing, f"{len(differing)} of {len(PROMPTS)} requests differ; preempted were {hit}"
        for c in completions:
            assert c.stats.new_tokens == len(c.token_ids) == 1 + sum(r.emitted for r in c.stats.rounds)
        preempted += len(hit)
    assert alone.engine_stats.preemptions == 0 and together.engine_stats.preemptions >= preempted >= 2 * len(orders)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_head", "drafts", "temperature"),
    [
        (eagle3_head, 3, 0.9),
        *(pytest.param(table_head, *own, marks=pytest.mark.long) for own in ((5, 0.9), (0, 0.9), (3, 0.0))),
    ],
)
def test_preemption_changes_no_round(make_head: Any, drafts: int, temperature: float) -> None:
    target = tiny_llama()
    head = make_head(target)
    alone, together = (load(target, head, num_speculative_tokens=5, **options) for options in (ROOMY, TIGHT))
    asked = [params(i, drafts, temperature) for i in range(len(PROMPTS))]
    assert_as_alone(alone, together, asked, FORWARDS, BACKWARDS)
    if not temperature:
        tokens = [c.token_ids for c in together.generate(PROMPTS, asked)]
        assert tokens == [hf_greedy(p, s.max_new_tokens) for p, s in zip(PROMPTS, asked, strict=True)]


@pytest.mark.slow
@pytest.mark.thorough
def test_without_a_head() -> None:
    target = tiny_llama()
    alone, together = (load(target, None, **options) for options in (ROOMY, TIGHT))
    assert_as_alone(alone, together, [params(i, None) for i in range(len(PROMPTS))], FORWARDS)


@pytest.mark.slow
@pytest.mark.thorough
def test_each_request_with_a_k_of_its_own() -> None:
    """Neighbours with other K, greedy ones beside sampled ones, some that stop, some at the model's length limit."""
    target = tiny_llama()
    head = table_head(target, known=range(0, 64, 2))
    sizes = {"num_speculative_tokens": 5, "max_model_len": 56}
    alone, together = (load(target, head, **sizes, **options) for options in (ROOMY, TIGHT))
    asked = [
        SamplingParams(
            max_new_tokens=30,
            temperature=(0.9, 0.0, 1.2)[i % 3],
            top_k=(0, 20)[i % 2],
            seed=i,
            stop=("ab", "Q") if i % 4 == 3 else (),
            num_speculative_tokens=(0, 5, 1, 3)[i % 4],
            return_drafts=True,
        )
        for i in range(len(PROMPTS))
    ]
    assert_as_alone(alone, together, asked, BACKWARDS)


@pytest.mark.slow
@pytest.mark.thorough
def test_what_a_seed_does_not_fix() -> None:
    """Another K draws other tokens; without a seed it matters how many requests there were before."""
    target = tiny_llama()
    model = load(target, table_head(target), num_speculative_tokens=5, **ROOMY)
    asked = SamplingParams(max_new_tokens=24, temperature=1.0, seed=3)
    by_drafts = [
        [tuple(model.generate(PROMPTS[0], replace(asked, num_speculative_tokens=k))[0].token_ids) for _ in range(2)]
        for k in (0, 3, 5)
    ]
    assert all(first == again for first, again in by_drafts)
    assert len({first for first, _ in by_drafts}) == 3
    first, again = (model.generate(PROMPTS[0], replace(asked, seed=None))[0].token_ids for _ in range(2))
    assert first != again


@pytest.mark.slow
@pytest.mark.thorough
def test_a_limit_changes_the_end_only() -> None:
    """Near its limit a request drafts less, so a longer one's tokens are the same but for the last rounds'."""
    target = tiny_llama()
    model = load(target, table_head(target), num_speculative_tokens=5, **ROOMY)
    asked = SamplingParams(max_new_tokens=60, temperature=1.0, seed=3)
    longest = model.generate(PROMPTS[1], asked)[0].token_ids
    for most in range(10, 60, 7):
        tokens = model.generate(PROMPTS[1], replace(asked, max_new_tokens=most))[0].token_ids
        assert len(tokens) == most and tokens[: most - 6] == longest[: most - 6]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_multi_token_prediction_module() -> None:
    roomy, tight = (dict(options, max_model_len=80) for options in (ROOMY, TIGHT))
    tight["kv_cache_tokens"] = 100
    alone, together = (
        SpeculativeModel.from_pretrained("gsm-deepseek", "mtp", num_speculative_tokens=3, page_size=4, **options)
        for options in (roomy, tight)
    )
    prompts = [f"Ann has {n} boxes of {n + 3} pens. How many pens?" for n in range(2, 7)]
    asked = [
        SamplingParams(max_new_tokens=16, temperature=0.8, seed=i, ignore_eos=True, return_drafts=True)
        for i in range(len(prompts))
    ]
    completions = together.generate(prompts, asked)
    expected = [alone.generate(p, s)[0] for p, s in zip(prompts, asked, strict=True)]
    assert [lived(c) for c in completions] == [lived(c) for c in expected]
    assert sum(c.stats.preemptions > 0 for c in completions) >= 2
