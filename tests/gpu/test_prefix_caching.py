"""Requests that share pages on a GPU: graphs, prompts by segments, MLA, and pages found as by the arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec import SamplingParams, SpeculativeModel
from specdec.loading.names import builtin_names, builtin_path
from specdec.requests.stats import pool_requests
from tests.fp8 import gaps
from tests.specdec.engine.shared_prompts import expected_hits, five_shots
from tests.specdec.engine.test_prefix_caching import found_by, lived

pytestmark = pytest.mark.skipif("gsm-deepseek" not in builtin_names(), reason="no built-in targets")
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 1024, "kv_cache_tokens": 16384, "device": "cuda"}
PARAMS = SamplingParams(max_new_tokens=64, return_drafts=True)


def both(model: SpeculativeModel) -> tuple[list[Any], list[Any]]:
    """Without the cache, and with it; found is what there is."""
    prompts = [model.tokenizer.encode(text) for text in five_shots(8, None)]
    off = model.generate(prompts, replace(PARAMS, cache_prefix=False))
    on = model.generate(prompts, PARAMS)
    assert found_by(on) == expected_hits(prompts, model.config.page_size, 1)
    assert model.engine_stats.prefix_hit_rate > 0.6
    return off, on


def test_with_batch_invariant_rounds_tokens_keep_their_bits() -> None:
    with SpeculativeModel.from_pretrained(
        "gsm-llama", "auto", dtype="bfloat16", backend="batch_invariant", **SIZES
    ) as m:
        off, on = both(m)
        assert [c.token_ids for c in on] == [c.token_ids for c in off]


@pytest.mark.parametrize(("target", "draft"), [("gsm-llama", "auto"), ("gsm-deepseek", "mtp")])
def test_in_float32_tokens_and_drafts_are_the_same(target: str, draft: str) -> None:
    with SpeculativeModel.from_pretrained(target, draft, dtype="float32", backend="torch", **SIZES) as model:
        off, on = both(model)
        assert lived(on) == lived(off)


@pytest.mark.parametrize(("target", "draft"), [("gsm-llama", "auto"), ("gsm-deepseek", "mtp")])
def test_from_graphs_as_many_drafts_are_accepted(target: str, draft: str) -> None:
    """In half precision a near tie may go another way: each token is the best of the model in float32, or nearly."""
    with SpeculativeModel.from_pretrained(target, draft, dtype="bfloat16", cuda_graphs=True, **SIZES) as model:
        off, on = both(model)
        without, cached = (pool_requests([c.stats for c in found]).tau for found in (off, on))
        assert cached == pytest.approx(without, rel=0.06)
    oracle = AutoModelForCausalLM.from_pretrained(builtin_path(target), dtype=torch.float32)
    for found in zip(off, on, strict=True):
        assert max(float(gaps(oracle, answer).max()) for answer in found) < 0.1
