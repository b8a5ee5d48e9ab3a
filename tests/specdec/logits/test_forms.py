"""The vectorised rules against transformers' own processors, row by row, on prefixes of different lengths."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from specdec.logits.forms import (
    NOBODY,
    TokenPrefixes,
    add_sequence_bias,
    ban_repeated_ngrams,
    penalise_tokens,
    subtract_counts,
)

VOCAB = 7


@st.composite
def cases(draw: st.DrawFn) -> tuple[TokenPrefixes, list[list[int]], list[int], torch.Tensor]:
    """Prefixes made of committed tokens and drafts, the same as lists, prompt lengths, and scores [N, V+1]."""
    token = st.integers(0, VOCAB - 1)
    requests, most = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    committed = [draw(st.lists(token, min_size=1, max_size=9)) for _ in range(requests)]
    prompts = [draw(st.integers(1, len(own))) for own in committed]
    drafts = [draw(st.lists(token, min_size=0, max_size=most)) for _ in range(requests)]
    table = torch.full((requests, max(map(len, committed))), 0)  # what is behind a request's tokens is anything
    for row, own in zip(table, committed, strict=True):
        row[: len(own) - 1] = torch.tensor(own[:-1], dtype=torch.int64)  # the bonus token comes with the drafts
    lists = [(j, own + drafts[j][:i]) for j, own in enumerate(committed) for i in range(len(drafts[j]) + 1)]
    followed = torch.zeros(len(lists), most + 1, dtype=torch.int64)
    there = torch.zeros(len(lists), most + 1, dtype=torch.bool)
    for n, (j, tokens) in enumerate(lists):
        after = tokens[len(committed[j]) - 1 :]
        followed[n, : len(after)] = torch.tensor(after)
        followed[n, len(after) :] = draw(token)
        there[n, : len(after)] = True
    owner = torch.tensor([j for j, _ in lists])
    lens = torch.tensor([len(own) for own in committed])
    prefixes = TokenPrefixes.of(table, lens, torch.tensor(prompts), owner, followed, there)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.randn(len(lists), VOCAB + 1, generator=generator)
    return prefixes, [tokens for _, tokens in lists], [prompts[j] for j, _ in lists], scores


def by_row(
    lists: list[list[int]], scores: torch.Tensor, processor: Callable[[int], Callable[..., torch.Tensor]]
) -> torch.Tensor:
    """A processor of transformers, called for every row alone."""
    own = [processor(n)(torch.tensor([tokens]), scores[n : n + 1, :-1].clone()) for n, tokens in enumerate(lists)]
    return torch.cat(own)


@given(cases())
def test_prefixes_are_committed_tokens_and_drafts(case: tuple) -> None:
    prefixes, lists, prompts, _ = case
    assert [[t for t in row if t != NOBODY] for row in prefixes.ids.tolist()] == lists
    assert prefixes.lens.tolist() == [len(tokens) for tokens in lists]
    assert prefixes.prompt_lens.tolist() == prompts
    for count in (0, 1, 4):
        padded = [([NOBODY] * count + tokens)[len(tokens) :] for tokens in lists]
        assert prefixes.tails(count).tolist() == padded


@given(cases(), st.floats(0.2, 3.0))
def test_repetition_penalty(case: tuple, penalty: float) -> None:
    prefixes, lists, _, scores = case
    expected = by_row(lists, scores, lambda n: RepetitionPenaltyLogitsProcessor(penalty))
    penalise_tokens(scores, prefixes.ids, prefixes.there, torch.full((len(lists),), penalty))
    assert torch.equal(scores[:, :-1], expected)


@given(cases(), st.floats(0.2, 3.0))
def test_encoder_repetition_penalty(case: tuple, penalty: float) -> None:
    prefixes, lists, prompts, scores = case
    expected = by_row(
        lists,
        scores,
        lambda n: EncoderRepetitionPenaltyLogitsProcessor(penalty, torch.tensor([lists[n][: prompts[n]]])),
    )
    own = prefixes.there & prefixes.prompt_mask()
    penalise_tokens(scores, prefixes.ids, own, torch.full((len(lists),), 1 / penalty))
    assert torch.equal(scores[:, :-1], expected)


@given(cases(), st.floats(-2, 2), st.floats(-2, 2))
def test_frequency_and_presence_penalty_are_openais(case: tuple, frequency: float, presence: float) -> None:
    """mu[j] -> mu[j] - c[j] · alpha_frequency - float(c[j] > 0) · alpha_presence, c[j] among the new tokens."""
    prefixes, lists, prompts, scores = case
    expected = scores[:, :-1].clone().double()
    for n, tokens in enumerate(lists):
        new = tokens[prompts[n] :]
        for token in set(new):
            expected[n, token] -= new.count(token) * frequency + presence
    rows = len(lists)
    subtract_counts(scores, prefixes, torch.full((rows,), frequency), torch.full((rows,), presence))
    torch.testing.assert_close(scores[:, :-1].double(), expected, rtol=0, atol=1e-5)


@given(cases(), st.integers(1, 4))
def test_no_ngram_is_repeated(case: tuple, size: int) -> None:
    prefixes, lists, _, scores = case
    expected = by_row(lists, scores, lambda n: NoRepeatNGramLogitsProcessor(size))
    ban_repeated_ngrams(scores, prefixes, size)
    assert torch.equal(scores[:, :-1], expected)


@given(cases(), st.integers(1, 4))
def test_no_ngram_of_the_prompt_is_repeated(case: tuple, size: int) -> None:
    prefixes, lists, prompts, scores = case
    expected = by_row(
        lists, scores, lambda n: EncoderNoRepeatNGramLogitsProcessor(size, torch.tensor([lists[n][: prompts[n]]]))
    )
    ban_repeated_ngrams(scores, prefixes, size, in_prompt=True)
    assert torch.equal(scores[:, :-1], expected)


LEFT_OUT = "sequence is longer than the context" in inspect.getsource(SequenceBiasLogitsProcessor.__call__)
"""transformers 5.17 leaves out a sequence that is one token longer than what there is; later ones and ours add it."""


@given(
    cases(),
    st.dictionaries(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4).map(tuple),
        st.sampled_from([-1.5, 0.25, 3.0, float("-inf")]),
        min_size=1,
        max_size=5,
    ),
)
@settings(max_examples=60)
def test_sequence_bias(case: tuple, biases: dict[tuple[int, ...], float]) -> None:
    prefixes, lists, _, scores = case
    most = max(map(len, biases))
    assume(not LEFT_OUT or all(len(tokens) >= most for tokens in lists))
    expected = by_row(lists, scores, lambda n: SequenceBiasLogitsProcessor(dict(biases)))
    sequences = torch.tensor([[0] * (most - len(ids)) + list(ids) for ids in biases])
    lens = torch.tensor([len(ids) for ids in biases])
    add_sequence_bias(scores, prefixes, sequences, lens, torch.tensor(list(biases.values())))
    torch.testing.assert_close(scores[:, :-1], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_tokens_beyond_the_logits_are_left_out(size: int) -> None:
    """Embeddings may have more rows than lm_head; transformers' n-gram rule would raise there."""
    ids = torch.tensor([[1, 99, 1, 99, NOBODY]])
    prefixes = TokenPrefixes(ids, torch.tensor([4]), torch.tensor([1]))
    scores = torch.ones(1, VOCAB + 1)
    ban_repeated_ngrams(scores, prefixes, size)
    expected = torch.ones(1, VOCAB)
    expected[0, 1] = float("-inf")
    assert torch.equal(scores[:, :-1], expected)
    scores = torch.ones(1, VOCAB + 1)
    penalise_tokens(scores, ids, prefixes.there, torch.tensor([2.0]))
    assert scores[0, :-1].tolist() == [1.0, 0.5] + [1.0] * 5
    scores = torch.ones(1, VOCAB + 1)
    subtract_counts(scores, prefixes, torch.tensor([1.0]), torch.tensor([0.0]))
    assert scores[0, :-1].tolist() == [1.0, 0.0] + [1.0] * 5
