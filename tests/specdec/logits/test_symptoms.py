"""What users of engines with relaxed penalties reported (sgl-project/sglang, issue 33643).

Each symptom follows from counting the accepted drafts of a round as one token, or not at all. The model's next token
depends on the last one alone, so what each option must give is computed here token by token, and the head drafts what
the model would say without the option.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from fakes import bigram_logits, random_prompts, table_head, tiny_llama, wrap

from specdec.requests.sampling import SamplingParams

NEW = 60
EOS = 3
PROMPTS = random_prompts((7, 2, 12))


def expected(prompt: list[int], penalty: float) -> list[int]:
    """Greedy tokens with a frequency penalty."""
    table, counts, tokens = bigram_logits(tiny_llama(context=0.0)), Counter[int](), list(prompt)
    for _ in range(NEW):
        logits = table[tokens[-1]].clone()
        for token, count in counts.items():
            logits[token] -= penalty * count
        tokens.append(int(logits.argmax()))
        counts[tokens[-1]] += 1
    return tokens[len(prompt) :]


def said(drafts: int, **options: Any) -> list[Any]:
    target = tiny_llama(context=0.0)
    head = table_head(target, disturbance=0.0) if drafts else None
    model = wrap(target, head, num_speculative_tokens=drafts)
    return list(model.generate(PROMPTS, SamplingParams(NEW, **options)))


def accepted(completions: list[Any]) -> float:
    """Drafts accepted of those verified."""
    rounds = [r for completion in completions for r in completion.stats.rounds]
    return sum(r.accepted for r in rounds) / sum(r.drafted for r in rounds)


def period(tokens: list[int]) -> int:
    """Of the loop at the end of the tokens."""
    return next(p for p in range(1, NEW) if tokens[-2 * p : -p] == tokens[-p:])


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 1, 5, *(pytest.param(k, marks=pytest.mark.long) for k in (2, 3, 4))])
@pytest.mark.thorough
def test_a_frequency_penalty_is_as_strong_as_without_drafts(drafts: int) -> None:
    """Also where a repetition loop is as long as what a round accepts: penalties would count a whole loop as none."""
    weak, strong = 0.02, 0.3
    loops = {period(expected(prompt, 0.0)) for prompt in PROMPTS}
    assert loops & set(range(2, 7)), loops  # one of these numbers of drafts, or one more, is a loop's length
    for penalty in (weak, strong):
        completions = said(drafts, frequency_penalty=penalty, ignore_eos=True)
        assert [completion.token_ids for completion in completions] == [expected(p, penalty) for p in PROMPTS]
        assert any(expected(p, penalty) != expected(p, 0.0) for p in PROMPTS)
        if drafts and penalty == weak:
            assert accepted(completions) > 0.5


@pytest.mark.parametrize("drafts", [0, 2, 3, 5])
@pytest.mark.parametrize("least", [1, 10, 11])
def test_the_least_number_of_tokens_is_counted_in_tokens(drafts: int, least: int) -> None:
    target = tiny_llama(context=0.0)
    model = wrap(target, table_head(target, disturbance=0.0) if drafts else None, num_speculative_tokens=drafts)
    target.generation_config.eos_token_id, before = EOS, target.generation_config.eos_token_id
    try:
        completions = model.generate(PROMPTS, SamplingParams(NEW, min_new_tokens=least, logit_bias={EOS: 50.0}))
    finally:
        target.generation_config.eos_token_id = before
    assert [(c.finish_reason, len(c.token_ids), c.token_ids[-1]) for c in completions] == [("eos", least + 1, EOS)] * 3
    if drafts and least > 8:
        assert accepted(completions) > 0.4


def test_the_penalties_here_are_no_other_than_one_by_one() -> None:
    """Counted once a round, the same answers would be others: the loops are long enough to tell."""
    once = [expected(prompt, 0.02) for prompt in PROMPTS]
    assert all(torch.tensor(tokens).unique().numel() > 1 for tokens in once)
    assert once != [expected(prompt, 0.01) for prompt in PROMPTS]
