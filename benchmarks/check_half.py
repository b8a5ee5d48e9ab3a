"""A pair in half precision: do drafts change the answers, and are the drafts those of a head without cache?

    SPECDEC_DATA=… python -m benchmarks.check_half --target gsm-deepseek -k 3 --questions 200 --out half.jsonl

Greedy, GSM8K test questions. Each dtype's answers with drafts are compared with its own answers without. Where two
differ, the difference is allowed if the top-2 gap in float32 is at most four times the rms error of the logits by which
one of the two configurations decided that token: the engine's own logits, against those of a float32 copy.

The draft oracle: after every round of some answers, a head without cache drafts from the target's states in the same
dtype. Both drafts are held against the answer; the two acceptance lengths must agree within 1 %. One JSON line a dtype;
exit code 1 when anything is not as it must be.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch

from benchmarks.check_pair import drafted_rounds, matching, test_chats
from benchmarks.decided_logits import recorded_logits
from benchmarks.document import provenance, usage
from evals.lossless.greedy import Replay
from specdec import Completion, SamplingParams, SpeculativeModel
from specdec.requests.stats import pool_requests

MAX_NEW_TOKENS = 320
TIE_ERRORS = 4.0
TAU_SHARE = 0.01


@dataclass(frozen=True)
class Configuration:
    """Answers, and the logits by which they were chosen."""

    completions: Sequence[Completion]
    logits: list[list[torch.Tensor]]


def run(model: SpeculativeModel, chats: list[Any]) -> Configuration:
    """Generate once, greedily."""
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, return_drafts=True)
    first_id = model.engine.next_id
    with recorded_logits(model) as found:
        completions = model.generate(chats, params)
    logits = [
        [found[first_id + i, len(c.prompt_token_ids) + at] for at in range(len(c.token_ids))]
        for i, c in enumerate(completions)
    ]
    return Configuration(completions, logits)


def rms(error: torch.Tensor) -> float:
    """Root of the mean square."""
    return float(error.float().pow(2).mean().sqrt())


def divergences(exact: Replay, own: Configuration, got: Configuration) -> list[dict[str, Any]]:
    """First difference of every answer that differs."""
    found = []
    for question, (a, b) in enumerate(zip(own.completions, got.completions, strict=True)):
        at = matching(a.token_ids, b.token_ids)
        if at < min(len(a.token_ids), len(b.token_ids)):
            right = exact.logits(a.prompt_token_ids + a.token_ids[:at])
            top = right.topk(2).values
            gap = float(top[0] - top[1])
            errors = [rms(arm.logits[question][at] - right) for arm in (own, got)]
            row = {"question": question, "position": at, "gap_float32": gap, "rms_errors": errors}
            found.append(row | {"near_tie": gap <= TIE_ERRORS * max(errors)})
    return found


def usual_error(exact: Replay, arm: Configuration, questions: int) -> float:
    """Median rms error of the logits of some answers."""
    errors = []
    for c, logits in zip(arm.completions[:questions], arm.logits, strict=False):
        right = exact.all_logits(c.prompt_token_ids + c.token_ids[:-1])[len(c.prompt_token_ids) - 1 :]
        errors += [rms(row - r) for row, r in zip(logits, right, strict=True)]
    return float(np.median(errors))


def acceptance_lengths(model: SpeculativeModel, completions: Sequence[Completion]) -> dict[str, Any]:
    """Tokens a round that the answers allow to the engine's drafts and to those of a head without cache."""
    rounds = [
        (drafts == other, 1 + matching(drafts, text), 1 + matching(other, text))
        for drafts, other, text in drafted_rounds(model, completions)
    ]
    equal, engine, oracle = (sum(column) for column in zip(*rounds, strict=True))
    count = len(rounds)
    return {"rounds": count, "equal_rounds": equal, "tau_engine": engine / count, "tau_oracle": oracle / count}


def check(load: Any, dtype: str, graphs: bool, chats: list[Any], k: int, oracle_questions: int) -> dict[str, Any]:
    """One dtype."""
    own = run(load(dtype, 0, graphs), chats)
    model = load(dtype, k, graphs)
    got = run(model, chats)
    exact = Replay(model.hf_model)
    found = divergences(exact, own, got)
    lengths = acceptance_lengths(model, got.completions[:oracle_questions])
    return {
        "dtype": dtype,
        "cuda_graphs": graphs,
        "identical": sum(a.token_ids == b.token_ids for a, b in zip(own.completions, got.completions, strict=True)),
        "divergences": found,
        "divergences_are_near_ties": all(row["near_tie"] for row in found),
        "usual_rms_errors": [usual_error(exact, arm, oracle_questions) for arm in (own, got)],
        "tau": pool_requests([c.stats for c in got.completions]).tau,
        "draft_oracle": lengths,
        "tau_within_1_percent": abs(lengths["tau_engine"] / lengths["tau_oracle"] - 1) <= TAU_SHARE,
    }


@click.command(help=usage(__doc__))
@click.option("--target", default="gsm-deepseek", show_default=True)
@click.option("-k", default=3, show_default=True)
@click.option("--questions", default=200, show_default=True)
@click.option("--oracle-questions", default=50, show_default=True)
@click.option("--dtypes", default="float16,bfloat16", show_default=True)
@click.option("--graphs", default="no,yes", show_default=True, help="Without and with CUDA graphs.")
@click.option("--backend", default="flashinfer", show_default=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON lines are appended.")
def main(**options: Any) -> None:
    """Check every dtype with and without graphs."""
    o = SimpleNamespace(**options)
    chats = test_chats(Path(os.environ["SPECDEC_DATA"]))[: o.questions]

    def load(dtype: str, drafts: int, cuda_graphs: bool) -> SpeculativeModel:
        return SpeculativeModel.from_pretrained(
            o.target,
            draft="auto" if drafts else None,
            num_speculative_tokens=drafts or None,
            dtype=dtype,
            device=o.device,
            backend="torch" if dtype == "float32" else o.backend,
            max_num_seqs=16,
            cuda_graphs=cuda_graphs,
            enable_prefix_caching=False,  # both sides read every prompt whole
        )

    passed = True
    for cuda_graphs in o.graphs.split(","):
        for dtype in o.dtypes.split(","):
            result = check(load, dtype, cuda_graphs == "yes", chats, o.k, o.oracle_questions)
            passed &= result["tau_within_1_percent"] and result["divergences_are_near_ties"]
            facts = {"benchmark": "check_half", "target": o.target, "k": o.k, "questions": o.questions}
            line = json.dumps(facts | {"backend": o.backend} | result | provenance())
            click.echo(line)
            with o.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
