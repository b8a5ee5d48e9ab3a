"""Layers with a sliding window in a cache group of their own: the same tokens and drafts, from far less memory."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from fakes import TINY, VOCAB, enlarge, free_everywhere, launch_ahead, random_prompts, scheduler_of, table_head, wrap
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attention.cache.pages import NULL_PAGE
from attention.cache.windowed import WindowedTables
from specdec.errors import CacheTooSmallError
from specdec.loading.groups import Rows
from specdec.requests.sampling import SamplingParams

WINDOW, LONGEST = 20, 640
MIXED = ["sliding_attention"] * 3 + ["full_attention"]
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default"}}
KINDS: dict[str, dict[str, Any]] = {"gemma3_text": {"query_pre_attn_scalar": 20}, "gemma2": {}, "gpt_oss": MOE}
PROMPTS = random_prompts((5, 330, 1, 170, 60, 9))
SIZES: dict[str, Any] = {"kv_cache_tokens": 2400, "max_num_batched_tokens": 60, "num_speculative_tokens": 3}


@functools.cache
def _built(kind: str) -> PreTrainedModel:
    sizes = TINY | {"vocab_size": VOCAB, "max_position_embeddings": LONGEST, "layer_types": MIXED}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, sliding_window=WINDOW, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config).eval()
    enlarge(model)
    return model


def mixed(kind: str = "gemma3_text") -> PreTrainedModel:
    """Three layers with a window of 20 tokens, then one without."""
    return copy.deepcopy(_built(kind))


def params(new: int = 40) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=new, return_drafts=True, temperature=0.8 * (i % 3 == 2), seed=i)
            for i in range(len(PROMPTS))]  # fmt: skip


def lived(completions: list[Any]) -> list[Any]:
    return [(c.token_ids, c.drafts, c.stats.rounds) for c in completions]


@functools.cache
def _undivided(kind: str) -> list[Any]:
    model = mixed(kind)
    whole = wrap(model, table_head(model), hybrid_kv_cache=False, **SIZES)
    assert len(whole.runners) == 2 and not whole.config.windowed
    return lived(whole.generate(PROMPTS, params()))


def freed_pages(wrapped: Any) -> int:
    """Pages behind windows of rows that run now."""
    found = 0
    for tables in scheduler_of(wrapped).windowed_pages:
        for row in tables.table:
            last = int(np.flatnonzero(row != NULL_PAGE).max(initial=-1))
            found += int((row[: last + 1] == NULL_PAGE).sum())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ahead"),
    [
        ("gemma3_text", True),
        pytest.param("gemma3_text", False, marks=pytest.mark.long),
        ("gpt_oss", True),
        ("gemma2", False),
    ],
)
def test_tokens_drafts_and_rounds_are_those_of_one_group(kind: str, ahead: bool) -> None:
    model = mixed(kind)
    wrapped = wrap(model, table_head(model), **SIZES)
    launch_ahead(wrapped, ahead)
    (pool,) = wrapped.config.windowed
    assert pool.window == WINDOW and pool.num_pages < wrapped.config.num_pages / 3
    most = 0
    stream = wrapped.stream(PROMPTS, params())
    completions: dict[int, Any] = {}
    for update in stream:
        most = max(most, freed_pages(wrapped))
        if update.completion is not None:
            completions[update.index] = update.completion
    assert most > 60, "the row of 330 tokens alone has more than 70 pages of four behind its window"
    assert lived([completions[i] for i in sorted(completions)]) == _undivided(kind)
    assert free_everywhere(wrapped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "layout"),
    [(3, "HND"), (1, "NHD"), (16, "HND"), pytest.param(16, "NHD", marks=pytest.mark.long)],
)
def test_other_pages_and_preemption(page_size: int, layout: str) -> None:
    """A cache in which two rows of three must wait, in every order of a page."""
    model = mixed()
    tight = SIZES | {"kv_cache_tokens": 420, "page_size": page_size, "kv_cache_layout": layout}
    wrapped = wrap(model, table_head(model), **tight)
    assert scheduler_of(wrapped).windowed_pages
    assert lived(wrapped.generate(PROMPTS, params())) == _undivided("gemma3_text")
    assert free_everywhere(wrapped)


@pytest.mark.slow
def test_rows_are_preempted_for_pages_of_the_windowed_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of 21 pages, of which four rows that decode need up to 28."""
    monkeypatch.setattr(Rows, "tokens", lambda *args: 84)
    model, prompts, sizes = mixed(), random_prompts((5, 6, 7, 9)), SIZES | {"max_num_seqs": 4}
    whole, wrapped = (wrap(model, table_head(model), hybrid_kv_cache=hybrid, **sizes) for hybrid in (False, True))
    (pool,) = wrapped.config.windowed
    assert pool.num_pages == 22 and wrapped.config.num_pages == 601
    asked = params()[:4]
    assert lived(wrapped.generate(prompts, asked)) == lived(whole.generate(prompts, asked))
    assert wrapped.engine_stats.preemptions > 0 == whole.engine_stats.preemptions and free_everywhere(wrapped)


@pytest.mark.slow
def test_without_a_head() -> None:
    model = mixed()
    sizes = SIZES | {"num_speculative_tokens": 0}
    whole, wrapped = wrap(model, hybrid_kv_cache=False, **sizes), wrap(model, **sizes)
    assert lived(whole.generate(PROMPTS, params())) == lived(wrapped.generate(PROMPTS, params()))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_freeing_too_early_changes_tokens(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: by one token, and by the tokens that were launched instead of those that were committed."""
    plain = WindowedTables.free_behind
    monkeypatch.setattr(
        WindowedTables, "free_behind", lambda self, rows, computed: plain(self, rows, computed + tokens)
    )
    model = mixed()
    assert lived(wrap(model, table_head(model), **SIZES).generate(PROMPTS, params())) != _undivided("gemma3_text")


def test_facts_name_the_groups() -> None:
    facts = wrap(mixed(), **SIZES | {"num_speculative_tokens": 0}).describe()
    assert facts["kv_cache"]["target"].startswith("layers 3: 2,400 tokens in float32")
    tokens = int(facts["kv_cache"]["target, window 20"].removeprefix("layers 0,1,2: ").split()[0].replace(",", ""))
    assert 192 <= tokens < 400 and facts["num_layers"] == 4
    assert facts["attention"].keys() == {"target", "target, window 20"}
    assert facts["engine"]["windowed"] == ((20, tokens // 4 + 1),)


@pytest.mark.slow
def test_rows_that_no_window_hides_anything_of_need_no_group() -> None:
    assert wrap(mixed(), max_model_len=WINDOW, max_num_batched_tokens=24).config.windowed == ()
    assert len(wrap(mixed(), max_model_len=WINDOW + 1, max_num_batched_tokens=24).config.windowed) == 1


def test_a_request_longer_than_the_first_group_is_refused() -> None:
    wrapped = wrap(mixed(), **SIZES | {"kv_cache_tokens": 200, "num_speculative_tokens": 0})
    with pytest.raises(CacheTooSmallError, match="need 211 cache places; the KV cache has 200"):
        wrapped.generate([PROMPTS[3]], SamplingParams(max_new_tokens=41))
