"""All causal-LM types of the installed transformers: tokens through the public API against the model's own `generate`.

    python -m benchmarks.sweep --jobs 8 --out benchmarks/results/sweep.json
    python -m benchmarks.sweep --types phimoe,qwen2_moe --dtype float32,bfloat16

Of every type a tiny random model, whose windows and other thresholds (`sweep_configs`) lie between the self-test's rows
and the prompts. Prompts of 5, 20, 37 and 90 tokens, alone and in one batch, read in chunks, 24 greedy tokens, without
drafts and with three a round of which about 70 % are right: prompts and verifications pass every threshold. Compared
with the model's default attention, and a note says where eager attention gives others. Wrappers (models that read
images or sound too) are written to a folder and loaded from it. Where longer requests are refused, prompts fit what is
served, and one that does not is refused by name. One process a model, with a time limit. Half precision: a
divergence is wrong where the token lies more than four rounding errors below the best in float32, and the float32 copy
says it in none of 128 runs in which every module's output is rounded at random (a router's jump). The copy has the
rounded weights; the rounding error is that of a difference of two logits: √2 times the rms difference of its logits and
the model's on that text. Other divergences are near ties, counted apart.

Exit code 1 when any model comes out wrong, raises an error without a name of ours, crashes or takes too long.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import click
import torch
from transformers.utils import logging as transformers_logging

from benchmarks.document import provenance
from benchmarks.given import Listed
from benchmarks.sweep_check import BAD, Verdict, check, one_line
from benchmarks.sweep_configs import Case, all_cases, named_cases

Job = tuple[Case, str]


def run_job(job: Job, device: str, out: Connection) -> None:
    """One model in this process; its verdict goes down the pipe."""
    case, dtype = job
    gc.freeze()  # half a million objects of what is imported, which every `close` would search
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        verdict = check(case, getattr(torch, dtype), device)
    except Exception as error:  # the sweep's own fault is a verdict as well: nothing is left out
        verdict = Verdict("unnamed exception", f"in the sweep itself: {one_line(error)}")
    out.send(verdict)


def verdicts(jobs: Sequence[Job], device: str, workers: int, limit: float) -> Iterator[tuple[Job, Verdict, float]]:
    """(job, verdict, seconds) as they are done, `workers` processes at a time.

    Processes are forked, so that torch and transformers are imported once; on a GPU, which does not survive a fork,
    they are started anew.
    """
    context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    waiting, running = list(reversed(jobs)), {}
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=run_job, args=(job, device, sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = (job, process, time.monotonic())
        ready = wait(list(running), timeout=1.0)
        for receiver, (job, process, started) in list(running.items()):
            seconds = time.monotonic() - started
            if receiver not in ready and seconds <= limit:
                continue
            verdict = _received(receiver) if receiver in ready else Verdict("timed out", f"more than {limit:g} s")
            process.kill() if verdict.outcome == "timed out" else process.join()
            if verdict.outcome == "crashed":
                verdict = Verdict("crashed", f"exit code {process.exitcode}")
            del running[receiver]
            receiver.close()
            yield job, verdict, seconds


def _received(receiver: Connection) -> Verdict:
    try:
        return receiver.recv()
    except EOFError:
        return Verdict("crashed")


def counts(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How many models came to each verdict, by dtype.

    >>> counts([{"dtype": "float32", "outcome": "exact"}, {"dtype": "float32", "outcome": "exact"}])
    {'float32': {'exact': 2}}
    """
    dtypes = dict.fromkeys(row["dtype"] for row in found)
    return {d: dict(Counter(row["outcome"] for row in found if row["dtype"] == d).most_common()) for d in dtypes}


def _by_line(document: dict[str, Any], models: Sequence[dict[str, Any]]) -> str:
    """JSON with one model a line and without what is empty, so that differences between two runs are readable."""
    told = [{key: value for key, value in row.items() if value not in ("", None)} for row in models]
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in document.items())
    return "{\n" + head + ' "models": [\n  ' + ",\n  ".join(map(json.dumps, told)) + "\n ]\n}\n"


@click.command()
@click.option(
    "--types",
    type=Listed(click.STRING),
    help="Model types or names of cases, comma-separated; 'wrappers': all of those. Default: all.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=Listed(click.STRING),
    default="float32,bfloat16",
    show_default=True,
    help="One or several.",
)
@click.option("--jobs", "workers", default=1, show_default=True, help="Processes at a time.")
@click.option("--timeout", default=300.0, show_default=True, help="Seconds a model.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write everything as one JSON file.")
def main(
    types: list[str] | None, dtypes: list[str], workers: int, timeout: float, device: str, out: Path | None
) -> None:
    """Sweep over the architectures; ends in a table of counts."""
    try:
        cases = named_cases(tuple(types)) if types else all_cases()
    except KeyError as error:
        raise click.BadParameter(str(error.args[0]), param_hint="--types") from error
    jobs = [(case, dtype) for dtype in dtypes for case in cases]
    found, made = [], provenance()
    for (case, dtype), verdict, seconds in verdicts(jobs, device, workers, timeout):
        row = {"name": case.name, "dtype": dtype, **asdict(verdict), "seconds": round(seconds, 1)}
        found.append(row)
        click.echo(f"{len(found):4}/{len(jobs)}  {dtype:9} {case.name:32} {verdict.outcome:10} {verdict.reason}")
        if out is not None:  # after every model: a run that is ended early leaves what it has
            table = {"benchmark": "sweep", "device": device, "counts": counts(found), "provenance": made}
            rows = sorted(found, key=lambda row: (row["dtype"], row["name"]))
            out.write_text(_by_line(table, rows), encoding="utf-8")
    for dtype, of in counts(found).items():
        click.echo(f"\n{dtype}\n" + "\n".join(f"{count:6}  {outcome}" for outcome, count in of.items()))
    sys.exit(1 if any(row["outcome"] in BAD for row in found) else 0)


if __name__ == "__main__":
    main()
