"""The coloured pieces of an answer, and the prompts of a conversation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from jinja2.exceptions import TemplateError

from evals.data.datasets import Question, opening, render
from evals.runs.answers import segments
from specdec.errors import InvalidInputError
from specdec.requests.request import Completion
from specdec.requests.stats import RequestStats, RoundRecord


def completion(text: str, rounds: list[tuple[int, int, int]], drafts: list[str] | None) -> Completion:
    ids = [ord(c) for c in text]
    stats = RequestStats(tuple(RoundRecord(*r) for r in rounds))
    given = None if drafts is None else tuple(tuple(ord(c) for c in d) for d in drafts)
    return Completion(text, ids, [1], "eos", stats, given)


def test_accepted_rejected_and_own_tokens(plant: SimpleNamespace) -> None:
    # "a" from the prompt; of "bcX" two are accepted and the target says "d"; "YZ" is refused; all of "fg" is accepted.
    answer = completion("abcdefgh", [(3, 2, 3), (2, 0, 1), (2, 2, 3)], ["bcX", "YZ", "fg"])
    assert segments(plant.Tokenizer(), answer) == (
        ("target", "a"),
        ("accepted", "bc"),
        ("rejected", "X"),
        ("target", "d"),
        ("rejected", "YZ"),
        ("target", "e"),
        ("accepted", "fg"),
        ("target", "h"),
    )


def test_drafts_beyond_a_stop_are_not_shown_as_part_of_the_answer(plant: SimpleNamespace) -> None:
    answer = completion("abc", [(4, 4, 2)], ["bcde"])
    assert segments(plant.Tokenizer(), answer) == (("target", "a"), ("accepted", "bc"))


def test_without_drafts_there_is_nothing_to_show(plant: SimpleNamespace) -> None:
    assert segments(plant.Tokenizer(), completion("ab", [(0, 0, 1)], None)) == ()


def test_a_template_that_refuses_is_an_error_of_the_tree(
    plant: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TemplateError("roles must alternate")

    monkeypatch.setattr(plant.Tokenizer, "apply_chat_template", refuse)
    with pytest.raises(InvalidInputError, match=r"with the roles system, user: roles must alternate"):
        render(plant.Tokenizer(), opening(Question("0", ("q",), (("user", "h"),)), "be brief"), True)


def test_plain_prompts_join_the_messages(plant: SimpleNamespace) -> None:
    tokenizer = plant.Tokenizer()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.decode(render(tokenizer, messages, False)) == "a\n\nb"
