"""Requests that begin alike share pages: tokens and draft ids are the same, and all that is there is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import (
    TINY,
    count_calls,
    eagle3_head,
    enlarge,
    free_everywhere,
    hf_greedy,
    random_prompts,
    table_head,
    tiny_llama,
    wrap,
    wrong_rounds,
)
from transformers import AutoConfig, AutoModelForCausalLM

from attention.cache.prefix import PrefixCache
from drafters.base import Head
from specdec import SpeculativeModel
from specdec.cli.tables import prompt_tokens
from specdec.errors import InvalidInputError
from specdec.loading.assembly import choose_prefix_caching
from specdec.loading.names import builtin_names
from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import RowTable
from tests.specdec.engine.shared_prompts import expected_hits, five_shots
from tests.specdec.execution.test_graphs import graphs_on_cpu, recorded_on_cpu, with_graphs  # noqa: F401 (fixtures)
from tests.specdec.test_hybrid_kv_cache import LLAMA4

SIZE, NEW = 4, 12
PARAMS = SamplingParams(max_new_tokens=NEW, return_drafts=True)
BEGINNINGS = random_prompts((21, 16), seed=5)
PROMPTS = [
    BEGINNINGS[i % 2][: len(BEGINNINGS[i % 2]) - (i == 5)] + own
    for i, own in enumerate(random_prompts((5, 1, 9, 2, 7, 3, 12), seed=3))
] + BEGINNINGS


def head_of(kind: str) -> Head:
    model = tiny_llama()
    return eagle3_head(model, draft_vocab_size=32) if kind == "eagle3" else table_head(model, aux_layers=(1, 2, 3))


def windowed_target(kind: str = "gemma3_text") -> Any:
    """Three layers with a window of 10 tokens, or in chunks of 12, and one that sees all."""
    torch.manual_seed(0)
    near = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 10}
    layers = near if kind == "gemma3_text" else LLAMA4 | {"attention_chunk_size": 12}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**TINY, **layers})).eval()
    enlarge(model)
    model.generation_config.eos_token_id = None
    return model


def lived(completions: list[Any]) -> list[Any]:
    return [(c.token_ids, c.drafts, c.stats.rounds) for c in completions]


def found_by(completions: list[Any]) -> list[tuple[int, int]]:
    return [(c.stats.prefix_hit_tokens, c.stats.cached_tokens) for c in completions]


SHORT_OF_PAGES = {"kv_cache_tokens": 88, "max_num_seqs": 6, "max_num_batched_tokens": 36}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("table", {"max_num_seqs": 9, "max_num_batched_tokens": 60}, id="all at once"),
        pytest.param("table", {"max_num_batched_tokens": 18}, id="chunks", marks=pytest.mark.long),
        pytest.param("table", {"page_size": 1}, id="pages of one token", marks=pytest.mark.long),
        pytest.param("table", SHORT_OF_PAGES, id="short of pages", marks=pytest.mark.long),
        pytest.param("eagle3", {"max_num_batched_tokens": 18}, id="eagle3, chunks", marks=pytest.mark.long),
        pytest.param("eagle3", SHORT_OF_PAGES, id="eagle3, short of pages", marks=pytest.mark.slow),
    ],
)
@pytest.mark.thorough
def test_tokens_and_drafts_are_the_same_and_the_oracles(kind: str, options: dict[str, int]) -> None:
    head = head_of(kind)
    on, off = (
        wrap(tiny_llama(), head, num_speculative_tokens=5, enable_prefix_caching=use, **options)
        for use in (True, False)
    )
    alone = off.generate(PROMPTS, PARAMS)
    assert [wrong_rounds(head, c) for c in alone] == [[]] * len(PROMPTS)
    for call in range(3):
        completions = on.generate(PROMPTS, PARAMS)
        assert lived(completions) == lived(alone)
        assert free_everywhere(on)
        if not call and "kv_cache_tokens" not in options:
            assert found_by(completions) == expected_hits(PROMPTS, options.get("page_size", SIZE), 1)
    assert on.engine_stats.cached_tokens > 300 and off.engine_stats.prefix_query_tokens == 0
    assert (on.engine_stats.preemptions > 0) == ("kv_cache_tokens" in options)


@pytest.mark.slow
def test_without_drafts_a_page_is_found_whatever_follows() -> None:
    wrapped = wrap(tiny_llama(), head_of("table"), num_speculative_tokens=5, max_num_seqs=9, max_num_batched_tokens=60)
    params = replace(PARAMS, num_speculative_tokens=0)
    completions = wrapped.generate(PROMPTS, params)
    assert found_by(completions) == expected_hits(PROMPTS, SIZE, 0)
    assert [c.token_ids for c in completions] == [hf_greedy(p, NEW) for p in PROMPTS]
    assert found_by(wrapped.generate(PROMPTS[:1], PARAMS)) == [(0, 0)], "no head has read these pages"
    assert found_by(wrapped.generate(PROMPTS[:1], params)) == [(24, 24)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        pytest.param({}, "gemma3_text", id="gemma3_text", marks=pytest.mark.long),
        pytest.param({}, "llama4_text", id="llama4_text", marks=pytest.mark.long),
        pytest.param({"max_num_batched_tokens": 18}, "gemma3_text", id="chunks-gemma3_text", marks=pytest.mark.long),
        pytest.param({"max_num_batched_tokens": 18}, "llama4_text", id="chunks-llama4_text"),
        pytest.param(SHORT_OF_PAGES, "gemma3_text", id="short-gemma3_text"),
        pytest.param(SHORT_OF_PAGES, "llama4_text", id="short-llama4_text", marks=pytest.mark.long),
    ],
)
@pytest.mark.thorough
def test_layers_with_a_window_share_what_it_reaches(options: dict[str, int], kind: str) -> None:
    """Of three layers in four the pages behind a window of 10 tokens, or before a chunk of 12, are freed; all that is
    there is found."""
    model = windowed_target(kind)
    head = table_head(model, aux_layers=(1, 2, 3))
    on, off = (
        wrap(model, head, num_speculative_tokens=3, enable_prefix_caching=use, **options) for use in (True, False)
    )
    assert on.config.windowed and on.describe()["prefix_caching"] == "on"
    expected = lived(off.generate(PROMPTS, PARAMS))
    for call in range(2):
        completions = on.generate(PROMPTS, PARAMS)
        assert lived(completions) == expected
        assert free_everywhere(on)
        if not call and "kv_cache_tokens" not in options:
            assert found_by(completions) == expected_hits(PROMPTS, SIZE, 1)
    assert on.engine_stats.cached_tokens > 200
    assert (on.engine_stats.preemptions > 0) == ("kv_cache_tokens" in options)


@pytest.mark.long
def test_pages_behind_a_window_in_another_order_change_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted defect: of the pages that the window reaches, each holds the keys of another."""
    model, plain = windowed_target(), PrefixCache.register_windowed
    right = wrap(model, enable_prefix_caching=False).generate(PROMPTS, PARAMS)

    def reversed_pages(self: PrefixCache, tokens: Any, group: int, first: int, pages: list[int], long: bool) -> None:
        theirs = [page for page in pages if page]
        plain(self, tokens, group, first, [page and theirs.pop() for page in pages], long)

    monkeypatch.setattr(PrefixCache, "register_windowed", reversed_pages)
    found = wrap(model).generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in found] != [c.token_ids for c in right]


@pytest.mark.slow
def test_a_conversation_finds_its_own_answers() -> None:
    """Pages of generated tokens are found once their request has ended: all but those of its last round."""
    head = head_of("table")
    wrapped = wrap(tiny_llama(), head, num_speculative_tokens=3)
    (first,) = wrapped.generate(PROMPTS[0], replace(PARAMS, max_new_tokens=30))
    said = PROMPTS[0] + first.token_ids
    (second,) = wrapped.generate([*said, 3, 4, 5], PARAMS)
    assert second.stats.cached_tokens >= len(said) - 3 - 1 - 2 * SIZE > len(PROMPTS[0])
    assert second.token_ids == hf_greedy([*said, 3, 4, 5], NEW) and wrong_rounds(head, second) == []


def test_samples_of_one_prompt_read_it_once() -> None:
    wrapped = wrap(tiny_llama(), head_of("table"), num_speculative_tokens=3, max_num_seqs=4)
    params = SamplingParams(max_new_tokens=8, temperature=0.8, seed=3, n=4, return_drafts=True)
    samples = wrapped.generate(PROMPTS[0], params)
    assert found_by(samples) == [(0, 0)] + [(24, 24)] * 3, "26 tokens, the last page of which is not whole"
    alone = wrapped.generate(PROMPTS[0], replace(params, cache_prefix=False))
    assert lived(samples) == lived(alone)


@pytest.mark.slow
def test_the_switch_of_a_request_neither_takes_nor_leaves() -> None:
    wrapped = wrap(tiny_llama(), head_of("table"), num_speculative_tokens=3)
    without = replace(PARAMS, cache_prefix=False)
    for params, cached in ((without, 0), (PARAMS, 0), (without, 0), (PARAMS, 24)):
        (completion,) = wrapped.generate(PROMPTS[0], params)
        assert completion.stats.cached_tokens == cached
    assert wrapped.engine_stats.prefix_query_tokens == 2 * len(PROMPTS[0])
    with pytest.raises(InvalidInputError, match="cache_prefix"):
        SamplingParams(cache_prefix="no")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.thorough
def test_rows_from_graphs_may_list_more_pages_than_there_are(graphs_on_cpu: list[Any]) -> None:  # noqa: F811
    """Eight rows of 26 pages each, 25 of them the same, in a pool of 70."""
    common = random_prompts((100,), seed=5)[0]
    prompts = [common + own for own in random_prompts([3] * 8, seed=6)]
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_tokens": 280}
    graphed = with_graphs(head_of("table"), num_speculative_tokens=3, enable_prefix_caching=True, **sizes)
    graphed.generate(prompts[:1], PARAMS)
    completions = graphed.generate(prompts, PARAMS)
    assert [c.token_ids for c in completions] == [hf_greedy(p, NEW) for p in prompts]
    assert min(c.stats.cached_tokens for c in completions) == 96
    assert all(wrong_rounds(graphed.head, c) == [] for c in completions)
    assert free_everywhere(graphed)


def test_pages_of_an_aborted_request_are_found() -> None:
    wrapped = wrap(tiny_llama(), head_of("table"), num_speculative_tokens=3)
    stream = wrapped.stream(PROMPTS[0], PARAMS)
    next(stream), next(stream)
    stream.close()
    assert free_everywhere(wrapped)
    (completion,) = wrapped.generate(PROMPTS[0], PARAMS)
    assert completion.stats.cached_tokens == 24 and completion.token_ids == hf_greedy(PROMPTS[0], NEW)


@pytest.mark.slow
def test_a_preempted_request_finds_its_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as they were not needed meanwhile; generated ones among them."""
    wrapped = wrap(tiny_llama(), head_of("table"), num_speculative_tokens=3, kv_cache_tokens=88)
    opened = count_calls(monkeypatch, RowTable, "open")
    completions = wrapped.generate(PROMPTS[:3], replace(PARAMS, max_new_tokens=24))
    again = [(len(args[0]), args[7]) for args in opened[3:]]
    assert wrapped.engine_stats.preemptions == len(again) > 0
    assert all(begin % SIZE == 0 and begin < tokens for tokens, begin in again)
    assert any(begin > len(PROMPTS[0]) for _, begin in again)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24) for p in PROMPTS[:3]]


@pytest.mark.slow
def test_new_weights_empty_the_cache() -> None:
    """An optimiser's step and load_state_dict are noticed; what is written through .data needs refresh()."""
    target = tiny_llama()
    wrapped = wrap(target)
    embedding = target.get_input_embeddings().weight
    for change in ("in place", "data"):
        assert wrapped.generate(PROMPTS[0], PARAMS)[0].token_ids == wrapped.generate(PROMPTS[0], PARAMS)[0].token_ids
        assert wrapped.generate(PROMPTS[0], PARAMS)[0].stats.cached_tokens == 24
        with torch.no_grad():
            (embedding if change == "in place" else embedding.data).mul_(1.5)
        if change == "data":
            assert wrapped.generate(PROMPTS[0], PARAMS)[0].stats.cached_tokens == 24, "torch does not count that"
            wrapped.refresh()
        assert wrapped.generate(PROMPTS[0], PARAMS)[0].stats.cached_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("replaced", ["all at once", "one layer", "hooked", "behind it", "forward"])
@pytest.mark.cases(1)
def test_pages_of_weights_that_were_replaced_are_not_found(replaced: str) -> None:
    """Rounds without graphs read what stands in the model now, not the tensors that it was loaded with."""
    target, other = tiny_llama(), tiny_llama(seed=5)
    wrapped = wrap(target)
    wrapped.generate(PROMPTS[0], PARAMS)
    if replaced == "all at once":
        target.load_state_dict(other.state_dict(), assign=True)
    elif replaced == "one layer":
        target.model.layers[0].self_attn.v_proj = other.model.layers[0].self_attn.v_proj
    elif replaced == "behind it":
        weight = target.model.layers[0].self_attn.v_proj.weight
        weight.data = other.model.layers[0].self_attn.v_proj.weight.data.clone()
    elif replaced == "forward":
        own, layer = type(target.model.layers[0].mlp).forward, target.model.layers[0].mlp
        layer.forward = lambda states: own(layer, states).roll(1, -1)
    else:
        target.model.layers[2].register_forward_hook(lambda module, arguments, output: output.roll(1, -1))
    (first, second) = (wrapped.generate(PROMPTS[0], PARAMS)[0] for _ in range(2))
    ids = torch.tensor(PROMPTS[:1])
    expected = target.generate(ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids))
    assert first.token_ids == second.token_ids == expected[0, ids.shape[1] :].tolist()
    unseen = replaced in ("hooked", "forward")  # each call begins an epoch: what these read nobody can see
    assert (first.stats.cached_tokens, second.stats.cached_tokens) == (0, 0 if unseen else 24)


class Named:
    name = "odd loops"


def test_a_loop_that_does_not_say_what_its_entries_depend_on_is_not_cached() -> None:
    loop: Any = Named()
    assert choose_prefix_caching(None, "auto") == choose_prefix_caching(None, True) == "on"
    assert choose_prefix_caching(loop, "auto").startswith("off: odd loops do not say")
    assert choose_prefix_caching(loop, False) == "off: enable_prefix_caching=False"
    with pytest.raises(InvalidInputError, match=r"enable_prefix_caching=True: odd loops.*give False or 'auto'"):
        choose_prefix_caching(loop, True)


@pytest.mark.slow
def test_the_state_is_told() -> None:
    assert wrap(tiny_llama()).describe()["prefix_caching"] == "on"
    off = wrap(tiny_llama(), enable_prefix_caching=False)
    assert off.describe()["prefix_caching"] == "off: enable_prefix_caching=False"
    assert not off.describe()["engine"]["enable_prefix_caching"]
    assert prompt_tokens(off.generate(PROMPTS[0], PARAMS)) == "26"
    on = wrap(tiny_llama())
    assert prompt_tokens([on.generate(PROMPTS[0], PARAMS)[0] for _ in range(2)]) == (
        "52, of these 24 found (46%), 24 not read again"
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.long), {"max_num_batched_tokens": 18}])
@pytest.mark.thorough
def test_in_rounds_from_graphs(graphs_on_cpu: Any, options: dict[str, int]) -> None:  # noqa: F811
    head = head_of("table")
    wrapped = with_graphs(head, num_speculative_tokens=5, **options)
    for _ in range(2):
        completions = wrapped.generate(PROMPTS, PARAMS)
        assert [wrong_rounds(head, c) for c in completions] == [[]] * len(PROMPTS)
        assert [c.token_ids for c in completions] == [hf_greedy(p, NEW) for p in PROMPTS]
        assert free_everywhere(wrapped)
    assert found_by(completions) != found_by(completions)[::-1] and wrapped.engine_stats.cached_tokens > 200


def _as_if_nothing_followed(self: Any, tokens: Any, num_pages: int) -> list[bytes]:
    return [b"-"] * num_pages


@pytest.mark.long
def test_a_page_that_serves_whatever_follows_it_changes_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted defect. The tokens stay right: only the drafts show it."""
    monkeypatch.setattr(PrefixCache, "_following", _as_if_nothing_followed)
    head, wrong = head_of("table"), []
    wrapped = wrap(tiny_llama(), head, num_speculative_tokens=5)
    for begin in random_prompts([16] * 4, seed=9):
        prompts = [begin + own for own in random_prompts((5, 3, 6, 2), seed=8)]
        completions = wrapped.generate(prompts, PARAMS)
        wrong += [c for c in completions if wrong_rounds(head, c)]
        assert [c.token_ids for c in completions] == [hf_greedy(p, NEW) for p in prompts]
    assert wrong


@pytest.mark.slow
@pytest.mark.skipif("gsm-deepseek" not in builtin_names(), reason="no built-in targets")
@pytest.mark.parametrize(
    ("target", "draft"), [("gsm-llama", "auto"), pytest.param("gsm-deepseek", "mtp", marks=pytest.mark.long)]
)
@pytest.mark.thorough
def test_prompts_of_five_shots_share_them(target: str, draft: str, unchecked: None) -> None:
    """EAGLE-3, and a multi-token-prediction module over MLA. Nothing that is found is given up because of the head."""
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 1024, "kv_cache_tokens": 8192, "device": "cpu"}
    with SpeculativeModel.from_pretrained(target, draft, **sizes) as model:
        prompts = [model.tokenizer.encode(text) for text in five_shots(4, None)]
        params = SamplingParams(max_new_tokens=12, return_drafts=True)
        off = model.generate(prompts, replace(params, cache_prefix=False))
        on = model.generate(prompts, params)
        stats, read = model.engine_stats, sum(map(len, prompts))
        assert lived(on) == lived(off) and sum(sum(r.accepted for r in c.stats.rounds) for c in on) > 10
        expected = expected_hits(prompts, 16, 1)
        assert found_by(on) == expected
        assert stats.prefix_hit_rate == sum(found for found, _ in expected) / read > 0.6
        assert (stats.prefix_query_tokens, stats.cached_tokens) == (read, sum(taken for _, taken in expected))
        again = model.generate(prompts, params)
        assert lived(again) == lived(off)
