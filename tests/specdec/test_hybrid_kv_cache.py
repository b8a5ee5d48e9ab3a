"""Layers with a sliding window, or in chunks, in a cache group of their own: the same tokens and drafts, from far less
memory."""

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
from attention.spec import Reach
from specdec.errors import CacheTooSmallError
from specdec.loading.sizes import Rows
from specdec.requests.sampling import SamplingParams

WINDOW, CHUNK, LONGEST = 20, 48, 640
MIXED = ["sliding_attention"] * 3 + ["full_attention"]
NEAR = {"layer_types": MIXED, "sliding_window": WINDOW}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default"}}
LLAMA4 = {
    "attention_chunk_size": CHUNK,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 48,
    "attn_scale": 2.0,
    "floor_scale": 16,
}
KINDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {**NEAR, "query_pre_attn_scalar": 20},
    "gemma2": NEAR,
    "gpt_oss": {**NEAR, **MOE},
    "llama4_text": LLAMA4,
}
PROMPTS = random_prompts((5, 330, 1, 170, 60, 9))
SIZES: dict[str, Any] = {"kv_cache_tokens": 2400, "max_num_batched_tokens": 60, "num_speculative_tokens": 3}


@functools.cache
def _built(kind: str) -> PreTrainedModel:
    sizes = TINY | {"vocab_size": VOCAB, "max_position_embeddings": LONGEST}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config).eval()
    enlarge(model)
    return model


def mixed(kind: str = "gemma3_text") -> PreTrainedModel:
    """Three layers with a window of 20 tokens, or in chunks of 48, then one that sees all."""
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
        pytest.param("gpt_oss", True, marks=pytest.mark.long),
        pytest.param("gemma2", False, marks=pytest.mark.long),
        pytest.param("llama4_text", True, marks=pytest.mark.long),
        ("llama4_text", False),
    ],
)
@pytest.mark.thorough
def test_tokens_drafts_and_rounds_are_those_of_one_group(kind: str, ahead: bool) -> None:
    model = mixed(kind)
    wrapped = wrap(model, table_head(model), **SIZES)
    launch_ahead(wrapped, ahead)
    (pool,) = wrapped.config.windowed
    assert pool.reach == (Reach(CHUNK, CHUNK) if kind == "llama4_text" else Reach(WINDOW))
    assert pool.num_pages < wrapped.config.num_pages / 3
    most = 0
    stream = wrapped.stream(PROMPTS, params())
    completions: dict[int, Any] = {}
    for update in stream:
        most = max(most, freed_pages(wrapped))
        if update.completion is not None:
            completions[update.index] = update.completion
    assert most > 60, "the row of 330 tokens alone has more than 70 pages of four behind what it sees"
    assert lived([completions[i] for i in sorted(completions)]) == _undivided(kind)
    assert free_everywhere(wrapped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "layout", "kind"),
    [
        *((3, "HND", "gemma3_text"), (16, "NHD", "llama4_text")),
        pytest.param(1, "NHD", "gemma3_text", marks=pytest.mark.long),
        pytest.param(16, "HND", "gemma3_text", marks=pytest.mark.long),
        pytest.param(16, "NHD", "gemma3_text", marks=pytest.mark.long),
        pytest.param(3, "HND", "llama4_text", marks=pytest.mark.long),
    ],
)
@pytest.mark.thorough
def test_other_pages_and_preemption(page_size: int, layout: str, kind: str) -> None:
    """A cache in which two rows of three must wait, in every order of a page."""
    model = mixed(kind)
    tight = SIZES | {"kv_cache_tokens": 420, "page_size": page_size, "kv_cache_layout": layout}
    wrapped = wrap(model, table_head(model), **tight)
    assert scheduler_of(wrapped).windowed_pages
    assert lived(wrapped.generate(PROMPTS, params())) == _undivided(kind)
    assert free_everywhere(wrapped)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3_text", "llama4_text"])
@pytest.mark.thorough
def test_rows_are_preempted_for_pages_of_the_windowed_group(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of 21 pages, of which four rows that decode need up to 28, in chunks more."""
    monkeypatch.setattr(Rows, "tokens", lambda *args: 84)
    model, prompts, sizes = mixed(kind), random_prompts((5, 6, 7, 9)), SIZES | {"max_num_seqs": 4}
    whole, wrapped = (wrap(model, table_head(model), hybrid_kv_cache=hybrid, **sizes) for hybrid in (False, True))
    (pool,) = wrapped.config.windowed
    assert pool.num_pages == 22 and wrapped.config.num_pages == 601
    asked = params()[:4]
    assert lived(wrapped.generate(prompts, asked)) == lived(whole.generate(prompts, asked))
    assert wrapped.engine_stats.preemptions > 0 == whole.engine_stats.preemptions and free_everywhere(wrapped)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("gemma3_text", marks=pytest.mark.long), "llama4_text"])
@pytest.mark.thorough
def test_without_a_head(kind: str) -> None:
    model = mixed(kind)
    sizes = SIZES | {"num_speculative_tokens": 0}
    whole, wrapped = wrap(model, hybrid_kv_cache=False, **sizes), wrap(model, **sizes)
    assert lived(whole.generate(PROMPTS, params())) == lived(wrapped.generate(PROMPTS, params()))


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_freeing_too_early_changes_tokens(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: by one token, and by the tokens that were launched instead of those that were committed."""
    plain = WindowedTables.free_behind
    monkeypatch.setattr(
        WindowedTables, "free_behind", lambda self, rows, computed: plain(self, rows, computed + tokens)
    )
    model = mixed()
    assert lived(wrap(model, table_head(model), **SIZES).generate(PROMPTS, params())) != _undivided("gemma3_text")


@pytest.mark.long
def test_freeing_a_page_of_the_chunk_changes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the first page of the chunk goes with those before it; the one that the next query writes to stays."""
    free, seen = WindowedTables.free_behind, Reach.first_seen

    def too_early(self: WindowedTables, rows: np.ndarray, computed: np.ndarray) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Reach, "first_seen", lambda reach, at: np.minimum(seen(reach, at) + self.page_size, at))
            free(self, rows, computed)

    monkeypatch.setattr(WindowedTables, "free_behind", too_early)
    model = mixed("llama4_text")
    assert lived(wrap(model, table_head(model), **SIZES).generate(PROMPTS, params())) != _undivided("llama4_text")


@pytest.mark.slow
def test_a_row_holds_its_chunk_and_no_more() -> None:
    """330 tokens and 38 more on pages of four: 92 pages in the layer that sees all, and at most 14 in those that attend
    in chunks of 48, which in one group would have 92, too."""
    wrapped = wrap(mixed("llama4_text"), **SIZES | {"num_speculative_tokens": 0, "enable_prefix_caching": False})
    held = [(wrapped.usage().target_pages, wrapped.usage().windowed_pages)
            for update in wrapped.stream([PROMPTS[1]], params(40)[:1]) if update.completion is None]  # fmt: skip
    assert len(held) >= 38 and max(pages for pages, _ in held) == 92
    assert max(near for _, near in held) <= 14 and min(near for _, near in held) == 1, "a chunk has just begun"


def test_facts_name_the_groups() -> None:
    facts = wrap(mixed(), **SIZES | {"num_speculative_tokens": 0}).describe()
    assert facts["kv_cache"]["target"].startswith("layers 3: 2,400 tokens in float32")
    tokens = int(facts["kv_cache"]["target, window 20"].removeprefix("layers 0,1,2: ").split()[0].replace(",", ""))
    assert 192 <= tokens < 400 and facts["num_layers"] == 4
    assert facts["attention"].keys() == {"target", "target, window 20"}
    assert facts["engine"]["windowed"] == (("window 20", tokens // 4 + 1),)


@pytest.mark.slow
def test_facts_name_groups_in_chunks() -> None:
    facts = wrap(mixed("llama4_text"), **SIZES | {"num_speculative_tokens": 0}).describe()
    assert facts["kv_cache"]["target"].startswith("layers 3: 2,400 tokens in float32")
    tokens = int(facts["kv_cache"]["target, chunks of 48"].removeprefix("layers 0,1,2: ").split()[0].replace(",", ""))
    assert 192 <= tokens < 400 and facts["engine"]["windowed"] == (("chunks of 48", tokens // 4 + 1),)
    assert facts["attention"]["target, chunks of 48"].endswith("in chunks of 48 tokens")


@pytest.mark.slow
def test_rows_that_no_window_hides_anything_of_need_no_group() -> None:
    assert wrap(mixed(), max_model_len=WINDOW, max_num_batched_tokens=24).config.windowed == ()
    assert len(wrap(mixed(), max_model_len=WINDOW + 1, max_num_batched_tokens=24).config.windowed) == 1


def test_a_request_longer_than_the_first_group_is_refused() -> None:
    wrapped = wrap(mixed(), **SIZES | {"kv_cache_tokens": 200, "num_speculative_tokens": 0})
    with pytest.raises(CacheTooSmallError, match="need 211 cache places; the KV cache has 200"):
        wrapped.generate([PROMPTS[3]], SamplingParams(max_new_tokens=41))
