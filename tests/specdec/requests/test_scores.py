"""`score`: log-probabilities of given completions, those of a plain forward; prompts are read once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import LETTERS, LetterTokenizer, random_prompts, table_head, tiny_llama, wrap

from specdec import SamplingParams
from specdec.errors import InvalidInputError

CLOSE = {"rtol": 0.0, "atol": 3e-5}


class Tokenizer(LetterTokenizer):
    """A text begins with a token of its own, as with bos."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = super().__call__(text)["input_ids"]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}


def expected(prompt: list[int], completion: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = tiny_llama()(torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0]
    rows = logits[len(prompt) - 1 : -1].log_softmax(1)
    return rows.gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.mark.parametrize("drafts", [0, 3])
def test_scores_are_those_of_a_plain_forward(drafts: int) -> None:
    model = wrap(tiny_llama(), table_head(tiny_llama()) if drafts else None, num_speculative_tokens=drafts)
    prompts, completions = random_prompts((9, 30, 1, 17)), random_prompts((6, 1, 20, 2), seed=5)
    for prompt, completion, score in zip(
        prompts, completions, model.score(prompts, completions, logprobs=2), strict=True
    ):
        right = expected(prompt, completion)
        assert score.token_ids == completion
        torch.testing.assert_close(torch.tensor([each.logprob for each in score.logprobs]), right, **CLOSE)
        assert score.logprob == pytest.approx(float(right.sum()), abs=1e-4)
        assert all(len(each.top) == 2 for each in score.logprobs)


@pytest.mark.thorough
def test_what_greedy_decoding_says_is_greedy_and_nothing_else() -> None:
    model = wrap(tiny_llama())
    (prompt,) = random_prompts((12,))
    (said,) = model.generate(prompt)
    own = said.token_ids[:8]
    assert [score.is_greedy for score in model.score(prompt, [own, [*own[:-1], (own[-1] + 1) % 20]])] == [True, False]


def test_completions_of_one_prompt_share_its_pages() -> None:
    model = wrap(tiny_llama(), max_num_seqs=8, max_num_batched_tokens=64)
    (prompt,), completions = random_prompts((40,)), random_prompts((3, 2, 1, 3))
    before = model.engine_stats
    scores = model.score(prompt, completions)
    assert model.engine_stats.cached_tokens - before.cached_tokens == 3 * 36
    for completion, score in zip(completions, scores, strict=True):
        assert score.logprob == pytest.approx(float(expected(prompt, completion).sum()), abs=1e-4)


def test_a_completion_may_fill_the_model() -> None:
    model = wrap(tiny_llama(), max_model_len=24)
    (score,) = model.score([list(range(2, 12))], [list(range(2, 16))])
    assert len(score.logprobs) == 14
    with pytest.raises(InvalidInputError, match="max_model_len=24"):
        model.score([list(range(2, 12))], [list(range(2, 17))])


def test_texts_of_completions_get_no_special_tokens() -> None:
    model = wrap(tiny_llama(), tokenizer=Tokenizer())
    (score,) = model.score(LETTERS[4:9], LETTERS[6:9])
    assert score.token_ids == [6, 7, 8]
    right = expected([1, 4, 5, 6, 7, 8], [6, 7, 8])
    assert score.logprob == pytest.approx(float(right.sum()), abs=1e-4)


@pytest.mark.parametrize(
    ("prompts", "completions", "words"),
    [
        ([[3], [4]], [[5]], "1 completions for 2 prompts"),
        ([[3], [4]], [[5], []], "completion 1 is empty"),
        ([[3]], [[1.5]], "completions are given as prompts are"),
        ([[3]], 7, "completions are given as prompts are"),
    ],
)
def test_bad_completions_are_refused(prompts: object, completions: object, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        wrap(tiny_llama()).score(prompts, completions)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_scores_of_the_distribution_are_those_of_generate_bit_by_bit(filters: dict[str, Any]) -> None:
    """Prompt and completion in one pass, against rounds of one token. Planted by hand: another temperature."""
    prompts, drawn = random_prompts((5, 9, 20)), {"temperature": 0.7, **filters}
    with wrap(tiny_llama(), None, num_speculative_tokens=0, backend="batch_invariant", kv_cache_tokens=800) as model:
        params = SamplingParams(10, logprobs=0, logprobs_mode="processed", seed=1, **drawn)
        done = model.generate(prompts, params)
        found = model.score(prompts, [each.token_ids for each in done], **drawn)
        other = model.score(prompts, [each.token_ids for each in done], **{**drawn, "temperature": 0.71})
    for completion, score, wrong in zip(done, found, other, strict=True):
        own = [each.logprob for each in completion.logprobs or ()]
        assert [each.logprob for each in score.logprobs] == own != [each.logprob for each in wrong.logprobs]
