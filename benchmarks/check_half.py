"""A pair in half precision: do drafts change the answers, and are they accepted as often as in float32?

    SPECDEC_DATA=… python benchmarks/check_half.py --target gsm-deepseek -k 3 --questions 48 --out half.jsonl

Greedy, GSM8K test questions. Each dtype's answers with drafts are compared with its own answers without. Where two
differ, the model is replayed at that position in its dtype and in float32: the difference is allowed where the top-2
gap in float32 is at most four times the rms error of the dtype's logits there. That error is measured with the prefix
read at once, and also as the two arms read it, the answer token by token and K+1 at a time; the largest counts. (In a
mixture of experts a token that rounding sends to another expert changes all that follows, in one of the arms only.)
The acceptance length must be within 1 % of the float32 reference's. One JSON line a dtype; exit code 1 when anything is
not as it must be.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from check_pair import test_chats
from document import provenance

from evals.replay import Replay
from specdec import Completion, SamplingParams, SpeculativeModel
from specdec.stats import pool_requests

MAX_NEW_TOKENS = 320
TIE_ERRORS = 4.0
TAU_SHARE = 0.01


@torch.inference_mode()
def last_logits(hf_model: Any, prompt: list[int], answer: list[int], width: int) -> torch.Tensor:
    """Logits [V] after prompt and answer in the model's dtype, the answer read `width` tokens at a time."""
    cache, logits = None, None
    parts = [prompt, *(answer[start : start + width] for start in range(0, len(answer), width))]
    for part in parts:
        ids = torch.tensor([part], device=hf_model.device)
        out = hf_model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[0, -1]
    assert logits is not None
    return logits.float().cpu()


def near_tie(hf_model: Any, exact: Replay, prompt: list[int], answer: list[int], k: int) -> dict[str, Any]:
    """Top-2 gap in float32 and the rms errors of the model's own logits, of the token after prompt and answer."""
    right = exact.logits(prompt + answer)
    top = right.topk(2).values
    gap = float(top[0] - top[1])
    at_once = last_logits(hf_model, prompt + answer, [], 1)
    errors = {"rms_error": float((at_once - right).pow(2).mean().sqrt())}
    if gap > TIE_ERRORS * errors["rms_error"]:
        for width in (1, k + 1):
            stepwise = last_logits(hf_model, prompt, answer, width)
            errors[f"rms_error_by_{width}"] = float((stepwise - right).pow(2).mean().sqrt())
    return {"gap_float32": gap, **errors, "near_tie": gap <= TIE_ERRORS * max(errors.values())}


def divergences(
    model: SpeculativeModel, own: Sequence[Completion], got: Sequence[Completion], k: int
) -> list[dict[str, Any]]:
    """First difference of every answer that differs."""
    exact, found = Replay(model.hf_model), []
    for question, (a, b) in enumerate(zip(own, got, strict=True)):
        pairs = enumerate(zip(a.token_ids, b.token_ids, strict=False))
        at = next((i for i, (x, y) in pairs if x != y), None)
        if at is not None:
            tie = near_tie(model.hf_model, exact, a.prompt_token_ids, a.token_ids[:at], k)
            found.append({"question": question, "position": at, **tie})
    return found


def check(load: Any, dtype: str, graphs: bool, chats: list[Any], k: int, tau_float32: float) -> dict[str, Any]:
    """One dtype."""
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    own = load(dtype, 0, graphs).generate(chats, params)
    model = load(dtype, k, graphs)
    got = model.generate(chats, params)
    found = divergences(model, own, got, k)
    tau = pool_requests([c.stats for c in got]).tau
    return {
        "dtype": dtype,
        "cuda_graphs": graphs,
        "identical": sum(a.token_ids == b.token_ids for a, b in zip(own, got, strict=True)),
        "divergences": found,
        "tau": tau,
        "tau_float32": tau_float32,
        "tau_within_1_percent": abs(tau / tau_float32 - 1) <= TAU_SHARE,
        "divergences_are_near_ties": all(row["near_tie"] for row in found),
    }


@click.command(help=__doc__)
@click.option("--target", default="gsm-deepseek", show_default=True)
@click.option("-k", default=3, show_default=True)
@click.option("--questions", default=48, show_default=True)
@click.option("--dtypes", default="float16,bfloat16", show_default=True)
@click.option("--graphs", default="no,yes", show_default=True, help="Without and with CUDA graphs.")
@click.option("--backend", default="flashinfer", show_default=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON lines are appended.")
def main(target: str, k: int, questions: int, dtypes: str, graphs: str, backend: str, device: str, out: Path) -> None:
    """Check every dtype with and without graphs."""
    chats = test_chats(Path(os.environ["SPECDEC_DATA"]))[:questions]

    def load(dtype: str, drafts: int, cuda_graphs: bool) -> SpeculativeModel:
        return SpeculativeModel.from_pretrained(
            target,
            draft="auto" if drafts else None,
            num_speculative_tokens=drafts or None,
            dtype=dtype,
            device=device,
            backend="torch" if dtype == "float32" else backend,
            max_num_seqs=16,
            cuda_graphs=cuda_graphs,
        )

    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    tau = pool_requests([c.stats for c in load("float32", k, False).generate(chats, params)]).tau
    passed = True
    for cuda_graphs in graphs.split(","):
        for dtype in dtypes.split(","):
            result = check(load, dtype, cuda_graphs == "yes", chats, k, tau)
            passed &= result["tau_within_1_percent"] and result["divergences_are_near_ties"]
            facts = {"benchmark": "check_half", "target": target, "k": k, "questions": questions, "backend": backend}
            line = json.dumps(facts | result | provenance())
            click.echo(line)
            with out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
