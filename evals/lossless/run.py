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
    """Run the check and return its document; `passed` is the verdict."""
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
    document["passed"] = all(part["passed"] for part in parts)
    return document


def _greedy(executor: Executor, plan: Check, store: RunStore, report: Report) -> Json:
    arms = plan.greedy.arms
    answers = collect(executor, plan.data, arms, plan.asking, store, batch_size=plan.batch_size, report=report)
    failures = [{"question_id": a.question_id, "arm": a.arm, "error": a.error} for a in answers if a.error is not None]
    found = compare_greedy(executor, plan.data, arms, by_arm(answers, arms), plan.asking)
    return {**found, "failures": failures, "passed": found["passed"] and not failures}


def _sampled(executor: Executor, plan: Check, prompts: int) -> Json:
    sampling = Sampling(samples=plan.samples)
    questions = plan.data.limited(prompts).questions
    fits = executor.on_one(DistributionTest(questions, plan.greedy.arms, plan.asking, sampling))
    return {
        "definition": distribution.DEFINITION,
        "sampling": asdict(sampling),
        "arms": [asdict(fit) for fit in fits],
        "passed": all(fit.passed for fit in fits),
    }


def print_check(console: Console, document: Json) -> None:
    """Print the document and the verdict."""
    if "greedy" in document:
        _print_greedy(console, document["greedy"])
    if "sampled" in document:
        _print_sampled(console, document["sampled"])
    passed = document["passed"]
    text = "output unchanged by speculation" if passed else "speculation changes the output"
    console.print(f"{'PASS' if passed else 'FAIL'}: {text}", style="bold green" if passed else "bold red")


def _print_greedy(console: Console, greedy: Json) -> None:
    for arm in greedy["arms"]:
        console.print(
            f"greedy, {arm['name']}: {arm['identical']} of {arm['questions']} identical, "
            f"{arm['near_ties']} near ties, {arm['defects']} defects"
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
    for fit in sampled["arms"]:
        name = fit["arm"] if fit["arm"] != BASELINE else f"{BASELINE} (control)"
        console.print(
            f"sampled, {name}: chi-square {fit['statistic']:.1f}, {fit['degrees']} degrees, p = {fit['p_value']:.3g}, "
            f"{fit['impossible']} impossible; {fit['samples']} samples find a distance of {fit['detectable']:.3f}"
        )
    console.print(sampled["definition"], style="dim", highlight=False)
