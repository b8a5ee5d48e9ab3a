"""cascade_attention: off unless asked for; refused by name where it cannot be done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import backend_of_ours, count_calls, eagle3_head, random_prompts, tiny_llama, wrap

from attention.backends.flashinfer.backend import FlashInferBackend
from attention.backends.reference import TorchBackend
from attention.cache.kv_cache import FP8, CacheGroup, KVFormat
from attention.spec import AttentionSpec
from specdec import InvalidInputError
from specdec.loading.assembly import choose_cascade
from specdec.requests.sampling import SamplingParams
from tests.attention.cascade.two_levels import CascadingBackend, PrefixLevel

CPU = torch.device("cpu")
PLAIN = AttentionSpec(32, 8, 128, 128, 1.0)


class Cascading(TorchBackend):
    """The reference, with the interface of a backend that attends shared pages once."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.asked = 0

    def cascade(self) -> None:
        self.asked += 1


def test_only_where_it_is_asked_for() -> None:
    backend = Cascading()
    assert choose_cascade(backend, "on", False) == "off: cascade_attention=False" and backend.asked == 0
    assert choose_cascade(backend, "on", True) == "on" and backend.asked == 1


@pytest.mark.parametrize(
    ("backend", "caching", "reason"),
    [
        (TorchBackend(CPU), "on", "backend 'torch' attends every row by itself; give backend='flashinfer'"),
        (
            Cascading(),
            "off: enable_prefix_caching=False",
            "requests share no pages, because prefix caching is off: enable_prefix_caching=False; give False",
        ),
    ],
)
def test_where_it_is_refused(backend: Any, caching: str, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=f"cascade_attention=True: {reason}"):
        choose_cascade(backend, caching, True)
    assert choose_cascade(backend, caching, False) == "off: cascade_attention=False"
    assert getattr(backend, "asked", 0) == 0


def test_the_state_is_told() -> None:
    off = "off: cascade_attention=False"
    assert wrap(tiny_llama()).describe()["cascade_attention"] == off
    with pytest.raises(InvalidInputError, match="attends every row by itself"):
        wrap(tiny_llama(), cascade_attention=True)
    with pytest.raises(InvalidInputError, match="cascade_attention='auto': allowed are"):
        wrap(tiny_llama(), cascade_attention="auto")
    with backend_of_ours(Cascading()):
        assert wrap(tiny_llama()).describe()["cascade_attention"] == off
        assert wrap(tiny_llama(), cascade_attention=True).describe()["cascade_attention"] == "on"


@pytest.mark.parametrize(
    ("options", "format", "words"),
    [
        ({}, KVFormat(), "cascade over shared pages from 4 rows on, where it pays"),
        ({}, KVFormat(FP8), "no cascade: an 8-bit cache"),
        ({"window": 100}, KVFormat(), "no cascade: a sliding window"),
        ({"has_sinks": True}, KVFormat(), "no cascade: attention sinks"),
        ({"softcap": 30.0}, KVFormat(), "no cascade: a softcap"),
        ({"chunk_size": 512}, KVFormat(), "no cascade: attention in chunks"),
        ({"value_in_key": True}, KVFormat(), "no cascade: MLA"),
        ({"head_dim_k": 256, "head_dim_v": 256}, KVFormat(), "no cascade: rows with head dim 256 are not packed here"),
        ({"head_dim_k": 80, "head_dim_v": 80}, KVFormat(), "no cascade: rows with head dim 80 are not packed here"),
    ],
)
def test_the_route_names_the_limits(
    options: dict[str, Any], format: KVFormat, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    key = replace(PLAIN, **options)
    group, backend = CacheGroup("g", (key,), 4, 16, "NHD", format), FlashInferBackend(CPU)
    assert "cascade" not in backend.route(group, key, torch.bfloat16)
    backend.cascade()
    assert backend.route(group, key, torch.bfloat16).endswith(words)


@pytest.mark.slow
def test_requests_that_share_pages_say_what_they_say_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Target and head in two levels, by the reference: prompts beside rows that decode, tokens and drafts unchanged."""
    model, (prefix,) = tiny_llama(), random_prompts((21,), seed=5)
    prompts = [prefix + own for own in random_prompts((5, 1, 9, 2), seed=3)]
    params = SamplingParams(max_new_tokens=12, return_drafts=True)
    levels, said = count_calls(monkeypatch, PrefixLevel, "__init__"), []
    for cascades in (False, True):
        with backend_of_ours(CascadingBackend(CPU) if cascades else TorchBackend(CPU)):
            wrapped = wrap(model, eagle3_head(model, draft_vocab_size=32), num_speculative_tokens=3)
        wrapped.generate(prefix, SamplingParams(max_new_tokens=1))
        before = len(levels)
        said.append([(c.token_ids, c.drafts, c.stats.rounds) for c in wrapped.generate(prompts, params)])
        assert (len(levels) - before > 20) == cascades
    assert said[0] == said[1]
