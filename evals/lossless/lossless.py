"""The lossless evaluation: greedy identity and the distribution test, one document, one verdict.

With `sampling="keyed"` sampled answers must be identical, too, which is more than their distribution.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import timedelta

from evals.acceptance.acceptance import settings
from evals.acceptance.summary import Json, by_arm
from evals.lossless import distribution, verdicts
from evals.lossless.distribution import WINDOW, DistributionTest, trials
from evals.lossless.evidence import Sampling
from evals.lossless.greedy import KEYED_TEMPERATURE, compare_greedy
from evals.runs.answers import Answer, failures
from evals.runs.conversations import Work, Worker
from evals.runs.executor import Executor, Plan, Report, collect
from evals.runs.store import RunStore
from evals.runs.verdict import Verdict, together
from specdec.errors import InvalidInputError
from specdec.interrupts import interrupts_as_they_are

SCHEMA_VERSION = 2
FEWEST = 100
"""Samples of each place."""
_PILOT_ROWS = 8
_PILOT_TOKENS = 8
_REPLAY = 3.0
"""Seconds of a replayed text over those of a prompt: of float64 over float32 on a CPU, measured."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a check if no answer ends before its limit: of each question, and of each sample at all places."""

    question_s: float
    sample_s: float

    @classmethod
    def measured(cls, worker: Worker, plan: Plan, mode: str, places: int) -> Cost:
        """From a few tokens of the first questions under each configuration."""
        params = replace(plan.asking.params, max_new_tokens=_PILOT_TOKENS, ignore_eos=True)
        chunk = plan.data.questions[: min(plan.batch_size, _PILOT_ROWS)]
        arms = len(plan.arms)
        answers = worker.answer(Work(0, chunk, plan.arms, replace(plan.asking, params=params)))
        turns = [answer.turns[0] for answer in answers if answer.turns]  # each has the times of its whole batch
        prompt_s = sum(turn.prefill_s for turn in turns) / len(chunk) ** 2
        token_s = sum(turn.decode_s for turn in turns) / len(chunk) ** 2 / (_PILOT_TOKENS - 1)
        a_question = sum(len(question.turns) for question in plan.data.questions) / len(plan.data.questions)
        greedy_s = a_question * (prompt_s + plan.asking.params.max_new_tokens * token_s)
        if mode == "greedy":
            return cls(greedy_s, 0.0)
        keyed = worker.models[plan.arms[0].model].config.keyed
        k = max(arm.k for arm in plan.arms)
        replay_s = _REPLAY * prompt_s / arms
        search_s = (prompt_s + WINDOW * token_s) / arms + replay_s
        sample_s = (
            places * len(trials(1, k)) * ((k + 2) * token_s + replay_s / 2)
        )  # at most half of them have own nodes
        return cls(search_s + ((mode == "both") + keyed) * greedy_s, sample_s)

    def of(self, questions: int, samples: int) -> float:
        """Of the whole check."""
        return questions * self.question_s + samples * self.sample_s

    def within(self, seconds: float, questions: int, samples: int) -> tuple[int, int]:
        """As many questions and samples as fit, both fewer by the same share, but at least FEWEST samples.

        Raises:
            InvalidInputError: one question and the fewest samples take more.
        """
        if (whole := self.of(questions, samples)) <= seconds:
            return questions, samples
        samples = max(int(samples * seconds / whole), FEWEST) if self.sample_s else samples
        if (least := self.of(1, samples)) > seconds:
            raise InvalidInputError(
                f"one question and {samples} samples of each place may take {timedelta(seconds=round(least))}, more "
                "than --budget; raise it, or give a smaller --max-new-tokens, fewer --sample-prompts or --mode greedy"
            )
        return min(int((seconds - self.of(0, samples)) / self.question_s), questions), samples


@interrupts_as_they_are()
def check(
    executor: Executor,
    plan: Plan,
    store: RunStore,
    report: Report,
    mode: str = "both",
    samples: int = Sampling.samples,
    places: int = 2,
) -> Json:
    """Run the check and return its document; `verdict` is one of `Verdict`, `passed` whether it is PASS.

    plan: of the greedy part. mode: "greedy", "sampled" or "both". samples, places: of the distribution test.
    """
    facts = executor.facts()  # it reads all weights
    document: Json = {
        "schema": "specdec.lossless",
        "schema_version": SCHEMA_VERSION,
        "provenance": {
            "settings": settings(plan, facts),
            "settings_sha256": store.key,
            "seed": plan.asking.seed,
        },
    }
    if mode != "sampled":
        document["greedy"] = identity(executor, plan, collect(executor, plan, store, report))
    if mode != "greedy":
        if facts[plan.arms[0].model]["engine"]["sampling"] == "keyed":
            document["keyed"] = keyed_identity(executor, plan)
        document["sampled"] = distribution_of(executor, plan, samples, places)
    parts = [document[part] for part in ("greedy", "keyed", "sampled") if part in document]
    document["verdict"] = together(Verdict(part["verdict"]) for part in parts)
    document["passed"] = document["verdict"] is Verdict.PASS
    return document


def answers_to(executor: Executor, plan: Plan) -> list[Answer]:
    """The answers to all questions, by question. No store has them: it keeps one answer to a question."""
    places = {question.id: place for place, question in enumerate(plan.data.questions)}
    answers = [answer for found in executor.run(plan.works) for answer in found]
    return sorted(answers, key=lambda answer: places[answer.question_id])


def identity(executor: Executor, plan: Plan, answers: list[Answer]) -> Json:
    """Whether answers of all configurations are equal; `compare_greedy` judges those that are not."""
    failed = failures(answers)
    found = compare_greedy(executor, plan.data, plan.arms, by_arm(answers, plan.arms), plan.asking)
    verdict = together([Verdict(found["verdict"]), *([Verdict.NOT_TESTED] if failed else [])])
    return {**found, "failures": failed, "verdict": verdict}


def keyed_identity(executor: Executor, plan: Plan) -> Json:
    """`identity` of answers that are sampled, of a model with `sampling="keyed"`."""
    params = replace(plan.asking.params, temperature=KEYED_TEMPERATURE)
    drawn = replace(plan, asking=replace(plan.asking, params=params))
    return identity(executor, drawn, answers_to(executor, drawn))


def distribution_of(executor: Executor, plan: Plan, samples: int, places: int) -> Json:
    """The distribution test; for `samples` and `places` see `check`."""
    test = DistributionTest(plan.data.questions, plan.arms, plan.asking, samples, places)
    tested = executor.on_one(test)
    found = tested.search
    return {
        "definition": distribution.DEFINITION,
        "alpha": verdicts.ALPHA,
        "power": verdicts.POWER,
        "questions": found.questions,
        "positions": found.positions,
        "places": [{"name": str(spot), **asdict(spot)} for spot in found.spots],
        "arms": [asdict(fit) for fit in tested.fits],
        "verdict": together(fit.verdict for fit in tested.fits),
    }
