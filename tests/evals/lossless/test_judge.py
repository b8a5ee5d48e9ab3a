"""The judge of a divergence replays just the tokens before it, of the turn in which it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evals.data.datasets import Question
from evals.lossless.greedy import Difference, Replay, compare_greedy, first_difference, judge
from evals.runs.answers import Answer, Turn
from evals.runs.conversations import Configuration
from evals.runs.verdict import Verdict
from specdec.requests.stats import RoundRecord

FIRST, SECOND = (70, 71, 72, 73, 74), (80, 81, 82, 83)


def answer(*turns: tuple[int, ...]) -> Answer:
    """Turns of these tokens, whose text is their letters."""
    made = (Turn("".join(map(chr, ids)), ids, "length", 1, len(ids), ()) for ids in turns)
    return Answer("q", "alone", "all", "all", tuple(made))


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("position", [0, 1, 3])
def test_the_judge_replays_what_stands_before_the_difference(
    turn: int, position: int, plant: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the token that differs, nor one less: the tokens of the answer are all different."""
    asked: list[list[int]] = []
    logits = torch.arange(100.0)
    scores = SimpleNamespace(logits=lambda ids: (asked.append(ids), logits)[1])
    monkeypatch.setattr(Replay, "of", lambda model: scores)
    tokenizer = plant.Tokenizer()
    model = SimpleNamespace(tokenizer=tokenizer, hf_model=SimpleNamespace(dtype=torch.float32))
    worker: Any = SimpleNamespace(models={"main": model})
    alone = answer(FIRST, SECOND)
    wrong = [list(FIRST), list(SECOND)]
    wrong[turn][position] = 99
    place = first_difference(alone, answer(tuple(wrong[0]), tuple(wrong[1])))
    assert place == Difference(turn, position, (FIRST, SECOND)[turn][position], 99)
    question = Question("q", ("one?", "two?"))
    (verdict,) = judge(worker, Configuration("k", 2), plant.asking(), ((question, alone, place),))
    said = "<user>one?<assistant>" if turn == 0 else f"<user>one?<assistant>{alone.turns[0].text}<user>two?<assistant>"
    assert asked == [[*tokenizer(said)["input_ids"], *(FIRST, SECOND)[turn][:position]]]
    assert verdict.behind == 99 - place.alone and not verdict.allowed and verdict.gap == 1


def test_an_answer_that_went_on_where_the_other_ended_is_a_defect(
    plant: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    scores = SimpleNamespace(logits=lambda ids: (asked.append(ids), torch.zeros(100))[1])
    monkeypatch.setattr(Replay, "of", lambda model: scores)
    model = SimpleNamespace(tokenizer=plant.Tokenizer(), hf_model=SimpleNamespace(dtype=torch.float32))
    worker: Any = SimpleNamespace(models={"main": model})
    place = first_difference(answer(FIRST), answer(FIRST[:3]))
    assert place == Difference(0, 3, FIRST[3], None)
    case = (Question("q", ("one?",)), answer(FIRST), place)
    (verdict,) = judge(worker, Configuration("k", 2), plant.asking(), (case,))
    assert asked[0][-3:] == list(FIRST[:3]) and verdict.behind == float("inf") and not verdict.allowed


@pytest.mark.parametrize(("dtype", "units"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize("best", [4.0, 400.0])
def test_near_ties_in_half_precision_are_measured_by_the_best_logit(
    dtype: torch.dtype, units: float, best: float, plant: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 units in the last place; torch's eps is the distance from 1 to the next number, two such units."""
    for behind, allowed in ((0.9, True), (1.1, False)):
        logits = torch.zeros(100)
        logits[FIRST[0]], logits[99] = best, best * (1 - behind * 16 * units)
        monkeypatch.setattr(Replay, "of", lambda model, logits=logits: SimpleNamespace(logits=lambda ids: logits))
        model = SimpleNamespace(tokenizer=plant.Tokenizer(), hf_model=SimpleNamespace(dtype=dtype))
        worker: Any = SimpleNamespace(models={"main": model})
        case = (Question("q", ("one?",)), answer(FIRST), Difference(0, 0, FIRST[0], 99))
        (verdict,) = judge(worker, Configuration("k", 2), plant.asking(), (case,))
        assert verdict.allowed is allowed


def test_answers_made_without_drafts_are_equal_and_not_tested(plant: SimpleNamespace) -> None:
    arms, nobody = (Configuration("alone", 0), Configuration("k", 2)), SimpleNamespace()
    executor: Any = nobody
    verdicts = []
    for rounds in ((), (RoundRecord(2, 1, 2),)):
        turn = Turn("x", FIRST, "length", 1, 5, rounds)
        kept = {arm.name: [Answer("0", arm.name, "all", "all", (turn,))] for arm in arms}
        found = compare_greedy(executor, plant.questions(1), arms, kept, plant.asking())
        assert found["arms"][0]["identical"] == 1 and found["arms"][0]["drafts"] == 2 * len(rounds)
        verdicts.append(found["verdict"])
    assert verdicts == [Verdict.NOT_TESTED, Verdict.PASS]
