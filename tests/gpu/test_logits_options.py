"""Requests with options that change logits, over CUDA graphs: what they ask for holds, and drafts change no answer."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams

QUESTIONS = [
    f"Tom has {n} boxes of 12 eggs and gives {n - 1} boxes to Ann. How many eggs does he keep?" for n in range(3, 11)
]
NEW = 160
SUPPRESSED = list(range(20, 60))
OPTIONS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "n-grams": {"no_repeat_ngram_size": 3},
    "suppressed": {"suppress_tokens": SUPPRESSED, "logit_bias": {70: 1.5}},
    "least length": {"min_new_tokens": 150},
    "sampled": {"temperature": 0.9, "typical_p": 0.8, "repetition_penalty": 1.2, "seed": 1},
}


@cache
def answers(backend: str, drafts: int, name: str | None) -> list[tuple[list[int], list[int]]]:
    """Prompts and new tokens; requests with options beside requests without."""
    with SpeculativeModel.from_pretrained(
        "gsm-llama", "auto", num_speculative_tokens=3, max_num_seqs=16, dtype=torch.float16, backend=backend
    ) as model:
        own = SamplingParams(NEW, num_speculative_tokens=drafts, **({} if name is None else OPTIONS[name]))
        plain = SamplingParams(NEW, num_speculative_tokens=drafts)
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        found = model.generate([*chats, *chats], [own] * len(chats) + [plain] * len(chats))
        assert model.engine_stats.rounds > 0
    return [(c.prompt_token_ids, c.token_ids) for c in found]


@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_change_no_answer(name: str) -> None:
    """Bit by bit with the batch-invariant backend, whose greedy rounds have the same logits drafted or not."""
    drafted, plain = answers("batch_invariant", 3, name), answers("batch_invariant", 0, name)
    half = len(QUESTIONS)
    if name == "sampled":  # another K draws other tokens of the same distribution
        drafted, plain = drafted[half:], plain[half:]
    assert drafted == plain


@pytest.mark.parametrize("backend", ["flashinfer", "batch_invariant"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_what_the_options_ask_for_holds(backend: str, drafts: int) -> None:
    half = len(QUESTIONS)
    free = [new for _, new in answers(backend, drafts, "penalties")[half:]]
    assert [new for _, new in answers(backend, drafts, "penalties")[:half]] != free
    for prompt, new in answers(backend, drafts, "n-grams")[:half]:
        tokens = prompt + new
        grams = [tuple(tokens[i : i + 3]) for i in range(len(tokens) - 2)]
        fresh = grams[len(prompt) - 2 :]
        assert all(gram not in grams[: len(prompt) - 2 + i] for i, gram in enumerate(fresh))
    assert not {t for _, new in answers(backend, drafts, "suppressed")[:half] for t in new} & set(SUPPRESSED)
    assert {t for new in free for t in new} & set(SUPPRESSED), "otherwise nothing was suppressed"
    assert all(len(new) >= 150 for _, new in answers(backend, drafts, "least length")[:half])
    assert any(len(new) < 150 for new in free)
