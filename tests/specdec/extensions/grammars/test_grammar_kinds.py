"""Grammars with other kinds of targets and heads, on threads, sampled, with drafts by lookup; handoff refused."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import regex
import torch
from fakes import bigram_logits, free_everywhere, random_prompts, table_head, tiny_llama, wrap
from scipy import stats

from specdec import Grammar, HandoffMismatchError, RequestFailedError, SamplingParams, SpeculativeModel
from specdec.extensions.grammars import grammar_rows
from tests.hybrids import tiny_hybrid
from tests.specdec.extensions.grammars.spelled import SPELLED, tokenizer
from tests.specdec.extensions.grammars.test_grammars import GRAMMARS, MARKED, PROMPTS, made, mixed, params, tokens

pytest.importorskip("llguidance")
OF_QUESTIONS: list[Any] = [
    Grammar.regex("[a-z]{3,9} [0-9]{1,3}"),
    Grammar.json({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
    None,
    Grammar.choice(["yes", "no", "maybe so"]),
    Grammar.regex("[0-9]{1,4}", begin="####", end="."),
]
QUESTIONS = [
    "Question: Anna has 12 apples and buys 8 more. How many?\nAnswer:",
    "Question: Tom reads 7 pages a day.\nAnswer:",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("gsm-llama", marks=pytest.mark.long), "gsm-deepseek"])
@pytest.mark.thorough
def test_the_built_in_pairs(name: str) -> None:
    """Greedy tokens are those without drafts: of modules; in `make test` test_many_grammars.py has the head's."""
    asked = [(q, SamplingParams(24, grammar=own)) for q in QUESTIONS for own in OF_QUESTIONS]
    with SpeculativeModel.from_pretrained(
        name, "auto", device="cpu", num_speculative_tokens=3, max_num_seqs=8
    ) as model:
        found = tokens(model, asked)
        plain = tokens(model, [(q, replace(own, num_speculative_tokens=0)) for q, own in asked])
    assert found == plain


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", pytest.param("mamba2", marks=pytest.mark.long)])
@pytest.mark.thorough
def test_targets_with_recurrent_layers(kind: str) -> None:
    """Rejected drafts leave the states of layers and of grammars as they were."""
    target = tiny_hybrid(kind)
    asked = [(prompt, params(own)) for prompt in PROMPTS[:2] for own, _ in [*GRAMMARS[:3], MARKED[2]]]
    sizes: dict[str, Any] = {"max_model_len": 64, "tokenizer": tokenizer()}
    model = wrap(target, "lookup", num_speculative_tokens=4, lookup_min=1, lookup_max=8, **sizes)
    assert tokens(model, asked) == tokens(wrap(target, **sizes), asked)
    assert any(
        r.drafted for c in model.generate(PROMPTS, params(Grammar.regex("(?:ab|12){9}"))) for r in c.stats.rounds
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_eight_threads() -> None:
    asked, expected = mixed(GRAMMARS)
    model = made(kv_cache_tokens=120, max_model_len=60)
    found: dict[int, list[list[int]]] = {}

    def ask(number: int) -> None:
        found[number] = tokens(model, asked[number::8])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(8)] == [expected[number::8] for number in range(8)]
    assert free_everywhere(model)


def hotter(patch: pytest.MonkeyPatch) -> None:
    plain = SamplingParams.__post_init__
    patch.setattr(
        SamplingParams, "__post_init__", lambda own: (object.__setattr__(own, "temperature", 1.12), plain(own))[1]
    )


def one_position_late(patch: pytest.MonkeyPatch) -> None:
    plain = grammar_rows.write_masks

    def late(own: Any, drafts: Any, found: np.ndarray) -> None:
        plain(own, drafts, found)
        found[:] = np.roll(found, 1, 0)

    patch.setattr(grammar_rows, "write_masks", late)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "plant"),
    [
        (3, None),
        *(pytest.param(3, plant, marks=pytest.mark.long) for plant in (hotter, one_position_late)),
        *(pytest.param(0, plant, marks=pytest.mark.long) for plant in (None, hotter, one_position_late)),
    ],
)
@pytest.mark.thorough
def test_sampled_tokens_have_the_distribution_of_the_masked_target(k: int, plant: Any) -> None:
    """A bigram model, and a grammar that allows some tokens after a letter and others after a digit: 300 answers of 40
    tokens. What it finds: a temperature of 1.12, and masks of the position before."""
    target = tiny_llama(context=0.0)
    sizes = {"max_num_seqs": 100, "max_num_batched_tokens": 800, "kv_cache_tokens": 6400, "tokenizer": tokenizer()}
    model = wrap(target, table_head(target, disturbance=2.0), num_speculative_tokens=max(k, 1), **sizes)
    grammar = Grammar.regex(f"{PIECE}{{200}}")
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        own = [params(grammar, temperature=1.0, seed=i, num_speculative_tokens=k) for i in range(300)]
        asked = random_prompts([9] * 300), [replace(each, max_new_tokens=40) for each in own]
        if plant is one_position_late:  # what comes is no more of the grammar, which says so
            with pytest.raises(RequestFailedError, match="cannot come next"):
                model.generate(*asked)
            return
        found = model.generate(*asked)
    assert (p_value(found, target) > 1e-3) == (plant is None)


PIECE = "(?:[a-f][0-9]?)"


def p_value(found: list[Any], target: Any) -> float:
    """Transitions from each token; what may follow it is what may follow its last character."""
    logits, counts = bigram_logits(target).double(), np.zeros((64, 64))
    for completion in found:
        np.add.at(counts, (completion.token_ids[:-1], completion.token_ids[1:]), 1)
    squares, degrees = 0.0, 0
    for before in np.flatnonzero(counts.sum(1)):
        start = "a" if SPELLED[before][-1].isalpha() else "a1"
        allowed = [t for t, own in enumerate(SPELLED) if regex.fullmatch(f"{PIECE}+", start + own) is not None]
        if counts[before].sum() != counts[before][allowed].sum():
            return 0.0
        expected = torch.softmax(logits[before][allowed], 0).numpy() * counts[before].sum()
        large = expected >= 5
        if large.sum() > 1:
            squares += float(((counts[before][allowed] - expected)[large] ** 2 / expected[large]).sum())
            degrees += int(large.sum()) - 1
    return float(stats.chi2.sf(squares, degrees))


def test_handoff_is_refused_by_name() -> None:
    pytest.importorskip("specdec.extensions.handoff", exc_type=ImportError)  # another extension, which may be absent
    model = made()
    model.open_transfer("local")
    with pytest.raises(HandoffMismatchError, match="grammar"):
        model.prefill(PROMPTS[0], params(GRAMMARS[0][0]))
