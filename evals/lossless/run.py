"""The lossless evaluation: greedy identity and the distribution test, one document, one verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from rich.console import Console
from rich.table import Table

from evals.acceptance.acceptance import BASELINE, Plan, settings, sweep
from evals.acceptance.summary import Json, by_arm
from evals.data.datasets import DataSet
from evals.lossless import distribution
from evals.lossless.distribution import DistributionTest, Sampling
from evals.lossless.greedy import compare_greedy
from evals.runs.executor import Executor, Report, collect
from evals.runs.runner import Asking
from evals.runs.store import RunStore
from evals.runs.verdict import Verdict, together

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Check:
    """What is checked. `mode`: "greedy", "sampled" or "both"."""

    data: DataSet
    ks: tuple[int, ...]
    asking: Asking
    batch_size: int = 8
    mode: str = "both"
    samples: int = 1000

    @cached_property
    def greedy(self) -> Plan:
        """The greedy part as a plan."""
        return Plan(self.data, sweep(self.ks), self.asking, self.batch_size, warmup=0)


def check(executor: Executor, plan: Check, store: RunStore, report: Report, sample_prompts: int = 2) -> Json:
    """Run the check and return its document; `verdict` is one of `Verdict`, `passed` whether it is PASS."""
    document: Json = {
        "schema": "specdec.lossless",
        "schema_version": SCHEMA_VERSION,
        "provenance": {
            "settings": settings(plan.greedy, executor.facts()),
            "settings_sha256": store.key,
            "seed": plan.asking.seed,
        },
    }
    if plan.mode != "sampled":
        document["greedy"] = _greedy(executor, plan, store, report)
    if plan.mode != "greedy":
        document["sampled"] = _sampled(executor, plan, sample_prompts)
    parts = [document[part] for part in ("greedy", "sampled") if part in document]
    document["verdict"] = together(Verdict(part["verdict"]) for part in parts)
    document["passed"] = document["verdict"] is Verdict.PASS
    return document


def _greedy(executor: Executor, plan: Check, store: RunStore, report: Report) -> Json:
    arms = plan.greedy.arms
    answers = collect(executor, plan.data, arms, plan.asking, store, batch_size=plan.batch_size, report=report)
    failures = [{"question_id": a.question_id, "arm": a.arm, "error": a.error} for a in answers if a.error is not None]
    found = compare_greedy(executor, plan.data, arms, by_arm(answers, arms), plan.asking)
    verdict = together([Verdict(found["verdict"]), *([Verdict.NOT_TESTED] if failures else [])])
    return {**found, "failures": failures, "verdict": verdict}


def _sampled(executor: Executor, plan: Check, places: int) -> Json:
    sampling = Sampling(samples=plan.samples)
    questions = plan.data.questions
    tested = executor.on_one(DistributionTest(questions, plan.greedy.arms, plan.asking, sampling, places))
    return {
        "definition": distribution.DEFINITION,
        "sampling": {**asdict(sampling), "temperature": tested.search.temperature},
        "search": {**asdict(tested.search), "places": [asdict(place) for place in tested.search.places]},
        "searched": str(tested.search),
        "arms": [asdict(fit) for fit in tested.fits],
        "verdict": together(fit.verdict for fit in tested.fits),
    }


def print_check(console: Console, document: Json) -> None:
    """Print the document and the verdict."""
    if "greedy" in document:
        _print_greedy(console, document["greedy"])
    if "sampled" in document:
        _print_sampled(console, document["sampled"])
    verdict = Verdict(document["verdict"])
    console.print(f"{verdict.value}: {_MEANING[verdict]}", style=_STYLE[verdict], highlight=False)


_MEANING = {
    Verdict.PASS: "output unchanged by speculation",
    Verdict.FAIL: "speculation changes the output",
    Verdict.NOT_TESTED: "not everything that was asked for could be tested; see the lines above",
}
_STYLE = {Verdict.PASS: "bold green", Verdict.FAIL: "bold red", Verdict.NOT_TESTED: "bold yellow"}


def _print_greedy(console: Console, greedy: Json) -> None:
    for arm in greedy["arms"]:
        console.print(
            f"greedy, {arm['name']}: {arm['verdict']}, {arm['identical']:,} of {arm['questions']:,} identical, "
            f"{arm['near_ties']} near ties, {arm['defects']} defects; {arm['tokens']:,} tokens compared, "
            f"{arm['drafts']:,} drafts verified, {arm['accepted']:,} accepted",
            highlight=False,
        )
        if arm["divergences"]:
            console.print(_divergence_table(arm["divergences"]))
    for failure in greedy["failures"]:
        console.print(f"failed: question {failure['question_id']}, {failure['arm']}: {failure['error']}", style="red")
    console.print(greedy["definition"], style="dim", highlight=False)


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
    console.print(f"sampled: {sampled['searched']}, {len(sampled['search']['places'])} chosen", highlight=False)
    if not sampled["arms"]:
        console.print(
            "sampled: NOT TESTED, no place where a drafted token is open; give other --data, more --samples, or a "
            "larger --max-new-tokens",
            style="yellow",
            highlight=False,
        )
    for fit in sampled["arms"]:
        name = fit["arm"] if fit["arm"] != BASELINE else f"{BASELINE} (control)"
        console.print(f"sampled, {name}: {fit['verdict']}, {_numbers(fit)}", highlight=False)
    console.print(sampled["definition"], style="dim", highlight=False)


def _numbers(fit: Json) -> str:
    drawn = f"{fit['samples']:,} samples at {fit['places']} place(s), {fit['drafts']:,} drafts verified"
    if fit["p_value"] is None:
        return f"0 degrees of freedom, {fit['impossible']} impossible; {drawn}"
    return (
        f"p = {fit['p_value']:.3g} (chi-square {fit['statistic']:.1f}, {fit['degrees']} degrees of freedom), "
        f"{fit['impossible']} impossible; {drawn}, {fit['accepted']:,} accepted; a distance of {fit['detectable']:.3f} "
        f"or more would be found with probability {distribution.POWER:g}"
    )
