"""A model that serves requests of ever other lengths holds no more memory after a thousand rounds than after a few."""

from __future__ import annotations

import gc
import random
import tracemalloc
from typing import Any

import pytest
from fakes import LetterTokenizer, table_head, tiny_llama

from specdec import SamplingParams, SpeculativeModel

pytestmark = pytest.mark.usefixtures("every_self_test")

FLAT = 100_000


class Traffic:
    """Requests with prompts, lengths, K and sampling at random."""

    def __init__(self, model: SpeculativeModel) -> None:
        self.model, self.random = model, random.Random(5)

    def serve(self, calls: int) -> None:
        for _ in range(calls):
            rows = range(self.random.randint(1, 4))
            self.model.generate([self._prompt() for _ in rows], [self._params() for _ in rows])

    def _prompt(self) -> list[int]:
        return [self.random.randrange(62) for _ in range(self.random.randint(1, 100))]

    def _params(self) -> SamplingParams:
        pick = self.random
        most = self.model.num_speculative_tokens
        return SamplingParams(
            max_new_tokens=pick.randint(1, 12),
            temperature=pick.choice((0.0, 0.8)),
            num_speculative_tokens=pick.randint(0, most),
        )


@pytest.mark.slow
@pytest.mark.thorough
def test_memory_is_flat_under_prompts_of_random_length() -> None:
    target: Any = tiny_llama()
    model = SpeculativeModel.from_pretrained(
        target,
        table_head(target),
        tokenizer=LetterTokenizer(),
        num_speculative_tokens=3,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=120,
        kv_cache_tokens=400,
    )
    traffic = Traffic(model)
    traffic.serve(3)
    tracemalloc.start()
    try:
        # Views of arrays are cached by their shapes, so many and no more: memory grows until the caches are full.
        grown = [_grown(traffic)]
        while min(grown) >= FLAT and len(grown) < 10:
            grown.append(_grown(traffic))
    finally:
        tracemalloc.stop()
    assert min(grown) < FLAT, f"bytes more after 16 calls more, time after time: {grown}"


def _grown(traffic: Traffic) -> int:
    before = tracemalloc.get_traced_memory()[0]
    traffic.serve(16)
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before
