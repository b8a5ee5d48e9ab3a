"""Greedy answers with and without speculation must be equal; where they are not, a replay in float64 gives the verdict.

Different batch shapes round differently, so two candidates that are equal but for rounding may swap. That, and only
that, is allowed: the tokens of both configurations within `tolerance` of the best logit in the replay. All else is a
defect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from evals.acceptance.summary import Json
from evals.data.datasets import DataSet, Question
from evals.data.prompts import opening, render
from evals.runs.answers import Answer
from evals.runs.executor import Executor
from evals.runs.runner import Asking, Configuration
from evals.runs.verdict import Verdict, together
from evals.runs.worker import Worker

if TYPE_CHECKING:
    from evals.lossless.replay import Replay

FLOAT32_TOLERANCE = 1e-4
_HALF_ULPS = 8.0
VERDICT = (
    "A divergence is allowed only where the replay puts the tokens of both configurations within the tolerance of the "
    f"best logit ({FLOAT32_TOLERANCE:g} in a float64 replay of a float32 model; for half precision {_HALF_ULPS:g} "
    "units in the last place of the best logit, replayed in float32). NOT TESTED: no draft was verified."
)


@dataclass(frozen=True)
class Divergence:
    """The first place where two answers to one question differ.

    Attributes:
        turn, position: which answer, and which new token of it.
        alone, speculative: the two tokens (None: it had ended).
        gap: top-1 less top-2 logit in the replay. behind: how far the lower of the two tokens is behind the best logit.
        tolerance: what `behind` may be. allowed: the verdict.
    """

    question_id: str
    arm: str
    turn: int
    position: int
    alone: int | None
    speculative: int | None
    gap: float
    behind: float
    tolerance: float
    allowed: bool


@dataclass(frozen=True)
class Place:
    """Where two answers differ, before it was judged."""

    turn: int
    position: int
    alone: int | None
    speculative: int | None


def first_difference(alone: Answer, speculative: Answer) -> Place | None:
    """The first turn and token in which two answers differ, or None."""
    for turn, (left, right) in enumerate(zip(alone.token_ids, speculative.token_ids, strict=True)):
        if left != right:
            shorter = min(len(left), len(right))
            same = next((i for i in range(shorter) if left[i] != right[i]), shorter)
            return Place(turn, same, _at(left, same), _at(right, same))
    return None


def _at(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None


@dataclass(frozen=True)
class Judge:
    """The verdicts on the divergences of one configuration, as work for one worker: the replay runs where the model is.

    Attributes:
        cases: (question, the target's own answer, where the other one differs).
    """

    arm: Configuration
    asking: Asking
    cases: tuple[tuple[Question, Answer, Place], ...]

    def __call__(self, worker: Worker) -> list[Divergence]:
        """One verdict a case."""
        from evals.lossless.replay import Replay

        model = worker.models[self.arm.model]
        replay = Replay.of(model)
        return [self._verdict(model, replay, *case) for case in self.cases]

    def _verdict(self, model: Any, replay: Replay, question: Question, alone: Answer, place: Place) -> Divergence:
        """Replay the common prefix of a divergence."""
        prompt = _prompt(model.tokenizer, question, alone, place.turn, self.asking)
        common = alone.token_ids[place.turn][: place.position]
        logits = replay.logits([*prompt, *common]).double()
        top = logits.topk(2).values
        tolerance = _tolerance(model.hf_model.dtype, float(top[0]))
        behind = float("inf")  # one configuration went on where the other had ended
        if place.alone is not None and place.speculative is not None:
            behind = float(top[0] - logits[[place.alone, place.speculative]].min())
        return Divergence(
            question_id=question.id,
            arm=self.arm.name,
            turn=place.turn,
            position=place.position,
            alone=place.alone,
            speculative=place.speculative,
            gap=float(top[0] - top[1]),
            behind=behind,
            tolerance=tolerance,
            allowed=behind < tolerance,
        )


def _tolerance(dtype: Any, best: float) -> float:
    import torch

    if dtype in (torch.float32, torch.float64):
        return FLOAT32_TOLERANCE
    return float(_HALF_ULPS * torch.finfo(dtype).eps * abs(best))


def _prompt(tokenizer: Any, question: Question, answer: Answer, turn: int, asking: Asking) -> list[int]:
    """The prompt of one turn, with the answers that went before it."""
    messages = opening(question, asking.system)
    for number in range(turn + 1):
        messages.append({"role": "user", "content": question.turns[number]})
        if number < turn:
            messages.append({"role": "assistant", "content": answer.turns[number].text})
    return render(tokenizer, messages, asking.templated)


def compare_greedy(
    executor: Executor, data: DataSet, arms: Sequence[Configuration], kept: dict[str, list[Answer]], asking: Asking
) -> Json:
    """Compare each configuration with the first one, question by question; every divergence is judged.

    kept: answers of each configuration to the same questions, in the same order.
    """
    questions = {question.id: question for question in data.questions}
    baseline = kept[arms[0].name]
    results = []
    for arm in arms[1:]:
        pairs = zip(baseline, kept[arm.name], strict=True)
        places = [(left, found) for left, right in pairs if (found := first_difference(left, right)) is not None]
        cases = tuple((questions[left.question_id], left, place) for left, place in places)
        verdicts = executor.on_one(Judge(arm, asking, cases)) if cases else []
        results.append(_arm_result(arm, kept[arm.name], verdicts))
    return {"definition": VERDICT, "arms": results, "verdict": together(result["verdict"] for result in results)}


def _arm_result(arm: Configuration, answers: Sequence[Answer], verdicts: Sequence[Divergence]) -> Json:
    total, rounds = len(answers), [record for answer in answers for record in answer.rounds]
    drafts, defects = sum(record.drafted for record in rounds), sum(not v.allowed for v in verdicts)
    tested = Verdict.PASS if drafts else Verdict.NOT_TESTED  # answers made without any draft are equal by construction
    return {
        "name": arm.name,
        "k": arm.k,
        "questions": total,
        "tokens": sum(len(ids) for answer in answers for ids in answer.token_ids),
        "drafts": drafts,
        "accepted": sum(record.accepted for record in rounds),
        "identical": total - len(verdicts),
        "near_ties": sum(v.allowed for v in verdicts),
        "defects": defects,
        "divergences": [_json(v) for v in verdicts],
        "verdict": Verdict.FAIL if defects else tested,
    }


def _json(divergence: Divergence) -> Json:
    found = asdict(divergence)
    return {**found, "behind": None if divergence.behind == float("inf") else divergence.behind}
