"""Token ids that model and tokenizer do not share get a named error, and harm nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import LETTERS, VOCAB, LetterTokenizer, hf_greedy, random_prompts, tiny_llama

from specdec import SamplingParams, SpeculativeModel
from specdec.errors import SpecdecError

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 24, "page_size": 4, "kv_cache_tokens": 200}
(PROMPT,) = random_prompts((9,))
FEW = SamplingParams(max_new_tokens=6)


def load(model: Any, tokenizer: Any) -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(model, tokenizer=tokenizer, **SIZES)


class AddedTokens(LetterTokenizer):
    """Has a token '#' after the model's vocabulary."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [VOCAB if c == "#" else LETTERS.index(c) for c in text]}


class ShortTable(LetterTokenizer):
    """Knows the first `known` ids only, and fails as `error` for others."""

    def __init__(self, known: int, error: type[Exception] = IndexError) -> None:
        self.known, self.error = known, error

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        if any(t >= self.known for t in token_ids):
            raise self.error("no such token")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_an_added_token_is_named() -> None:
    wrapped = load(tiny_llama(), AddedTokens())
    with pytest.raises(SpecdecError, match=r"token id 64 is outside the vocabulary 0 … 63; if a tokenizer made it"):
        wrapped.generate("ab#", FEW)
    assert wrapped.generate([PROMPT], FEW)[0].token_ids == hf_greedy(PROMPT, 6)


def test_logits_wider_than_the_embedding() -> None:
    """A padded output embedding: ids that the model has no input for are no prompt."""
    model = tiny_llama()
    padded = torch.nn.Linear(32, 80, bias=False)
    padded.weight.data = torch.cat([model.lm_head.weight.data, torch.zeros(16, 32)])
    model.lm_head = padded.eval()
    wrapped = load(model, LetterTokenizer())
    with pytest.raises(SpecdecError, match=r"token id 70 is outside the vocabulary 0 … 63"):
        wrapped.generate([[1, 70, 2]], FEW)
    assert wrapped.generate([PROMPT], FEW)[0].token_ids == hf_greedy(PROMPT, 6)


@pytest.mark.parametrize("error", [IndexError, KeyError, TypeError, OverflowError])
@pytest.mark.parametrize("stop", [(), ("zzzz",)])
def test_an_id_that_the_tokenizer_lacks(error: type[Exception], stop: tuple[str, ...]) -> None:
    said = hf_greedy(PROMPT, 6)
    unknown = max(said)
    wrapped = load(tiny_llama(), ShortTable(unknown, error))
    with pytest.raises(SpecdecError, match=rf"cannot decode token id {unknown}, which the model generated"):
        wrapped.generate([PROMPT], SamplingParams(max_new_tokens=6, stop=stop))
    before = said[: said.index(unknown)]
    if before:
        short = SamplingParams(max_new_tokens=len(before))
        assert wrapped.generate([PROMPT], short)[0].token_ids == before


def test_a_tokenizer_beyond_the_embedding_with_prediction_modules() -> None:
    """Loading such a module reads a text with the target."""

    class Shifted(LetterTokenizer):
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1_000_000 + ord(c) for c in text]}

    with pytest.raises(SpecdecError, match=r"the tokenizer makes token id 10\d+, but the model's embedding has"):
        SpeculativeModel.from_pretrained("gsm-deepseek", "mtp", tokenizer=Shifted(), device="cpu", max_num_seqs=2)
