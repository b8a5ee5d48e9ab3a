"""Drawn acceptance on the device, here on CPU tensors, and logits of a given entropy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import LetterTokenizer, eagle3_head, random_prompts, table_head, tiny_llama, wrap

from benchmarks.synthetic import (
    DrawnAcceptance,
    Tokenizer,
    decide,
    geometric,
    mean_entropy,
    scale_to_entropy,
    sharpen,
)
from specdec.acceptance.packed import PackedResult
from specdec.requests.sampling import SamplingParams

CPU = torch.device("cpu")
ENDLESS = SamplingParams(max_new_tokens=12, ignore_eos=True)


def draws(rate: float, vocab: int = 50, seed: int = 0) -> DrawnAcceptance:
    return DrawnAcceptance(rate, vocab, np.random.default_rng(seed), CPU)


def test_acceptance_has_its_distribution_in_every_run() -> None:
    drawn = geometric(0.8, 1 << 14, np.random.default_rng(0))
    for place in range(5):  # conditional: of those that reach a place, 0.8 go on
        assert (drawn > place).sum() / (drawn >= place).sum() == pytest.approx(0.8, abs=0.01)
    expected = sum(0.8**k for k in range(6))
    runs = [1 + np.minimum(drawn[start : start + 300], 5).mean() for start in range(0, 16_000, 300)]
    assert np.allclose(runs, expected, rtol=0.02) and np.mean(runs) == pytest.approx(expected, rel=0.003)


def test_order_says_nothing_about_the_next_value() -> None:
    drawn = np.minimum(geometric(0.8, 1 << 15, np.random.default_rng(1)), 5)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.05


def test_certain_acceptance_accepts_everything() -> None:
    assert (geometric(1.0, 10, np.random.default_rng(0)) >= 10).all()


def overwritten(drawn: DrawnAcceptance, num_drafts: list[int], width: int = 5) -> PackedResult:
    """A result of rows with drafts 100, 101, …, of which the model accepted 1."""
    rows = len(num_drafts)
    drafts = torch.arange(100, 100 + width).repeat(rows, 1)
    verdict = PackedResult.pack(torch.full((rows,), min(1, width)), torch.full((rows,), 77), drafts)
    drawn.before_read(verdict, torch.tensor(num_drafts))
    return verdict


def test_no_row_accepts_more_than_it_has_and_each_has_draws_of_its_own() -> None:
    drawn, num_drafts = draws(0.8), [5, 2, 0, 5]
    accepted = np.array([overwritten(drawn, num_drafts).num_accepted.tolist() for _ in range(200)])
    assert (accepted <= num_drafts).all() and (accepted.max(0) == num_drafts).all()
    assert (accepted[:, 0] != accepted[:, 3]).any() and (accepted[1:, 0] != accepted[:-1, 0]).any()


def test_the_tokens_are_the_accepted_drafts_and_a_drawn_one() -> None:
    verdict = overwritten(draws(0.5), [5, 5, 3, 1, 0] * 20)
    drafts = list(range(100, 105))
    roots = set()
    for accepted, tokens, kept in zip(
        verdict.num_accepted.tolist(), verdict.tokens.tolist(), verdict.drafts.tolist(), strict=True
    ):
        assert tokens[:accepted] == drafts[:accepted] and kept == drafts
        assert 0 <= tokens[accepted] < 50, "the model's own 77 is gone"
        roots.add(tokens[accepted])
    assert len(roots) > 20


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, pytest.param(1, marks=pytest.mark.long), 31])
@pytest.mark.cases(1)
def test_a_rows_acceptance_does_not_depend_on_how_many_others_there_are(others: int) -> None:
    drawn = draws(0.8)
    rounds = 3000
    accepted = [int(overwritten(drawn, [3] + [3] * others, 3).num_accepted[0]) for _ in range(rounds)]
    assert np.mean(accepted) == pytest.approx(0.8 + 0.64 + 0.512, rel=0.03)


def test_draws_begin_anew_when_they_are_used_up() -> None:
    drawn = draws(1.0)
    for _ in range(20):
        verdict = overwritten(drawn, [2] * 5000, 2)
        assert (verdict.num_accepted == 2).all()


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_model_takes_its_acceptance_from_the_draws(num_drafts: int) -> None:
    model = tiny_llama()
    wrapped = wrap(model, table_head(model) if num_drafts else None, num_speculative_tokens=num_drafts)
    decide(wrapped, draws(1.0))
    (completion,) = wrapped.generate(random_prompts((5,)), ENDLESS)
    assert len(completion.token_ids) == 12
    assert all(r.accepted == r.drafted for r in completion.stats.rounds)


def test_tokens_of_rounds_without_drafts_are_the_drawn_ones() -> None:
    wrapped = wrap(tiny_llama(), None)
    decide(wrapped, draws(0.8, 60, 5))
    rng = np.random.default_rng(5)
    geometric(0.8, 1 << 16, rng)
    (completion,) = wrapped.generate(random_prompts((5,)), ENDLESS)
    assert completion.token_ids == rng.integers(0, 60, 1 << 16)[:12].tolist()


def test_sampled_rows_take_it_as_well() -> None:
    model = tiny_llama()
    wrapped = wrap(model, table_head(model), num_speculative_tokens=2)
    decide(wrapped, draws(1.0))
    sampled = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.8, top_p=0.95)
    for completion in wrapped.generate(random_prompts((5, 7)), [sampled, ENDLESS]):
        assert all(r.accepted == r.drafted for r in completion.stats.rounds)


def test_an_output_embedding_is_scaled_to_an_entropy() -> None:
    weight = torch.randn(3000, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    scale_to_entropy(weight, 1.0)
    hidden = torch.randn(500, 64, generator=torch.Generator().manual_seed(1))
    hidden /= hidden.square().mean(1, keepdim=True).sqrt()
    assert mean_entropy(hidden @ weight.T) == pytest.approx(1.0, abs=0.35)


def test_both_output_embeddings_of_a_pair_are_scaled() -> None:
    model = tiny_llama()
    head = eagle3_head(model)
    before = model.lm_head.weight.clone(), head.lm_head.weight.clone()  # type: ignore[attr-defined]
    sharpen(model, head, 1.0)
    for old, new in zip(before, (model.lm_head.weight, head.lm_head.weight), strict=True):  # type: ignore[attr-defined]
        ratio = (new / old).detach()
        assert ratio.std() < 1e-3 and abs(float(ratio.mean()) - 1) > 1e-3


def test_tied_embeddings_are_refused() -> None:
    model = tiny_llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(ValueError, match="tied"):
        sharpen(model, None, 1.0)


def test_the_tokenizer_can_stand_where_a_model_wants_one() -> None:
    assert wrap(tiny_llama(), None, tokenizer=Tokenizer()).generate(random_prompts((4,)), ENDLESS)[0].text == ""
    with pytest.raises(TypeError, match="token ids"):
        Tokenizer()("text")
    assert callable(LetterTokenizer().decode)
