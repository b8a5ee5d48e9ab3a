"""Targets with recurrent layers say what transformers' `generate` says, in every setting of the engine, in float32."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import free_everywhere, random_prompts, wrap

from specdec import SamplingParams
from tests.hybrids import PURE, TYPES, RecallHead, greedy_text, tiny_hybrid

NEW = 24
PROMPTS = random_prompts([17, 3, 9])
CROWD = random_prompts([19, 13, 17, 21, 1], seed=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "K=0": {"drafts": 0},
    "K=3": {"drafts": 3, "right": 0.6},
    "K=5": {"drafts": 5, "right": 0.8},
    "chunks of 12": {"drafts": 3, "max_num_batched_tokens": 12},
    "chunks of 24": {"drafts": 3, "max_num_batched_tokens": 24},
    "few pages": {"drafts": 3, "kv_cache_tokens": 84},
    "two rows": {"drafts": 3, "max_num_seqs": 2},
}
KINDS = ("qwen3_next", "kimi_linear", "falcon_h1", "jamba", "lfm2", "mamba2")
"""A type of each kind of layer."""
CROWDED = ("qwen3_next", "mamba2")


def settings() -> list[Any]:
    """Every type with one setting that drafts, in turn, one type of each kind with K = 0, and one type with all.

    The other pairs are long ones.
    """
    pairs = []
    drafting = [setting for setting in SETTINGS if setting != "K=0"]
    for i, name in enumerate(TYPES):
        for setting in SETTINGS:
            own = setting == drafting[i % len(drafting)] or (setting == "K=0" and name in KINDS)
            marks = [pytest.mark.slow if own else pytest.mark.long]
            if name == "qwen3_next":
                marks = [pytest.mark.slow] * (setting not in ("K=0", "K=3"))
            pairs.append(pytest.param(name, setting, marks=marks))
    return pairs


def served(name: str, drafts: int = 3, right: float = 0.6, prompts: Any = PROMPTS, **sizes: Any) -> Any:
    """A tiny model of this type with a head that knows what will be said, and is right with a probability."""
    head = RecallHead([greedy_text(name, prompt, NEW) for prompt in prompts], right) if drafts else None
    options = {"num_speculative_tokens": drafts or None, "max_num_batched_tokens": 64, "max_model_len": 128, **sizes}
    return wrap(tiny_hybrid(name), head, **options)


def texts(completions: Any, prompts: Any) -> list[list[int]]:
    return [prompt + list(done.token_ids) for prompt, done in zip(prompts, completions, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n not in CROWDED)) for n in TYPES])
@pytest.mark.thorough
def test_a_crowd_on_few_rows_and_pages_says_what_transformers_says(name: str) -> None:
    wrapped = served(name, prompts=CROWD, max_num_batched_tokens=12, kv_cache_tokens=84)
    params = [SamplingParams(NEW, num_speculative_tokens=k) for k in (None, 0, 2, 1, None)]
    right = [greedy_text(name, prompt, NEW) for prompt in CROWD]
    assert texts(wrapped.generate(CROWD, params), CROWD) == right
    assert wrapped.engine_stats.preemptions > 0 and free_everywhere(wrapped)
    assert texts(wrapped.generate(CROWD[::-1], params), CROWD[::-1]) == right[::-1]  # on slots that were used
    assert wrapped.self_test_error < 1e-4


@pytest.mark.parametrize(("name", "setting"), settings())
@pytest.mark.thorough
def test_every_setting_says_what_transformers_says(name: str, setting: str) -> None:
    wrapped = served(name, **SETTINGS[setting])
    assert str(wrapped.twin) == "exact"
    completions = wrapped.generate(PROMPTS, SamplingParams(NEW))
    assert texts(completions, PROMPTS) == [greedy_text(name, prompt, NEW) for prompt in PROMPTS]
    rounds = [len(done.stats.rounds) for done in completions]
    if SETTINGS[setting]["drafts"]:
        assert sum(rounds) < 0.8 * 3 * NEW  # drafts are accepted
        assert any(r.accepted < r.drafted for done in completions for r in done.stats.rounds)  # and rejected
    if setting == "few pages":
        assert wrapped.engine_stats.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("nemotron_h", marks=pytest.mark.long)])
@pytest.mark.thorough
def test_a_sampled_request_says_the_same_alone_and_in_a_batch(name: str) -> None:
    params = [SamplingParams(16, temperature=1.0, top_p=0.9, seed=seed) for seed in range(len(PROMPTS))]
    wrapped = served(name)
    together = [list(done.token_ids) for done in wrapped.generate(PROMPTS, params)]
    alone = [list(wrapped.generate(p, own)[0].token_ids) for p, own in zip(PROMPTS, params, strict=True)]
    assert together == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", PURE)
@pytest.mark.cases(1)
def test_a_model_without_attention_has_no_cache(name: str) -> None:
    wrapped = served(name, drafts=0)
    facts = wrapped.describe()
    assert facts["kv_cache"] == {"target": "none: no layer attends"}
    assert facts["num_layers"] == 4 and facts["recurrent"]["row_bytes"] > 0
