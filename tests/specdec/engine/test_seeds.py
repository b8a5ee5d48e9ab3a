"""The same seed gives the same sampled tokens whatever else is in the batch; other seeds give others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import random_prompts, table_head, tiny_llama, wrap
from transformers import GenerationConfig

from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))
SAMPLED = SamplingParams(max_new_tokens=16, temperature=1.0, top_p=0.9)


def tokens(prompts: list[list[int]], params: Any, **options: Any) -> list[list[int]]:
    model = tiny_llama()
    wrapped = wrap(model, table_head(model), num_speculative_tokens=3, **options)
    return [c.token_ids for c in wrapped.generate(prompts, params)]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_seeded_request_does_not_care_about_its_batch() -> None:
    params = [replace(SAMPLED, seed=i) for i in range(6)]
    together = tokens(PROMPTS, params, max_num_seqs=6, max_num_batched_tokens=256)
    chunked = tokens(PROMPTS, params, max_num_batched_tokens=13)
    backwards = tokens(PROMPTS[::-1], params[::-1], page_size=16)
    alone = [tokens([prompt], own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]
    beside_greedy = tokens([PROMPTS[1], PROMPTS[0]], [SamplingParams(max_new_tokens=30), params[0]])
    assert together == alone == chunked == backwards[::-1]
    assert beside_greedy[1] == alone[0]


@pytest.mark.slow
@pytest.mark.parametrize("own", [{"seed": 5}, {"seed": None}])
@pytest.mark.cases(1)
def test_requests_of_one_prompt(own: dict[str, Any]) -> None:
    """With one seed they are equal, with none each has its own."""
    outcomes = {tuple(t) for t in tokens([PROMPTS[0]] * 8, replace(SAMPLED, **own))}
    assert len(outcomes) == 1 if own["seed"] else len(outcomes) >= 7


@pytest.mark.slow
def test_other_seeds_give_other_tokens() -> None:
    params = [replace(SAMPLED, seed=i) for i in range(8)]
    assert len({tuple(t) for t in tokens([PROMPTS[0]] * 8, params)}) >= 7


@pytest.mark.slow
def test_the_engines_seed_decides_for_requests_without_one() -> None:
    one, again, other = (tokens(PROMPTS[:3], SAMPLED, seed=seed) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.slow
def test_samples_of_one_prompt_differ_and_repeat_with_the_engines_seed() -> None:
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=12, num_return_sequences=4)
    one, again = tokens(PROMPTS[0], config), tokens(PROMPTS[0], config)
    assert one == again
    assert len({tuple(t) for t in one}) >= 3
