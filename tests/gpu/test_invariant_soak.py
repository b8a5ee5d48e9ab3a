"""Requests of random options from eight threads to a batch-invariant model whose cache is too small for all of them:
every token and log-probability has the bits of the same request alone, without drafts."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec import Completion, Handoff, SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.gpu.test_batch_invariant import QUESTIONS, VOCAB, loaded

REQUESTS = 160
SHARED = torch.randint(VOCAB, (96,), generator=torch.Generator().manual_seed(1)).tolist()
"""The beginning of half of the prompts, six pages that the prefix cache keeps."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"repetition_penalty": 1.2, "logit_bias": {7: 3.0, 11: -5.0}},
    {"temperature": 0.9, "typical_p": 0.9},
    {"no_repeat_ngram_size": 2},
    {"prompt_logprobs": 0},
]
DRAFTS = (0, 1, 3, 5)


def asked(number: int, **more: Any) -> SamplingParams:
    options = OPTIONS[number % len(OPTIONS)] | more
    if "temperature" in options:
        options["seed"] = number
    return SamplingParams(max_new_tokens=8 + number % 40, logprobs=number % 3, ignore_eos=True, **options)


def prompt(number: int) -> list[int]:
    own = QUESTIONS[number % len(QUESTIONS)]
    return SHARED + own if number % 2 else own


def bits(completion: Completion) -> Any:
    return completion.token_ids, completion.logprobs, completion.prompt_logprobs


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_eight_threads(kind: str) -> None:
    alone = loaded("batch_invariant", torch.bfloat16, 0, 1, 512, kind, sampling="keyed")
    right = [bits(alone.generate(prompt(n), asked(n))[0]) for n in range(REQUESTS)]
    alone.close()
    caches: dict[str, Any] = {"kv_cache_tokens": 800}
    if kind != "qwen3_next":
        caches["enable_prefix_caching"] = True
    many = loaded("batch_invariant", torch.bfloat16, 5, 12, 200, kind, sampling="keyed", **caches)
    other = loaded("batch_invariant", torch.bfloat16, 5, 4, 100, kind, sampling="keyed")
    order = random.Random(0)

    def ask(number: int) -> Any:
        params = asked(number, num_speculative_tokens=order.choice(DRAFTS))
        if number % 10 == 3:  # it moves to another engine after its first token
            alike = replace(params, logprobs=None, prompt_logprobs=None)
            return moved(many, other, prompt(number), alike).token_ids, *right[number][1:]
        return bits(many.generate(prompt(number), params)[0])

    numbers = [*range(REQUESTS)]
    order.shuffle(numbers)
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(numbers, pool.map(ask, numbers), strict=True))
    wrong = [n for n in range(REQUESTS) if found[n] != right[n]]
    assert not wrong, [(n, OPTIONS[n % len(OPTIONS)], *differing(found[n], right[n])) for n in wrong]
    stats = many.engine_stats
    assert stats.preemptions > 0 and stats.rounds > 0
    many.close()
    other.close()


def differing(found: Any, right: Any) -> list[Any]:
    """The first place of each part that differs, and what is there."""
    parts = zip(("tokens", "logprobs", "prompt"), found, right, strict=True)
    pairs = [(name, zip(own or (), other or (), strict=False)) for name, own, other in parts if own != other]
    return [next(((name, i, a, b) for i, (a, b) in enumerate(each) if a != b), name) for name, each in pairs]


def moved(source: SpeculativeModel, target: SpeculativeModel, ids: list[int], params: SamplingParams) -> Completion:
    (handoff,) = source.prefill([ids], params)
    return target.resume([Handoff.from_bytes(handoff.to_bytes())])[0]
