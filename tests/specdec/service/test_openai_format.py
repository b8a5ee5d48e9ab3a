"""OpenAI's form of what was generated."""

from __future__ import annotations

import json

import pytest

from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.service.openai_format import response_of


@pytest.mark.parametrize("chat", [True, False])
def test_log_probabilities_of_what_cannot_come_are_json(chat: bool) -> None:
    """A processed one of a token outside of top-k is -inf, which JSON has not."""
    params = SamplingParams(4, top_k=1, temperature=1.0, logprobs=3, logprobs_mode="processed")
    with SpeculativeModel.from_pretrained("gsm-llama", device="cpu", max_num_seqs=2, max_model_len=128) as model:
        found = model.generate(["What is 2 + 3?"], params)
        assert any(top[1] == float("-inf") for each in found[0].logprobs or () for top in each.top)
        text = json.dumps(response_of(found, model.tokenizer, chat), allow_nan=False)
    assert "-9999.0" in text
