"""The generated word problems: right, reproducible, varied, and split without overlap."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fakes import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.data import arithmetic as frames
from evals.data.arithmetic import LARGEST, Problem, problems
from specdec.errors import InvalidInputError

NOTE = re.compile(r"(\d+)([-+*/])(\d+) = \$?<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")
RESULT_OF = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


def complaint(problem: Problem) -> str | None:
    """What is wrong with a worked answer, or None; written independently of the generator."""
    *lines, last = problem.answer.split("\n")
    if last != f"#### {problem.result}":
        return f"last line is {last!r}"
    known = {int(number) for number in re.findall(r"\d+", problem.question)}
    value = None
    for line in lines:
        notes = NOTE.findall(line)
        if len(notes) != 1 or line.count("<<") != 1:
            return f"not one calculation in {line!r}"
        *outside, left, operator, right, noted, written = notes[0]
        value = RESULT_OF[operator](int(left), int(right))
        if outside != [left, operator, right] or {noted, written} != {str(value)}:
            return f"wrong calculation in {line!r}"
        if operator == "/" and value * int(right) != int(left):
            return f"division with a remainder in {line!r}"
        if not {int(left), int(right)} <= known | {2, 3, 4}:
            return f"a number from nowhere in {line!r}"
        known.add(value)
    return None if value == problem.result else f"the last calculation gives {value}"


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32), split=st.sampled_from(["train", "heldout"]))
def test_every_answer_is_worked_correctly(seed: int, split: str) -> None:
    for problem in problems(split, 20, seed):
        assert complaint(problem) is None
        assert 2 <= problem.result <= LARGEST
        assert not re.search(r"[{}]|\bNone\b", problem.question + problem.answer)
        assert problem.question.endswith("?")


def test_the_check_of_answers_sees_planted_errors() -> None:
    problem = next(p for p in problems("train", 50, seed=3) if "+" in p.answer)
    line = problem.answer.split("\n")[0]
    wrong_sum = re.sub(r">>(\d+)", lambda m: f">>{int(m[1]) + 1}", line)
    for broken in (
        replace(problem, result=problem.result + 1),
        replace(problem, answer=problem.answer.replace(line, wrong_sum)),
        replace(problem, question="How many?"),
        replace(problem, answer=f"I guess.\n#### {problem.result}"),
    ):
        assert complaint(broken) is not None


def test_same_arguments_give_the_same_problems_and_other_seeds_others() -> None:
    assert problems("train", 30, seed=5) == problems("train", 30, seed=5)
    assert problems("train", 10, seed=5) == problems("train", 30, seed=5)[:10]
    assert problems("train", 30, seed=5) != problems("train", 30, seed=6)


def test_the_first_problem_does_not_change_between_releases() -> None:
    """The weights were trained on this generator: a change of its output must be noticed."""
    problem = problems("heldout", 1, seed=1)[0]
    assert problem.question == (
        "There are 146 people on a train. At the next stop half of the people get off. "
        "How many people are on the train now?"
    )
    assert problem.answer == "146/2 = <<146/2=73>>73 people stay.\n#### 73"


@pytest.mark.slow
@pytest.mark.thorough
def test_splits_share_no_question_whatever_the_seeds() -> None:
    train = {p.question for seed in range(4) for p in problems("train", 2_000, seed)}
    heldout = {p.question for seed in range(4) for p in problems("heldout", 500, seed)}
    assert len(train) > 7_500 and len(heldout) > 1_900
    assert train.isdisjoint(heldout)


@pytest.mark.slow
def test_questions_of_one_call_are_all_different() -> None:
    assert len({p.question for p in problems("train", 3_000, seed=9)}) == 3_000


@pytest.mark.slow
@pytest.mark.thorough
def test_every_sentence_frame_is_used_and_there_are_enough_of_them() -> None:
    all_frames = frames.OPENINGS + frames.EVENTS
    assert len({frame.text for frame in all_frames}) >= 60
    questions = "\n".join(p.question for p in problems("train", 20_000, seed=2))
    unused = [frame.text for frame in all_frames if not re.search(pattern(frame.text), questions)]
    assert unused == []


def pattern(text: str) -> str:
    """A regular expression for a frame's sentence; each field matches something."""
    return ".+?".join(re.escape(part) for part in re.split(r"\{\w+\}", text))


def test_step_counts_are_one_to_three_and_all_occur() -> None:
    assert {p.answer.count("\n") for p in problems("train", 300, seed=4)} == {1, 2, 3}


def test_frames_lead_only_to_subjects_that_have_a_question() -> None:
    assert {frame.gives for frame in frames.OPENINGS + frames.EVENTS} == set(frames.QUESTIONS)


def test_bad_arguments_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(InvalidInputError, match=r"'test'.*train, heldout"):
        problems("test", 1)
    with pytest.raises(InvalidInputError, match="-1"):
        problems("train", -1)
    assert problems("train", 0) == []
