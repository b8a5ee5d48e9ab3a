"""A head whose drafts are not accepted: one warning, with the likely cause."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from fakes import hf_greedy, random_prompts, table_head, tiny_llama, wrap

from specdec import SpecdecWarning
from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts([9, 7, 5, 6])
PARAMS = SamplingParams(40, ignore_eos=True)


def warned(model: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            tokens = [completion.token_ids for completion in model.generate(PROMPTS, PARAMS)]
            assert tokens == [hf_greedy(prompt, 40) for prompt in PROMPTS]
    return [str(each.message) for each in found if isinstance(each.message, SpecdecWarning)]


def wrong_head(model: Any) -> Any:
    """It drafts another token than the right one, always."""
    head = table_head(model)
    own = head.logits
    head.logits = lambda *given: -own(*given)
    return head


@pytest.mark.thorough
def test_a_head_of_another_model_is_told_once() -> None:
    target = tiny_llama()
    (message,) = warned(wrap(target, wrong_head(target), num_speculative_tokens=3))
    assert message.startswith("0 of the head's first ") and "another model of the same shape" in message
    assert "specdec inspect" in message


@pytest.mark.thorough
def test_as_an_error_it_ends_no_round() -> None:
    target = tiny_llama()
    model = wrap(target, wrong_head(target), num_speculative_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecdecWarning)
        assert [c.token_ids for c in model.generate(PROMPTS, PARAMS)] == [hf_greedy(p, 40) for p in PROMPTS]


@pytest.mark.parametrize("drafts", ["right", "lookup", "none"])
@pytest.mark.cases(1)
def test_others_are_not_warned_of(drafts: str) -> None:
    """A head that is right, drafts by lookup, whose acceptance is the text's, and no drafts."""
    target = tiny_llama()
    head = {"right": table_head(target), "lookup": "lookup", "none": None}[drafts]
    assert warned(wrap(target, head, num_speculative_tokens=0 if head is None else 3)) == []
