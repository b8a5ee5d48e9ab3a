"""Accuracy with and without speculation: lm-eval's own tasks on the same prompts, compared question by question."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from evals.acceptance.acceptance import definitions, sweep
from evals.acceptance.summary import Json, by_arm, summarize
from evals.accuracy.engine_lm import EngineLM, Report
from evals.accuracy.task_functions import check_programs_run, gsm8k
from evals.data.datasets import digest
from evals.errors import DataError
from evals.runs.answers import Answer
from evals.runs.conversations import Configuration
from evals.runs.store import RunStore, model_facts, versions
from specdec.interrupts import interrupts_as_they_are

SCHEMA_VERSION = 1
OWN_TASKS = ("specdec_arithmetic", "specdec_humaneval")
_LOCAL = ("gsm8k", "gsm8k_cot")
TASKS = Path(__file__).parent / "tasks"
_KEPT = ("results", "versions", "n-shot", "n-samples", "higher_is_better")
MCNEMAR = (
    "McNemar's exact test: two-sided binomial test (p = 1/2) of the questions that exactly one configuration has right."
)
INTERVAL = "95% interval of the paired difference of proportions, Agresti and Min (Statistics in Medicine 24, 2005)."
SPEEDUP = (
    "Ratio of totals, target alone first, then with speculation: (new tokens / wall seconds) of one pass over all "
    "questions at a time, each after an answer that is not timed. Neither finds prompts in the prefix cache: both read "
    "all of them. Without an interval; `specdec eval acceptance` has one."
)
_Z = 1.959963984540054


@dataclass(frozen=True)
class AccuracyPlan:
    """An accuracy run.

    Attributes:
        tasks: names of lm-eval tasks; "gsm8k" and "gsm8k_cot" read local data when `data_dir` is set.
        k: drafts a round of the speculative configuration. limit: first N documents of each task, None for all.
        num_fewshot: None for the task's own number. max_gen_toks: where the task gives none.
        chat_template: prompts go through it; None: where the tokenizer has one.
        unsafe_code: allow tasks that run code the model wrote.
    """

    tasks: tuple[str, ...]
    k: int
    data_dir: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    chat_template: bool | None = False
    max_gen_toks: int = 256
    seed: int = 0
    unsafe_code: bool = False

    @property
    def arms(self) -> tuple[Configuration, ...]:
        """The target alone, and with speculation."""
        return sweep((self.k,))


def settings(plan: AccuracyPlan, facts: Json) -> Json:
    """All that the answers depend on."""
    asked = {**asdict(plan), "data_dir": None if plan.data_dir is None else plan.data_dir.name}
    asked["chat_template"] = _is_templated(plan, facts["chat_template_sha256"])
    asked["prefix_cache"] = False  # answers of before this was so are of another run
    return json.loads(json.dumps({"plan": asked, "model": model_facts(facts), "versions": versions()}))


def _is_templated(plan: AccuracyPlan, template: Any) -> bool:
    """template: the tokenizer's, or its hash; None where it has none."""
    return bool(template) if plan.chat_template is None else plan.chat_template


@dataclass(frozen=True)
class Prepared:
    """A plan whose tasks and data were found. `questions`: how many there are, all tasks together."""

    plan: AccuracyPlan
    manager: TaskManager
    questions: int


def prepare(plan: AccuracyPlan) -> Prepared:
    """Find the tasks and load their data, before anything is written.

    Raises:
        DataError: an unknown task, one that generates nothing, or data that is missing.
        SpecdecError: programs cannot be run here, but would have to be.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # Our tasks, and lm-eval's folder of gsm8k; all of lm-eval's tasks for any other names.
    stock = Path(lm_eval.__file__).parent / "tasks" / "gsm8k"
    others = not set(plan.tasks) <= {*_LOCAL, *OWN_TASKS}
    metadata: Json = {} if plan.data_dir is None else {"data_dir": str(plan.data_dir)}
    manager = TaskManager(include_path=[stock, TASKS], include_defaults=others, metadata=metadata)
    for task in plan.tasks:
        if task not in manager.all_tasks:
            raise DataError(f"unknown task {task!r}; known are lm-eval's and {', '.join(OWN_TASKS)}")
    try:
        found = manager.load(_tasks(plan))["tasks"].values()
    except OSError as error:  # offline, or not found
        raise DataError(
            f"the data of {', '.join(plan.tasks)} cannot be loaded ({error}). Without a network give its files by "
            "--data FOLDER, or choose --tasks specdec_arithmetic, which needs none"
        ) from error
    for task in found:
        if task.OUTPUT_TYPE != "generate_until":
            raise DataError(
                f"the task {task.config.task!r} scores given texts ({task.OUTPUT_TYPE}) and generates nothing: "
                "speculation has no part in it, so both sides would be equal whatever it did; choose a task that "
                "generates, such as gsm8k"
            )
    sizes = [len(list(task.eval_docs)) for task in found]
    if not sum(sizes):
        raise DataError(f"the tasks {', '.join(plan.tasks)} have no questions")
    if plan.unsafe_code:
        check_programs_run()
    return Prepared(plan, manager, sum(min(size, plan.limit or size) for size in sizes))


@interrupts_as_they_are()
def run(model: Any, facts: Json, prepared: Prepared, store: RunStore, report: Report) -> Json:
    """Evaluate both configurations and return the document."""
    plan = prepared.plan
    how: Json = {"max_gen_toks": plan.max_gen_toks, "seed": plan.seed, "store": store, "report": report, "timed": True}
    results = {arm.name: _evaluate(EngineLM(model, arm, **how), prepared) for arm in plan.arms}
    # The answers of each configuration, all in the same order.
    names = sorted({name for name, _ in store.answers})
    answers = [store.answers[name, arm.name] for name in names for arm in plan.arms]
    kept = by_arm(answers, plan.arms)
    baseline, fast = kept.values()
    cached = {name: found["prefix_cache"] for name, found in results.items()}
    void = why_void(cached, baseline, fast)
    differ = [a.question_id for a, b in zip(baseline, fast, strict=True) if a.token_ids != b.token_ids]
    return {
        "schema": "specdec.accuracy",
        "schema_version": SCHEMA_VERSION,
        "provenance": {
            "settings": settings(plan, facts),
            "settings_sha256": store.key,
            "seed": plan.seed,
            "prompts_sha256": digest([a.question_id for a in baseline]),
        },
        "definitions": {**definitions(), "speedup": SPEEDUP, "mcnemar": MCNEMAR, "accuracy_interval": INTERVAL},
        "scores": scores(*results.values()),
        "identical": {"questions": len(baseline), "identical": len(baseline) - len(differ), "differ": differ},
        "arms": [_totals_only(summarize(arm, kept[arm.name], baseline, plan.seed), void) for arm in plan.arms],
        "timing": {"prefix_cache": cached, "void": void},
        "lm_eval": {name: {key: found[key] for key in _KEPT} for name, found in results.items()},
    }


def why_void(cached: Json, baseline: Sequence[Answer], fast: Sequence[Answer]) -> str:
    """Why times of the two configurations cannot be compared; "" where they can be."""
    if any(one["hit_tokens"] for one in cached.values()):
        return "prompts were found in the prefix cache and not paid for"
    if not all(turn.wall_s for answer in (*baseline, *fast) for turn in answer.turns):
        return "the run was interrupted, and requests in flight were begun twice; another --run-dir measures it whole"
    return "" if any(record.drafted for answer in fast for record in answer.rounds) else "no draft was verified"


def _evaluate(model: EngineLM, prepared: Prepared) -> Json:
    plan = prepared.plan
    found: Json = lm_eval.simple_evaluate(
        model=model,
        tasks=_tasks(plan),
        num_fewshot=plan.num_fewshot,
        limit=plan.limit,
        apply_chat_template=_is_templated(plan, model.tokenizer.chat_template),
        task_manager=prepared.manager,
        bootstrap_iters=0,
        confirm_run_unsafe_code=plan.unsafe_code,
    )
    return {
        **found,
        "prefix_cache": {name.removeprefix("prefix_"): value for name, value in model.cache_facts().items()},
    }


def _tasks(plan: AccuracyPlan) -> list[Any]:
    """The tasks by name; GSM8K's as a group with local data, where there is some."""
    if plan.data_dir is None:
        return list(plan.tasks)
    local = [task for task in plan.tasks if task in _LOCAL]
    members = [{"task": task, "custom_dataset": gsm8k} for task in local]
    others: list[Any] = [task for task in plan.tasks if task not in _LOCAL]
    return [*([{"group": "local", "task": members}] if members else []), *others]


_Scores = dict[tuple[str, str, str], dict[int, bool]]
"""{(task, filter, metric): {document: right}}."""


def _samples(result: Json) -> _Scores:
    scores: _Scores = {}
    for task, samples in result["samples"].items():
        for sample in samples:
            for metric in sample["metrics"]:
                own = scores.setdefault((task, sample["filter"], metric), {})
                own[sample["doc_id"]] = bool(sample[metric] > 0)
    return scores


def scores(alone: Json, fast: Json) -> list[Json]:
    """Two results on the same questions, for every task, filter and metric: see `paired_accuracy`."""
    found = _samples(alone)
    rival = _samples(fast)
    rows = []
    for key, right in found.items():
        documents = sorted(right)
        result = paired_accuracy([right[d] for d in documents], [rival[key][d] for d in documents])
        rows.append({**dict(zip(("task", "filter", "metric"), key, strict=True)), **result})
    return rows


def paired_accuracy(a: Sequence[bool], b: Sequence[bool]) -> Json:
    """Compare two configurations. a, b: whether each question is right, in the same order, at least one of them.

    Returns:
        total: questions; right_a, right_b: those that each configuration has right; only_a, only_b: those that it
        alone has right. difference, low, high: accuracy of b less that of a, and its interval. p_value: McNemar's
        exact test; None where both have the same questions right.
    """
    from scipy.stats import binomtest

    n = len(a)
    only_a, only_b = (sum(x and not y for x, y in zip(*pair, strict=True)) for pair in ((a, b), (b, a)))
    more = only_b - only_a
    either = only_a + only_b
    centre = more / (n + 2)
    half = _Z * math.sqrt(either + 1 - more**2 / (n + 2)) / (n + 2)
    return {
        "total": n,
        "right_a": sum(a),
        "right_b": sum(b),
        "only_a": only_a,
        "only_b": only_b,
        "difference": more / n,
        "low": max(centre - half, -1.0),
        "high": min(centre + half, 1.0),
        "p_value": float(binomtest(only_b, either, 0.5).pvalue) if either else None,
    }


def _totals_only(summary: Json, void: str) -> Json:
    """A summary without rates and intervals by question: requests overlap, so only total times mean anything.

    void: why not even these; "" where they do.
    """
    timing = summary["timing"]
    kept = {key: {"estimate": None if void else timing[key]["estimate"]} for key in ("speedup", "tokens_per_s")}
    groups = {name: {**group, "timing": {}} for name, group in summary["by_task"].items()}
    return {**summary, "timing": kept, "by_task": groups, "by_category": {}}
