"""Layers that attend to the keys and values of an earlier one (Gemma 3n, Gemma 4): exact past the window, on every
backend that a CPU has, and each layer's cache holds what it attends to."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from fakes import backend_of_ours, eagle3_head, random_prompts, wrap
from transformers import AutoModelForCausalLM, PreTrainedModel

from attention.backends.flex import FlexBackend
from attention.backends.reference import TorchBackend
from attention.hf.probe import probe
from benchmarks.sweep_configs import THRESHOLD, VOCAB, named_cases, tiny_config
from specdec.loading.backends import expected_keys
from specdec.requests.sampling import SamplingParams

CPU = torch.device("cpu")
KINDS = ("gemma3n_text: shared KV", "gemma4_text: shared KV")
BACKENDS = {"torch": TorchBackend, "flex": FlexBackend}
NEW = 12
PROMPTS = random_prompts((THRESHOLD + 9, 5), vocab_size=VOCAB)
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


@cache
def _sharing(kind: str, options: tuple[tuple[str, int], ...]) -> PreTrainedModel:
    (case,) = named_cases((kind,))
    torch.manual_seed(0)
    config = tiny_config(replace(case, options=dict(case.options) | dict(options)))
    return AutoModelForCausalLM.from_config(config).eval()


def sharing(kind: str, **options: int) -> PreTrainedModel:
    """A tiny model of four layers, of which the last two share."""
    return copy.deepcopy(_sharing(kind, tuple(options.items())))


def sources(model: PreTrainedModel) -> dict[int, int]:
    """Each sharing layer, and the one that it shares with: the last of its type that has keys of its own."""
    config: Any = model.config.get_text_config()
    first = config.num_hidden_layers - config.num_kv_shared_layers
    types = config.layer_types
    return {
        layer: max(n for n in range(first) if types[n] == types[layer])
        for layer in range(first, config.num_hidden_layers)
    }


def right(model: PreTrainedModel) -> list[list[int]]:
    """transformers' own greedy tokens."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "drafts", "backend"),
    [
        pytest.param(kind, drafts, backend, marks=[pytest.mark.long] * (drafts == 0 or (i + k) % 2 == 0))
        for i, kind in enumerate(KINDS)
        for j, drafts in enumerate((0, 3))
        for k, backend in enumerate(("torch", "flex"))
    ],
)
@pytest.mark.thorough
def test_tokens_are_the_models_own(kind: str, drafts: int, backend: str) -> None:
    model = sharing(kind)
    expected = right(model)
    with backend_of_ours(BACKENDS[backend](CPU)):
        wrapped = wrap(model, eagle3_head(model) if drafts else None, num_speculative_tokens=drafts)
        assert [c.token_ids for c in wrapped.generate(PROMPTS, PARAMS)] == expected


def test_the_configuration_of_layers_that_differ_is_left_to_the_model() -> None:
    """transformers (5.23) refuses to say one head dim for Gemma 4, whose layers have two."""
    expected_keys(sharing(KINDS[1], head_dim=16, global_head_dim=32).config)
    specs = probe(sharing(KINDS[1], head_dim=16, global_head_dim=32)).calls
    assert {call.attention_spec.head_dim_k for call in specs} == {16, 32}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.cases(1)
def test_a_sharing_layer_caches_what_it_attends_to(kind: str) -> None:
    model = sharing(kind)
    wrapped = wrap(model, hybrid_kv_cache=False)
    wrapped.generate(PROMPTS, PARAMS)
    layers = wrapped.runners[0].layers
    shared = sources(model)
    assert len(shared) == 2
    for layer, source in shared.items():
        assert torch.equal(layers[layer].keys, layers[source].keys) and bool(layers[source].keys.any())
        assert torch.equal(layers[layer].values, layers[source].values)
    assert not torch.equal(layers[0].keys, layers[1].keys)
