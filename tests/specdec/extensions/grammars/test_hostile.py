"""Grammars as nobody means them: what they ask ends their own request by name, and harms no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import free_everywhere

from specdec import Grammar, InvalidInputError, RequestFailedError, SamplingParams
from tests.specdec.extensions.grammars.spelled import END, SPELLED, Matcher, text_of
from tests.specdec.extensions.grammars.test_grammars import (
    GRAMMARS,
    PROMPTS,
    K,
    made,
    params,
    right_tokens,
    without_eos,
)

pytest.importorskip("llguidance")
A, B, L = (SPELLED.index(text) for text in "abl")


class NothingAfterL(Matcher):
    """Letters a, b and l; nothing follows an l."""

    def __init__(self) -> None:
        super().__init__("[abl]*")

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0
        for token_id in () if self._ids[-1:] == [L] else (A, B, L):
            mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


@pytest.mark.parametrize("k", [0, K])
@pytest.mark.cases(1)
def test_dead_ends_behind_rejected_drafts_are_forgotten(k: int) -> None:
    model = made("lookup", lookup_min=1, lookup_max=3)
    own = params(NothingAfterL(), logit_bias={L: -30.0}, num_speculative_tokens=k)
    (found,) = model.generate([A, L, B, L] * 4, own)
    assert found.finish_reason == "length" and set(found.token_ids) <= {A, B}


def raising(method: str) -> Any:
    def fail(self: Any, *given: Any) -> Any:
        raise ValueError("boom")

    return type("Raises", (Matcher,), {method: fail})("[ab]{9}")


@pytest.mark.parametrize("method", ["fill", "advance", "rollback"])
@pytest.mark.cases(1)
def test_what_a_matcher_raises_ends_its_request_alone(method: str) -> None:
    model = made()
    found: list[int] = []
    with pytest.raises(RequestFailedError, match="its grammar raised ValueError: boom"):
        for update in model.stream([PROMPTS[0], PROMPTS[1]], [params(raising(method)), params(GRAMMARS[0][0])]):
            found += update.token_ids if update.index == 1 else []
    assert found == right_tokens(1, GRAMMARS[0][1], False) and free_everywhere(model)


@pytest.mark.parametrize("k", [0, K])
@pytest.mark.parametrize("options", [{"min_new_tokens": 8}, {"suppress_tokens": [END]}])
def test_options_that_leave_nothing_end_the_request_by_name(k: int, options: Any) -> None:
    own = params(Grammar.choice(["ab", "12"]), num_speculative_tokens=k, **options)
    with pytest.raises(RequestFailedError, match=r"its (grammar|options) raised (Specdec|Value)Error"):
        made().generate(PROMPTS[0], replace(own, ignore_eos=False))


def test_ends_that_are_text_come_where_the_text_may() -> None:
    model, brace = made(), SPELLED.index("}")
    (found,) = model.generate(PROMPTS[0], params(Grammar.choice(["{1}"]), stop_token_ids=(brace,)))
    assert text_of(found.token_ids) == "{1}" and found.finish_reason == "stop"


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.cases(1)
def test_requests_with_other_ends_beside_each_other(order: int) -> None:
    model = made(tokenizer=without_eos())
    ends = SPELLED.index("u"), SPELLED.index("y")
    asked = [(Grammar.regex("[ab]{2}"), ends[0]), (Grammar.regex("[12]{3}"), ends[1])][::order]
    found = model.generate(PROMPTS[:2], [SamplingParams(20, grammar=own, stop_token_ids=(end,)) for own, end in asked])
    alone = [
        model.generate(prompt, SamplingParams(20, grammar=own, stop_token_ids=(end,)))[0]
        for prompt, (own, end) in zip(PROMPTS, asked, strict=False)
    ]
    assert [c.token_ids for c in found] == [c.token_ids for c in alone]
    assert all(c.finish_reason == "stop" and c.token_ids[-1] in ends for c in found)


@pytest.mark.slow
def test_an_end_that_the_body_can_match_is_the_first_one() -> None:
    """Also one that llguidance's greedy terms would never come to the end of."""
    model = made()
    favour = {SPELLED.index("</"): 3.0, A: 3.0}
    for grammar in (Grammar.regex("[ -~]*", begin="a", end="</"), Grammar.regex("a*", begin="a", end="a")):
        (found,) = model.generate(PROMPTS[0], params(grammar, logit_bias=favour))
        assert len(found.token_ids) > 5
    (found,) = model.generate(
        PROMPTS[0], params(Grammar.regex("/e", begin="<", end=">"), logit_bias={SPELLED.index("</e>"): 20.0})
    )
    assert text_of(found.token_ids).startswith("</e></e></e>")


def test_large_grammars() -> None:
    model = made()
    texts = [f"{a}{b}{c}" for a in "abcdef" for b in range(40) for c in "ab12cdefil"]
    (found,) = model.generate(PROMPTS[0], params(Grammar.choice(texts)))
    assert text_of(found.token_ids[:-1]) in texts


@pytest.mark.parametrize(
    "given",
    [
        {"type": ["regex"]},
        {"type": "choice", "choice": 5},
        {"type": "structural_tag", "structures": 5, "triggers": ["a"]},
        {"type": "structural_tag", "structures": [], "triggers": []},
        {"type": "structural_tag", "structures": [{"begin": "a", "end": "b", "schema": {}}], "triggers": None},
        {
            "type": "structural_tag",
            "structures": [{"begin": "a", "end": "b", "schema": 'start: /a*/ "a"'}],
            "triggers": ["a"],
        },
    ],
)
def test_wrong_formats_are_refused_by_name(given: Any) -> None:
    with pytest.raises(InvalidInputError):
        SamplingParams(grammar=given)


def test_odd_schemas_and_markers_are_served_or_refused_by_name() -> None:
    model = made()
    for schema in (True, {"type": "integer", "default": {"enum": 5}}, {"type": "integer", "x-guidance": None}):
        assert model.generate(PROMPTS[0], params(Grammar.json(schema)))
    nested: Any = {"type": "integer"}
    for _ in range(5000):
        nested = {"type": "array", "items": nested}
    with pytest.raises(InvalidInputError):
        Grammar.json(nested)
    for grammar in (
        Grammar.regex("a", begin=[99]),
        Grammar.regex("a", begin="\u00e9"),
        Grammar.regex("a", begin="a", end="\u00e9"),
        Grammar.regex("a", begin="\ud800"),
        Grammar("choice", "5"),
        Grammar("structural_tag", "5"),
    ):
        with pytest.raises(InvalidInputError):
            model.generate(PROMPTS[0], params(grammar))
