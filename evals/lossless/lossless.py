"""The lossless evaluation: greedy identity and the distribution test, one document, one verdict.

With `sampling="keyed"` sampled answers must be identical, too, which is more than their distribution.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import timedelta

from rich.console import Console
from rich.table import Table

from evals.acceptance.acceptance import BASELINE, settings
from evals.acceptance.summary import Json, by_arm
from evals.lossless import distribution, verdicts
from evals.lossless.distribution import WINDOW, DistributionTest, trials
from evals.lossless.evidence import Sampling
from evals.lossless.greedy import KEYED_TEMPERATURE, VERDICT, compare_greedy
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
        if is_keyed(facts, plan):
            document["keyed"] = keyed_identity(executor, plan)
        document["sampled"] = distribution_of(executor, plan, samples, places)
    parts = [document[part] for part in ("greedy", "keyed", "sampled") if part in document]
    document["verdict"] = together(Verdict(part["verdict"]) for part in parts)
    document["passed"] = document["verdict"] is Verdict.PASS
    return document


def is_keyed(facts: Json, plan: Plan) -> bool:
    """Whether the noise of a position decides the tokens of the model."""
    return bool(facts[plan.arms[0].model]["engine"]["sampling"] == "keyed")


def answers_to(executor: Executor, plan: Plan) -> list[Answer]:
    """The answers to all questions, by question. No store has them: it keeps one answer to a question."""
    places = {question.id: place for place, question in enumerate(plan.data.questions)}
    answers = [answer for found in executor.run(plan.works) for answer in found]
    return sorted(answers, key=lambda answer: places[answer.question_id])


def identity(executor: Executor, plan: Plan, answers: list[Answer]) -> Json:
    """Whether answers of all configurations are equal; `compare_greedy` judges those that are not."""
    arms = plan.arms
    failed = failures(answers)
    found = compare_greedy(executor, plan.data, arms, by_arm(answers, arms), plan.asking)
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
        "searched": str(found),
        "questions": found.questions,
        "positions": found.positions,
        "places": [{"name": str(spot), **asdict(spot)} for spot in found.spots],
        "arms": [asdict(fit) for fit in tested.fits],
        "verdict": together(fit.verdict for fit in tested.fits),
    }


def print_check(console: Console, document: Json) -> None:
    """Print the document and the verdict."""
    compared = [part for part in ("greedy", "keyed") if part in document]
    for part in compared:
        _print_identity(console, part, document[part])
    if compared:
        console.print(VERDICT, style="dim")
    if "sampled" in document:
        _print_sampled(console, document["sampled"])
    verdict = Verdict(document["verdict"])
    meaning = _MEANING[verdict]
    if verdict is Verdict.PASS:
        meaning = "; ".join([meaning, *reach(document)])
    console.print(f"{verdict.value}: {meaning}", style=_STYLE[verdict], soft_wrap=True)


def reach(document: Json) -> list[str]:
    """What a PASS shows: the defects that would have been found, where, and those that would not."""
    if "sampled" not in document:
        return ["greedy only: nothing is said of sampling"]
    texts = []
    for fit in document["sampled"]["arms"]:
        powers = fit["powers"]
        if seen := [_chance(power) for power in powers if power["everywhere"] >= verdicts.POWER]:
            texts.append(f"sampled, {fit['arm']}, would have been found: {', '.join(seen)}")
        if missed := [_chance(power) for power in powers if power["everywhere"] < verdicts.POWER]:
            texts.append(f"{fit['arm']} is BLIND for: {', '.join(missed)}")
    return texts


def _chance(power: Json) -> str:
    """One defect with its probability, and in how many places it alone would be enough."""
    alone = sum(one >= verdicts.POWER for one in power["places"])
    places = len(power["places"])
    where = f"at {alone} of {places} places also there alone" if alone else f"at no one of {places} places alone"
    return f"{power['defect']} ({power['everywhere']:.2f}; {where})"


_MEANING = {
    Verdict.PASS: "output unchanged by speculation",
    Verdict.FAIL: "speculation changes the output",
    Verdict.NOT_TESTED: "not everything that was asked for could be tested; see the lines above",
}
_STYLE = {Verdict.PASS: "bold green", Verdict.FAIL: "bold red", Verdict.NOT_TESTED: "bold yellow"}


def _print_identity(console: Console, part: str, found: Json) -> None:
    for arm in found["arms"]:
        console.print(f"{part}, {arm['name']}: {arm['verdict']}, {identity_text(arm)}")
        if arm["divergences"]:
            console.print(_divergence_table(arm["divergences"]))
    for failure in found["failures"]:
        console.print(f"failed: question {failure['question_id']}, {failure['arm']}: {failure['error']}", style="red")


def identity_text(arm: Json) -> str:
    """The numbers of one configuration's comparison with the target alone."""
    return (
        f"{arm['identical']:,} of {arm['questions']:,} identical, {arm['near_ties']} near ties, {arm['defects']} "
        f"defects; {arm['tokens']:,} tokens compared, {arm['drafts']:,} drafts verified, {arm['accepted']:,} accepted"
    )


def _divergence_table(divergences: list[Json]) -> Table:
    table = Table("question", "turn", "token", "alone", "speculative", "top-2 gap", "behind", "verdict")
    for found in divergences[:20]:
        behind = "ended" if found["behind"] is None else f"{found['behind']:.3g}"
        verdict = "near tie" if found["allowed"] else "DEFECT"
        numbers = (found["turn"], found["position"], found["alone"], found["speculative"])
        table.add_row(found["question_id"], *(str(n) for n in numbers), f"{found['gap']:.3g}", behind, verdict)
    if len(divergences) > 20:
        table.caption = f"and {len(divergences) - 20} more in the JSON document"
    return table


def _print_sampled(console: Console, sampled: Json) -> None:
    console.print(f"sampled: {sampled['searched']}")
    if not sampled["arms"]:
        console.print(
            "sampled: NOT TESTED, no place where a drafted token is open; give other --data, more --samples, or a "
            "larger --max-new-tokens",
            style="yellow",
        )
    for fit in sampled["arms"]:
        name = fit["arm"] if fit["arm"] != BASELINE else f"{BASELINE} (control)"
        console.print(f"sampled, {name}: {fit['verdict']}, {fit_text(fit)}")
        if fit["powers"]:
            console.print(_power_table(fit, [place["name"] for place in sampled["places"]]))
    console.print(sampled["definition"], style="dim")


def fit_text(fit: Json) -> str:
    """The numbers of one configuration's distribution test."""
    drawn = f"{fit['samples']:,} samples at {fit['places']} place(s), {fit['drafts']:,} drafts verified"
    if fit["p_value"] is None:
        return f"0 degrees of freedom, {fit['impossible']} impossible; {drawn}"
    return (
        f"p = {fit['p_value']:.3g} (chi-square {fit['statistic']:.1f}, {fit['degrees']} degrees of freedom), "
        f"p <= {fit['p_named']:.3g} for the named defects, {fit['impossible']} impossible; {drawn}, "
        f"{fit['accepted']:,} accepted"
    )


def _power_table(fit: Json, places: list[str]) -> Table:
    """The probability with which each named defect would have been found, everywhere and at each place alone."""
    table = Table(
        "would have been found",
        "everywhere",
        *places,
        caption="probability if the defect is everywhere; if it is at that place alone",
        caption_justify="left",
    )
    for power in fit["powers"]:
        table.add_row(power["defect"], *(f"{chance:.2f}" for chance in (power["everywhere"], *power["places"])))
    return table
