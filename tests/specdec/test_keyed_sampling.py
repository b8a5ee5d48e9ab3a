"""Sampled tokens with `sampling="keyed"` are those of K = 0, whatever drafts, in any company, with every option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fakes import random_prompts, table_head, tiny_llama, wrap

from specdec import SpeculativeModel
from specdec.acceptance import judge
from specdec.requests import noise
from specdec.requests.grammar import Grammar
from specdec.requests.sampling import SamplingParams
from specdec.rounds.randomness import Role, SamplingRound, position_bits
from tests.drafters.test_conformance import PROMPTS
from tests.drafters.test_sampled_drafts import PARAMS
from tests.hybrids import RecallHead, tiny_hybrid
from tests.specdec.test_hybrid_kv_cache import mixed

KEYED = {"sampling": "keyed"}


def tokens_of(wrapped: Any, prompts: Any = PROMPTS, params: Any = PARAMS) -> list[list[int]]:
    return [list(c.token_ids) for c in wrapped.generate(prompts, params)]


MANY = [
    replace(PARAMS[i % 6], max_new_tokens=24, return_drafts=False, seed=i, num_speculative_tokens=None)
    for i in range(12)
]


TYPES: dict[str, Callable[[], Any]] = {
    "llama": tiny_llama,
    "gemma3_text": partial(mixed, "gemma3_text"),
    "qwen3_next": partial(tiny_hybrid, "qwen3_next"),
    "mamba2": partial(tiny_hybrid, "mamba2"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=pytest.mark.thorough) for name in TYPES]
)
def test_k_company_and_kind_of_drafts_change_no_token(name: str) -> None:
    model, prompts = TYPES[name](), random_prompts([5 + 3 * i for i in range(12)])
    sizes: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 5, "max_num_batched_tokens": 40, **KEYED}
    right = tokens_of(wrap(model, **sizes), prompts, MANY)
    alone = wrap(model, **sizes | {"max_num_seqs": 1})
    assert [tokens_of(alone, [p], [own])[0] for p, own in zip(prompts[:3], MANY[:3], strict=True)] == right[:3]
    whole = [p + t for p, t in zip(prompts, right, strict=True)]
    head = table_head(model) if name in ("llama", "gemma3_text") else RecallHead(whole, 0.6)
    for k in (1, 5):
        assert tokens_of(wrap(model, head, num_speculative_tokens=k, **sizes), prompts, MANY) == right
    assert tokens_of(wrap(model, "lookup", num_speculative_tokens=4, lookup_min=1, **sizes), prompts, MANY) == right


@pytest.mark.slow
def test_options_of_logits_come_before_the_noise() -> None:
    model, prompts = tiny_llama(), random_prompts([9, 14, 6, 11])
    asked = [
        replace(MANY[0], repetition_penalty=1.4),
        replace(MANY[1], bad_words_ids=[[3], [8, 9]], min_new_tokens=9),
        replace(MANY[2], logprobs=2, n=1),
        replace(MANY[4], frequency_penalty=0.5, stop_token_ids=(61,)),
    ]
    sizes: dict[str, Any] = {"max_model_len": 96, **KEYED}
    right = wrap(model, **sizes).generate(prompts, asked)
    found = wrap(model, table_head(model), num_speculative_tokens=3, **sizes).generate(prompts, asked)
    assert [c.token_ids for c in found] == [c.token_ids for c in right]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_built_in_pair_says_the_same_with_every_k_and_with_grammars() -> None:
    asked = [
        SamplingParams(32, temperature=(0.3, 0.7, 1.0, 0.0)[i % 4], top_p=(1.0, 0.9)[i // 4 % 2], seed=i)
        for i in range(12)
    ]
    asked[3:6] = [replace(own, grammar=Grammar.regex("[a-z ]{20,60}[.]"), temperature=0.8) for own in asked[3:6]]
    questions = [
        [{"role": "user", "content": f"Tom has {i} boxes of {3 + i % 9} eggs. How many eggs?"}] for i in range(12)
    ]
    found = []
    for k in (0, 1, 5):
        with SpeculativeModel.from_pretrained(
            "gsm-llama", "auto" if k else None, max_num_seqs=5, **KEYED, **({"num_speculative_tokens": k} if k else {})
        ) as model:
            found.append([c.token_ids for c in model.generate(questions, asked)])
    assert found[0] == found[1] == found[2] and len({tuple(tokens) for tokens in found[0]}) == 12


@pytest.mark.slow
def test_samples_of_one_prompt_differ_and_repeat() -> None:
    model = tiny_llama()
    own = SamplingParams(max_new_tokens=12, temperature=1.0, n=4, seed=5)
    heads = (wrap(model, table_head(model), num_speculative_tokens=k, **KEYED) for k in (2, 4))
    found = [tokens_of(wrapped, PROMPTS[:1], own) for wrapped in heads]
    assert found[0] == found[1] and len({tuple(tokens) for tokens in found[0]}) == 4


def row_in_the_key(self: SamplingRound, places: int) -> np.ndarray:
    rows = np.arange(len(self.first), dtype=np.uint64)[:, None]
    return position_bits(rows, self.first[:, None] + np.arange(places), Role.TOKEN).view(np.int64)


@pytest.mark.slow
def test_planted_defects_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's number in the key changes tokens; other noise for a draft than for its token costs acceptance alone."""
    model, prompts = tiny_llama(), random_prompts([5 + 3 * i for i in range(12)])
    sizes: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 5, "max_num_batched_tokens": 40, **KEYED}

    def rounds(**options: Any) -> tuple[list[list[int]], int]:
        wrapped = wrap(model, table_head(model), num_speculative_tokens=3, **sizes, **options)
        return tokens_of(wrapped, prompts, MANY), wrapped.engine_stats.rounds

    right, few = rounds()
    with monkeypatch.context() as patched:
        patched.setattr(judge, "choose_keyed", lambda sampling, rows, ids: own_noise(sampling, rows))
        patched.setattr("specdec.execution.eager.choose_keyed", lambda sampling, rows, ids: own_noise(sampling, rows))
        tokens, many = rounds()
        assert tokens == right and many > 1.05 * few
    monkeypatch.setattr(SamplingRound, "seeds", row_in_the_key)
    assert rounds()[0] != tokens_of(wrap(model, **sizes), prompts, MANY)


def own_noise(sampling: Any, rows: int) -> Any:
    tensors = sampling.tensors.rows(torch.arange(rows))

    def choose(step: int, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
        return noise.perturbed(logits, tensors, sampling.seed[:rows, step] + 1).argmax(1), None

    return choose
