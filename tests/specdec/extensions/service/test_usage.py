"""Usage in OpenAI's format: what is counted of several prompts and of several samples of each."""

from __future__ import annotations

from specdec.extensions.openai_format import usage_of
from tests.specdec.extensions.completions import completion


def test_a_prompt_counts_once_however_many_samples_it_has() -> None:
    """Of two prompts of four tokens with three samples of three each; drafts of all of them."""
    done = [completion(sample_index=i % 3) for i in range(6)]
    found = usage_of(done)
    assert (found["prompt_tokens"], found["completion_tokens"], found["total_tokens"]) == (8, 18, 26)
    assert found["completion_tokens_details"] == {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 12}
