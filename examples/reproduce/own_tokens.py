"""specdec's greedy tokens against transformers' own `generate`, one question at a time; exit code 1 where they differ.

    python examples/reproduce/own_tokens.py --model MODEL --draft none --data gsm8k --limit 20

`specdec eval lossless` compares drafts with no drafts; this compares no drafts (or, with --draft, drafts) with another
program. A difference is judged as there: replayed by transformers in higher precision, and allowed only in a near tie.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch

from evals.cli.eval_options import FILE
from evals.data.datasets import Question, load, opening, render
from evals.lossless.greedy import VERDICT, Divergence, first_difference, judge
from evals.runs.answers import Answer, Turn
from evals.runs.conversations import Asking, Configuration
from specdec import SamplingParams, SpeculativeModel
from specdec.cli.lazy import BadInput
from specdec.cli.options import load_model, load_options_of, model_options
from specdec.errors import SpecdecError


@click.command()
@model_options()
@click.option("--data", required=True, help="Data set, as in `specdec eval`.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Questions; only first turns.")
@click.option("--new-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--output", type=FILE, default=None, help="Write the JSON document here.")
def main(data: str, limit: int, new_tokens: int, output: Path | None, **options: Any) -> None:
    """Compare greedy tokens with transformers' own generate: PASS (exit code 0) or FAIL (1)."""
    try:
        questions = load(data, limit=limit).questions
        with load_model(options["model"], options["draft"], load_options_of(options)) as model:
            found = differences(model, questions, SamplingParams(max_new_tokens=new_tokens, cache_prefix=False))
    except SpecdecError as error:
        raise BadInput(" ".join(str(error).split())) from error
    defects = [each for each in found if not each.allowed]
    for each in found:
        click.echo(f"question {each.question_id}, token {each.position}: {each}")
    verdict = "FAIL" if defects else "PASS"
    near = len(found) - len(defects)
    click.echo(f"{verdict}: {len(questions) - len(found)} of {len(questions)} identical, {near} near ties")
    if output is not None:
        rows = [{"question": each.question_id, "position": each.position, "allowed": each.allowed} for each in found]
        document = {"verdict": verdict, "questions": len(questions), "differences": rows, "definition": VERDICT}
        output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(defects))


def differences(model: SpeculativeModel, questions: tuple[Question, ...], params: SamplingParams) -> list[Divergence]:
    """Where transformers' answers and ours part, judged; questions with equal answers are left out."""
    asking = Asking(params, bool(getattr(model.tokenizer, "chat_template", None)))
    cases = []
    for question in questions:
        asked = [*opening(question, None), {"role": "user", "content": question.turns[0]}]
        prompt = render(model.tokenizer, asked, asking.templated)
        theirs = _answer(question, "transformers", own_tokens(model, prompt, params.max_new_tokens))
        ours = _answer(question, "specdec", model.generate([prompt], params)[0].token_ids)
        place = first_difference(theirs, ours)
        if place is not None:
            cases.append((question, theirs, place))
    worker = SimpleNamespace(models={"main": model})
    return judge(worker, Configuration("specdec", 0), asking, cases) if cases else []


def own_tokens(model: SpeculativeModel, prompt: list[int], new_tokens: int) -> list[int]:
    """What transformers' `generate` says after a prompt, greedily; the end token included."""
    ids = torch.tensor([prompt], device=model.hf_model.device)
    out = model.hf_model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return [int(token) for token in out[0, len(prompt) :]]


def _answer(question: Question, arm: str, token_ids: list[int]) -> Answer:
    turn = Turn("", tuple(token_ids), "", 0, 0, ())
    return Answer(question.id, arm, question.category, question.task, (turn,))


if __name__ == "__main__":
    main()
