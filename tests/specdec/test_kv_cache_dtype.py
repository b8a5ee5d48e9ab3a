"""An 8-bit KV cache through the whole engine: the same with and without speculation, and seen in the facts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import eagle3_head, random_prompts, table_head, tiny_llama, wrap

from specdec.cli.tables import route_rows
from specdec.errors import InvalidInputError, UnsupportedModelError
from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((5, 33, 17))
PARAMS = SamplingParams(max_new_tokens=40)
SCALES = [(0.05, 0.03)] * 4


def tokens(wrapped: Any) -> list[list[int]]:
    return [c.token_ids for c in wrapped.generate(PROMPTS, PARAMS)]


@pytest.mark.slow
@pytest.mark.parametrize("scales", [pytest.param(None, marks=pytest.mark.long), SCALES])
def test_speculation_changes_nothing(scales: Any) -> None:
    model = tiny_llama(context=0.3)
    options = {"kv_cache_dtype": "fp8", "kv_cache_scales": scales}
    plain = wrap(model, **options)
    drafted = wrap(model, table_head(model), num_speculative_tokens=3, **options)
    assert tokens(drafted) == tokens(plain)
    assert drafted.target.runner.layers[0].keys.dtype == torch.float8_e4m3fn
    assert 1e-3 < plain.self_test_error < 0.5
    assert wrap(model).self_test_error < 1e-4


def test_the_head_keeps_the_dtype_of_the_model() -> None:
    model = tiny_llama()
    wrapped = wrap(model, eagle3_head(model), kv_cache_dtype="fp8")
    facts = wrapped.describe()
    assert facts["kv_cache"]["target"].startswith("400 tokens in float8_e4m3fn")
    more = (wrapped.config.num_head_pages - wrapped.config.num_pages) * wrapped.config.page_size
    assert more >= wrapped.config.max_num_seqs * wrapped.config.num_speculative_tokens  # for drafts ahead of a commit
    assert facts["kv_cache"]["head"].startswith(f"{400 + more} tokens in float32")
    assert facts["attention"] == {
        "target": "torch reference, cache float8_e4m3fn",
        "head": "torch reference, cache float32",
    }
    assert dict(route_rows(facts))["attention of the target"] == "torch reference, cache float8_e4m3fn"


def test_values_that_are_cut_off_are_noticed() -> None:
    with pytest.raises(UnsupportedModelError, match=r"KV cache is in 8 bits: give kv_cache_scales, or kv_cache_dtype"):
        wrap(tiny_llama(context=0.3), kv_cache_dtype="fp8", kv_cache_scales=[(1e-6, 1e-6)] * 4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype='fp4': allowed are auto, fp8"),
    "scales alone": ({"kv_cache_scales": SCALES}, "scales are for an fp8 cache"),
    "three layers": (
        {"kv_cache_dtype": "fp8", "kv_cache_scales": SCALES[:3]},
        "scales of 3 layers were given; group target has 4",
    ),
    "negative": ({"kv_cache_dtype": "fp8", "kv_cache_scales": [(1.0, -1.0)] * 4}, "layer 0: .* two positive numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(InvalidInputError, match=message):
        wrap(tiny_llama(), **options)
