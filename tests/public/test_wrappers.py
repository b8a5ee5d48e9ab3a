"""Models that read images too, from a folder: text comes out as from their own `generate`, images are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes import LetterTokenizer, random_prompts

from specdec import SamplingParams, SpeculativeModel
from tests.hybrids import RecallHead
from tests.wrappers import TYPES, own_text, write

QUICK = ("qwen2_5_vl", "mistral3", "paligemma")
NEW = 16
PARAMS = SamplingParams(max_new_tokens=NEW)


def load(folder: Path, draft: Any = None, **options: Any) -> SpeculativeModel:
    """From a folder, with small sizes: prompts are read in chunks of 24 tokens."""
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "page_size": 4, "kv_cache_tokens": 400}
    return SpeculativeModel.from_pretrained(
        folder, draft, **{"tokenizer": LetterTokenizer(), "max_model_len": 120, **sizes, **options}
    )


def prompts_of(lengths: list[int]) -> list[list[int]]:
    """Random text prompts, without the ids that stand for images and videos."""
    return random_prompts(lengths, vocab_size=60)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TYPES])
def test_text_is_what_the_wrapper_generates(name: str, tmp_path: Path) -> None:
    """Without drafts, and with some right and some wrong ones; three prompts at once, read in chunks, and one alone."""
    wrapper = write(name, tmp_path)
    prompts = prompts_of([5, 37, 60])
    own = [own_text(wrapper, prompt, NEW) for prompt in prompts]
    with load(tmp_path) as plain:
        assert [c.prompt_token_ids + c.token_ids for c in plain.generate(prompts, PARAMS)] == own
        assert plain.describe()["twin"].startswith("exact")
    with load(tmp_path, RecallHead(own, 0.6), num_speculative_tokens=3) as drafting:
        found = drafting.generate(prompts, PARAMS)
        assert [c.prompt_token_ids + c.token_ids for c in found] == own
        rounds = [r for c in found for r in c.stats.rounds]
        assert 0 < sum(r.accepted for r in rounds) < sum(r.drafted for r in rounds)
        assert drafting.generate(prompts[1], PARAMS)[0].token_ids == own[1][37:]
