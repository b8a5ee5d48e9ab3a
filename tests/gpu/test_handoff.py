"""Requests that move between models on GPUs: the same tokens and drafts, from graphs and without, by any transport."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import free_everywhere

from specdec import Handoff, SamplingParams, SpeculativeModel
from specdec.loading.builtin import builtin_names
from tests.public.test_handoff import PAIRS, PROMPTS, lived

pytestmark = pytest.mark.skipif("gsm-deepseek" not in builtin_names(), reason="no built-in targets")
SIZES: dict[str, Any] = {
    "num_speculative_tokens": 4,
    "max_num_seqs": 8,
    "max_model_len": 512,
    "kv_cache_tokens": 8192,
    "device": "cuda",
}
GREEDY = SamplingParams(max_new_tokens=48, return_drafts=True)
PARAMS = [GREEDY, replace(GREEDY, temperature=1.0, seed=7), replace(GREEDY, temperature=0.7, top_p=0.9, seed=8)]
FLOAT32: dict[str, Any] = {"dtype": "float32", "backend": "torch"}
GRAPHS: dict[str, Any] = {"dtype": "bfloat16", "cuda_graphs": True}


def load(name: str, **options: Any) -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(name, PAIRS[name], **SIZES | options)


def moved(p: SpeculativeModel, d: SpeculativeModel, params: list[SamplingParams]) -> list[Any]:
    """One request at a time, so that every round has the shape that it has without the move."""
    found = []
    for prompt, own in zip(PROMPTS, params, strict=True):
        found += d.resume([Handoff.from_bytes(h.to_bytes()) for h in p.prefill(prompt, own)])
    assert free_everywhere(p) and free_everywhere(d)
    return found


def alone(model: SpeculativeModel, params: list[SamplingParams]) -> list[Any]:
    return [model.generate(prompt, own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]


@pytest.mark.parametrize("name", PAIRS)
def test_in_float32_tokens_and_drafts_are_the_same(name: str) -> None:
    with load(name, **FLOAT32) as stays, load(name, **FLOAT32) as p, load(name, **FLOAT32, kv_cache_tokens=4096) as d:
        assert lived(moved(p, d, PARAMS)) == lived(alone(stays, PARAMS))
        busy = d.stream(PROMPTS, PARAMS)
        next(busy)
        assert lived(d.resume(p.prefill(PROMPTS, PARAMS))) == lived(stays.generate(PROMPTS, PARAMS))
        busy.close()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", PAIRS)
def test_from_graphs_the_moved_request_is_the_same(name: str, layout: str) -> None:
    """The same kernels on the same shapes, so the same bits, but for a prompt that autotuning may read otherwise."""
    options = GRAPHS | {"kv_cache_layout": layout}
    with load(name, **options) as stays, load(name, **options) as p, load(name, **options) as d:
        expected, found = alone(stays, PARAMS), moved(p, d, PARAMS)
        same = sum(a == b for a, b in zip(lived(found), lived(expected), strict=True))
        assert same >= len(expected) - 1
        rounds = d.engine_stats.rounds
        (completion,) = d.resume(p.prefill(PROMPTS[0], GREEDY))
        assert d.engine_stats.rounds - rounds <= len(completion.stats.rounds) + 1  # one may be launched ahead in vain


def test_batch_invariant_tokens_keep_their_bits_beside_others() -> None:
    options = {"dtype": "bfloat16", "backend": "batch_invariant"}
    with load("gsm-llama", **options) as stays, load("gsm-llama", **options) as p, load("gsm-llama", **options) as d:
        busy = d.stream(PROMPTS, GREEDY)
        next(busy)
        found = d.resume(p.prefill(PROMPTS, GREEDY))
        assert [c.token_ids for c in found] == [c.token_ids for c in stays.generate(PROMPTS, GREEDY)]
        busy.close()


@pytest.mark.parametrize("transport", ["sockets", "nixl"])
def test_over_other_transports(transport: str) -> None:
    if transport == "nixl" and importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed: pip install 'specdec-hf[transfer]'")
    with load("gsm-llama", **FLOAT32) as stays, load("gsm-llama", **FLOAT32) as p, load("gsm-llama", **FLOAT32) as d:
        p.open_transfer(transport)
        d.open_transfer(transport)
        assert lived(d.resume(p.prefill(PROMPTS, PARAMS))) == lived(stays.generate(PROMPTS, PARAMS))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_between_two_gpus() -> None:
    there = {**FLOAT32, "device": "cuda:1"}
    with load("gsm-llama", **FLOAT32) as stays, load("gsm-llama", **FLOAT32) as p, load("gsm-llama", **there) as d:
        assert lived(d.resume(p.prefill(PROMPTS, PARAMS))) == lived(stays.generate(PROMPTS, PARAMS))
