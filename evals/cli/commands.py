"""`specdec eval acceptance | compare | lossless | certify | diverge`: options in, files and a table out."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evals.cli import eval_options as shared
from evals.cli.eval_options import Options
from evals.errors import require
from evals.runs.verdict import Verdict
from specdec.cli.options import COUNT, FILE, added, examples, load_options, offered, option
from specdec.config import SAMPLING
from specdec.loading import names

if TYPE_CHECKING:
    from rich.console import Console

    from evals.acceptance.acceptance import Plan
    from evals.acceptance.summary import Json
    from evals.data.datasets import DataSet
    from evals.report.terminal import RunProgress
    from evals.runs.conversations import ModelSpec
    from evals.runs.executor import Executor
    from evals.runs.store import RunStore

EXIT_FAILED = 1
_CERTIFIED = {
    "data": "arithmetic",
    "limit": 20,
    "max_new_tokens": 64,
    "samples": 500,
    "output": "certificate.json",
}
"""Defaults of a certificate, which takes minutes with these."""
_check_options = added(
    (
        shared.data_options,
        shared.ks_option,
        shared.greedy_options,
        option("--samples", "Samples per place and configuration.", click.IntRange(100), 1000),
        option("--sample-prompts", "Places of each trial.", COUNT, 2),
        shared.output_option,
    )
)
_WARMUP = option("--warmup", "Passes that are not measured.", click.IntRange(0), 1)


@click.command(
    short_help="Acceptance length, rates and speed-up of a draft head.",
    epilog=examples(
        "specdec eval acceptance --data arithmetic --limit 20 -k 1,3,5",
        "specdec eval acceptance --data arithmetic --limit 20 --model gsm-deepseek --draft mtp -k 3 --explain",
        "specdec eval acceptance --data gsm8k --limit 200 -k 5 --output a.json --report a.html",
    ),
)
@shared.model_options
@shared.draft_option
@shared.data_options
@shared.ks_option
@shared.asking_options
@_WARMUP
@option(
    "--repeats",
    "Runs over all questions: intervals of times have their scatter too. A finished run can be given more.",
    COUNT,
    1,
)
@option(
    "--predict-batch-sizes",
    "Measure round times at these batch sizes for the prediction, e.g. 1,4,16.",
    shared.NUMBERS,
    (),
)
@option("--worst", "Worst questions in the report.", click.IntRange(0), 5)
@shared.output_options
@shared.ray_options
def acceptance(**options: Any) -> None:
    """Acceptance length, rates and speed-up of a draft head, against the target alone in the same run.

    An interrupted run is continued when it is started again with the same settings.
    """
    data = _data(options)
    from evals.acceptance.acceptance import Plan, sweep

    ks = options["ks"] or (shared.OWN_K,)
    specs = {"main": shared.make_spec(options, options["draft"], max(ks))}

    plan = Plan(
        data,
        sweep(ks),
        shared.make_asking(options),
        options["batch_size"],
        options["warmup"],
        options["predict_batch_sizes"],
        options["worst"] if options["report"] else 0,
        options["repeats"],
    )
    _evaluate(options, specs, plan)


@click.command(
    short_help="Two heads, two K or two backends on the same prompts, paired.",
    epilog=examples(
        "specdec eval compare k=3 k=5 --data arithmetic --limit 20",
        "specdec eval compare head-a head-b --model MODEL --data gsm8k --limit 200",
        "specdec eval compare draft=auto,dtype=float32 draft=auto,dtype=bfloat16 --data arithmetic --limit 20",
    ),
)
@click.argument("a")
@click.argument("b")
@shared.model_options
@option("--draft", "The head of a side that names none.", default="auto")
@shared.data_options
@option("-k --num-speculative-tokens --k default_k", f"K of a side that names none; {shared.K_HELP}.", COUNT)
@shared.asking_options
@_WARMUP
@shared.output_options
@shared.ray_options
def compare(a: str, b: str, **options: Any) -> None:
    """Compare A and B on the same prompts, paired.

    A side is a head, or key=value pairs joined by commas: draft=HEAD,k=3,backend=torch,dtype=float32.
    """
    data = _data(options)
    from evals.acceptance.acceptance import Plan
    from evals.runs.conversations import Configuration

    defaults = {name: options[name] for name in ("draft", "backend", "dtype")} | {
        "k": options["default_k"] or shared.OWN_K
    }
    left, right = (shared.parse_arm(text, defaults) for text in (a, b))
    ks = (left["k"], right["k"])
    if not any(ks):
        raise click.UsageError("both sides have k=0; give at least one of them drafts")
    if {**left, "k": 0} == {**right, "k": 0} and (shared.OWN_K not in ks or left == right):  # one model serves both
        keys = "aa"
        specs = {"a": shared.make_spec({**options, **left}, left["draft"], max(ks))}
    else:
        keys = "ab"
        sides = {"a": left, "b": right}
        specs = {key: shared.make_spec({**options, **side}, side["draft"], side["k"]) for key, side in sides.items()}
    options["same"] = left == right
    names = (a, b) if a != b else (f"{a} (1)", f"{b} (2)")
    arms = tuple(Configuration(name, k, key) for name, key, k in zip(names, keys, ks, strict=True))
    _evaluate(options, specs, Plan(data, arms, shared.make_asking(options), options["batch_size"], options["warmup"]))


@click.command(
    short_help="Check that speculation leaves the target's output unchanged.",
    epilog=examples(
        "specdec eval lossless --data arithmetic --limit 20 -k 5",
        "specdec eval lossless --data arithmetic --limit 20 --mode greedy -k 1,3,5",
        "specdec eval lossless --data gsm8k --model gsm-deepseek --draft mtp --mode sampled --samples 2000",
    ),
)
@shared.model_options
@shared.draft_option
@_check_options
@option("--mode", None, click.Choice(["both", "greedy", "sampled"]), "both")
@option("--budget", "Most minutes: as many questions and samples as fit.", click.FloatRange(0, min_open=True))
@shared.run_dir_option
@shared.ray_options
def lossless(**options: Any) -> None:
    """Check that speculation leaves the target's output unchanged: PASS (exit code 0), FAIL (1) or NOT TESTED (3).

    Greedy answers must be identical but for near ties that a replay in higher precision confirms; sampled ones must
    have the target's distribution. Before it starts it says how long it may take, and --budget bounds that.
    """
    options.update(temperature=0.0, top_k=0, top_p=1.0)
    if options["mode"] != "greedy":
        require("scipy", "eval")
    data = _data(options)
    from evals.acceptance.acceptance import Plan, sweep
    from evals.lossless.lossless import check

    ks = options["ks"] or (shared.OWN_K,)
    specs = {"main": shared.make_spec(options, options["draft"], max(ks))}
    plan = Plan(data, sweep(ks), shared.make_asking(options), options["batch_size"], warmup=0)
    with _begun(options, specs, plan) as run:
        document = check(*run, options["mode"], options["samples"], options["sample_prompts"])
    _finish(options, document, "lossless", store=run[2])


@click.command(
    short_help="A certificate of exactness on this machine, or an audit of another engine's answers.",
    epilog=examples(
        "specdec eval certify gsm-llama",
        "specdec eval certify gsm-deepseek mtp --sampling keyed -k 3 --output c.json --report c.html",
        "specdec eval certify gsm-llama --answers answers.jsonl --dtype float32",
    ),
    context_settings={"default_map": _CERTIFIED},
)
@click.argument("target", type=names.model_name)
@click.argument("head", type=names.draft_name, default="auto")
@option(
    "--answers",
    "Audit another engine's: JSON lines of prompt (text or ids), tokens (ids), temperature, top_k, top_p, min_p.",
    FILE,
)
@load_options(offered("eval", {**shared.OWN_NAMES, "sampling": ""}))
@option("--sampling", "Rules of sampling that are certified.", click.Choice(["both", *SAMPLING]), "both")
@_check_options
@option("--report", "Write the page here.", shared.FILE, "certificate.html")
def certify(target: str, head: str, answers: Path | None, **options: Any) -> None:
    """Certify that speculation changes nothing, on this machine with these options: PASS (exit code 0), FAIL (1) or
    NOT TESTED (3).

    Greedy and keyed answers and their log-probabilities are equal with and without speculation, sampled ones have the
    target's distribution, the noise of keyed sampling is independent, and each check finds defects that are planted.
    """
    options.update(temperature=0.0, top_k=0, top_p=1.0, model=target, draft=head)
    require("scipy", "eval")
    data = _data(options)
    from evals.acceptance.acceptance import Plan, sweep
    from evals.lossless.audit import audit
    from evals.lossless.certificate import certificate, certified, sealed
    from evals.report.page import render_certificate
    from evals.runs.conversations import Worker

    ks = options["ks"] or (shared.OWN_K,)
    plan = Plan(data, sweep(ks), shared.make_asking(options), options["batch_size"], warmup=0)
    if answers is not None:
        alone = shared.make_spec({**options, "sampling": SAMPLING[0]}, None, 0)
        document = sealed(audit(Worker({"main": alone}), answers), options)
    else:
        rules = {}
        for rule in SAMPLING if options["sampling"] == "both" else (options["sampling"],):
            worker = Worker({"main": shared.make_spec({**options, "sampling": rule}, head, max(ks))})
            rules[rule] = certified(worker, _decided(plan, worker), options["samples"], options["sample_prompts"])
            worker.models["main"].close()
        document = certificate(rules, options)
    _finish(options, document, "certificate", page=render_certificate(document))


@click.command(
    short_help="Name the operators whose results depend on the batch.",
    epilog=examples(
        "specdec eval diverge gsm-llama --backend batch_invariant --dtype bfloat16",
        "specdec eval diverge MODEL --backend torch --data prompts.jsonl --limit 5 --output diverge.json",
    ),
    context_settings={"default_map": {"data": "arithmetic", "limit": 3}},
)
@click.argument("target", type=names.model_name)
@load_options(offered("eval", {**shared.OWN_NAMES, "self_test": "", "tensor_parallel_size": ""}))
@shared.data_options
@shared.output_option
def diverge(target: str, **options: Any) -> None:
    """Name the operators whose results for a token depend on what else is in the batch: exit code 1, or 0 for none.

    Questions are read in one batch, then alone, cut in two, and as verifications of three drafts and of none. Bits of
    every module's and attention's results are compared, each with equal arguments; then the logits of the model as it
    is served.
    """
    options.update(model=target, batch_size=1, seed=0, self_test="quick")
    questions = _data(options).questions
    from evals.lossless.diverge import diverge, load

    model = load(shared.make_spec(options, None, 0))
    _finish(options, diverge(model, [question.turns[0] for question in questions]), "diverge")


def _within_budget(options: Options, executor: Executor, plan: Plan) -> Plan:
    """Say how long it may take. The plan with as many questions as fit; `options` gets the samples."""
    from evals.lossless.distribution import MOST_QUESTIONS
    from evals.lossless.lossless import Cost

    mode = options["mode"]
    questions = len(plan.data.questions)
    samples = options["samples"]
    read = min(questions, MOST_QUESTIONS) if mode == "sampled" else questions
    cost = executor.on_one(lambda worker: Cost.measured(worker, plan, mode, options["sample_prompts"]))
    fit = cost.within(60 * (options["budget"] or math.inf), read, samples)
    text = f"This may take {timedelta(seconds=round(cost.of(*fit)))} if every answer has --max-new-tokens"
    if fit == (read, samples):
        click.echo(f"{text}; --budget MINUTES takes less", err=True)
        return plan
    given = f"--limit {fit[0]} (of {read}) --samples {fit[1]} (of {samples})"
    click.echo(f"{text}. Within --budget: {given}; give these to go on if it is interrupted", err=True)
    options["samples"] = fit[1]
    return replace(plan, data=plan.data.limited(fit[0]))


def _data(options: Options) -> DataSet:
    from evals.data.datasets import NAMED, load

    check_outputs(options)
    if options["data_dir"] is not None and options["data"] not in NAMED:
        raise click.UsageError(
            f"--data-dir {options['data_dir']} is the folder of {', '.join(sorted(NAMED))}; "
            f"--data {options['data']} is not read from there"
        )
    return load(options["data"], data_dir=options["data_dir"], limit=options["limit"], seed=options["seed"])


def check_outputs(options: Options) -> None:
    """Check before the run that its outputs can be written. Raises OutputError: they cannot."""
    from specdec.run_files import check_writable

    given = [options.get(name) for name in ("output", "report", "spec_bench_dir")]
    for path in (*filter(None, given), options.get("run_dir") or Path("runs")):
        check_writable(path)
    if options.get("report") is not None:
        require("matplotlib", "eval")


@contextmanager
def _begun(
    options: Options, specs: dict[str, ModelSpec], plan: Plan
) -> Iterator[tuple[Executor, Plan, RunStore, RunProgress]]:
    """A run of loaded models: the plan with chat template, K and what a budget allows decided, its store and its
    progress bar."""
    from evals.acceptance.acceptance import settings

    with shared.open_executor(specs, options["ray"], options["workers"]) as executor:
        plan = _decided(plan, executor)
        if "budget" in options:
            plan = _within_budget(options, executor, plan)
        asked = len(plan.data.questions) * plan.repeats
        given = settings(plan, executor.facts())
        with shared.recorded(options["run_dir"], given, asked, len(plan.arms)) as kept:
            yield executor, plan, *kept


def _decided(plan: Plan, executor: Executor) -> Plan:
    """With chat template and K as the loaded models have them."""
    facts = executor.facts()
    arms = tuple(shared.settle_k(arm, facts) for arm in plan.arms)
    return replace(plan, arms=arms, asking=shared.settle(plan.asking, facts))


def _evaluate(options: Options, specs: dict[str, ModelSpec], plan: Plan) -> None:
    from evals.acceptance.acceptance import run
    from evals.acceptance.summary import FEW
    from evals.report.terminal import print_acceptance
    from specdec.cli.tables import make_console

    if len(plan.data.questions) < FEW:  # their intervals are Student's t
        require("scipy", "eval")
    with _begun(options, specs, plan) as begun:
        document = run(*begun)
    console = make_console()
    store = begun[2]
    print_acceptance(console, document, options["explain"])
    if options.get("same"):
        console.print("A and B are the same configuration: all but the times is equal by construction", style="yellow")
    from evals.report import page
    from evals.runs.answers import write_spec_bench
    from specdec.run_files import write_atomically

    if options["report"] is not None:
        write_atomically(options["report"], page.render(document))
    if options["spec_bench_dir"] is not None:
        arms = [arm["name"] for arm in document["arms"]]
        ids = [row["id"] for row in document["questions"]]
        answers = [store.answers[question_id, arm] for arm in arms for question_id in ids]
        name = shared.model_name(options, options["draft"]).replace("/", "--")
        write_spec_bench(options["spec_bench_dir"], answers, name)
    end(console, options, document, store)
    if document["failures"]:
        sys.exit(EXIT_FAILED)
    if document["not_measured"]:
        sys.exit(Verdict.NOT_TESTED.exit_code)


def _finish(options: Options, document: Json, text: str, **more: Any) -> None:
    """Print a check by the template named `text`, write it, and exit as its verdict says. more: see `end`."""
    from evals.report.terminal import print_text
    from specdec.cli.tables import make_console

    console = make_console()
    print_text(console, text, document=document)
    end(console, options, document, **more)
    sys.exit(Verdict(document["verdict"]).exit_code)


def end(
    console: Console, options: Options, document: Json, store: RunStore | None = None, page: str | None = None
) -> None:
    """Write the JSON document where it was asked for, whole or not at all, and show where the run is."""
    from specdec.run_files import write_atomically

    if options["output"] is not None:
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomically(options["output"], text + "\n")
    if page is not None:
        write_atomically(options["report"], page)
    if store is not None:
        console.print(f"run: {store.folder}")
