"""More ranks than KV heads: each pair of ranks keeps the KV head that its queries attend to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import LetterTokenizer

from specdec import SamplingParams, SpeculativeModel


@pytest.mark.long
def test_four_ranks_and_two_kv_heads(every_self_test: None, folders: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {"device": "cpu", "tokenizer": LetterTokenizer(), "kv_cache_tokens": 200, "page_size": 4}
    prompts, params = ["abcd efgh", "Hello 123"], SamplingParams(max_new_tokens=16)
    with SpeculativeModel.from_pretrained(folders("two-kv-heads"), **options) as one:
        right = [answer.token_ids for answer in one.generate(prompts, params)]
        stats = one.engine_stats
    with SpeculativeModel.from_pretrained(folders("two-kv-heads"), tensor_parallel_size=4, **options) as four:
        (spec, *_) = four.runners[0].group.attention_specs
        assert (spec.num_q_heads, spec.num_kv_heads) == (1, 1)
        assert [answer.token_ids for answer in four.generate(prompts, params)] == right
        assert four.engine_stats == stats
