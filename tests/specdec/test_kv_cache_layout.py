"""kv_cache_layout: target and head answer and draft alike in either order inside a page, and say which it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fakes import eagle3_head, free_everywhere, hf_greedy, random_prompts, tiny_llama, wrap, wrong_rounds

from attention.cache.kv_cache import CacheGroup
from specdec.cli.tables import facts_table
from specdec.errors import InvalidInputError
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.public.test_llama4 import llama4
from tests.specdec.execution.test_graphs import mla_mixture_pair

PROMPTS = random_prompts((5, 33, 1, 17))
NEW = 24
PARAMS = SamplingParams(max_new_tokens=NEW, return_drafts=True)


def answers(wrapped: SpeculativeModel) -> list[tuple[list[int], Any]]:
    found = [(c.token_ids, c.drafts) for c in wrapped.generate(PROMPTS, PARAMS)]
    assert free_everywhere(wrapped)
    return found


def page_shapes(wrapped: SpeculativeModel) -> list[tuple[int, ...]]:
    """Shape of a page of the first layer's keys, in the target's cache and the head's."""
    return [tuple(runner.layers[0].keys.shape[1:]) for runner in wrapped.runners]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "page_size"),
    [("HND", 4), ("NHD", 1), *(pytest.param(*other, marks=pytest.mark.long) for other in (("NHD", 4), ("HND", 1)))],
)
@pytest.mark.thorough
def test_tokens_and_drafts_are_the_oracles(layout: str, page_size: int) -> None:
    """Prompts in chunks of at most 24 tokens, four requests on three rows. D is 16, with 2 KV heads."""
    head = eagle3_head(tiny_llama())
    wrapped = wrap(tiny_llama(), head, num_speculative_tokens=3, kv_cache_layout=layout, page_size=page_size)
    completions = wrapped.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in completions] == [hf_greedy(p, NEW) for p in PROMPTS]
    assert [wrong_rounds(head, c) for c in completions] == [[]] * len(PROMPTS)
    assert page_shapes(wrapped) == [(2, page_size, 16) if layout == "HND" else (page_size, 2, 16)] * 2
    assert free_everywhere(wrapped)


def fp8(**options: Any) -> SpeculativeModel:
    target, head = tiny_llama(context=0.3), eagle3_head(tiny_llama(context=0.3))
    return wrap(target, head, num_speculative_tokens=3, kv_cache_dtype="fp8", **options)


def mla(**options: Any) -> SpeculativeModel:
    return wrap(*mla_mixture_pair(), num_speculative_tokens=2, **options)


def in_chunks(**options: Any) -> SpeculativeModel:
    return wrap(llama4(wrapper=False, chunk=8), num_speculative_tokens=0, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build", [pytest.param(fp8, marks=pytest.mark.slow), mla, pytest.param(in_chunks, marks=pytest.mark.slow)]
)
@pytest.mark.thorough
def test_other_caches_and_variants_answer_alike_in_both(build: Callable[..., SpeculativeModel]) -> None:
    """8 bits, MLA (one head for all) and local attention."""
    plain, by_head = (build(kv_cache_layout=layout) for layout in ("NHD", "HND"))
    assert answers(by_head) == answers(plain)
    swapped = [(heads, slots, dim) for slots, heads, dim in page_shapes(plain)]
    assert page_shapes(by_head) == swapped != page_shapes(plain)


@pytest.mark.parametrize(("layout", "said"), [("auto", "NHD"), ("HND", "HND")])
def test_the_layout_is_told(layout: str, said: str) -> None:
    facts = wrap(tiny_llama(), eagle3_head(tiny_llama()), kv_cache_layout=layout).describe()
    assert {name: f", {said} pages, " in text for name, text in facts["kv_cache"].items()} == {
        "target": True,
        "head": True,
    }
    cells = [cell for column in facts_table(facts).columns for cell in column.cells]
    assert sum(f"{said} pages" in str(cell) for cell in cells) == 2


@pytest.mark.parametrize("word", ["nhd", "HDN", "", None, 3])
def test_another_word_is_refused_before_anything_is_read(word: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"kv_cache_layout=.*: allowed are auto, NHD, HND"):
        SpeculativeModel.from_pretrained("/nowhere", kv_cache_layout=word)


def test_a_group_takes_no_other_layout() -> None:
    with pytest.raises(InvalidInputError, match=r"group head: KV cache layout 'hnd'; allowed are NHD, HND"):
        CacheGroup("head", (), 4, 4, "hnd")  # type: ignore[arg-type]
