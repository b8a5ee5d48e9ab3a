"""Both oracles on a pair: tokens against transformers' own greedy `generate`, drafts against a head without cache.

    SPECDEC_DATA=… python -m benchmarks.check_pair --out benchmarks/results/check_pair.json
    SPECDEC_DATA=… python -m benchmarks.check_pair --shard 0/2 …     # half of the questions, for two processes

Float32, torch backend, greedy, GSM8K test questions, batch 1 and batch 16. A divergence is replayed in float64; it is
allowed only if the top-2 gap there is below 1e-4, and is listed. The draft oracle must also fail once one slot of the
head's cache is zeroed. Exit code 1 when anything is not as it must be.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
from rich.progress import track

from benchmarks.document import publish
from benchmarks.sweep_check import first_difference
from drafters.oracle import oracle_drafts
from evals.data.datasets import load
from evals.lossless.greedy import Replay
from specdec import Completion, SamplingParams, SpeculativeModel
from specdec.requests.prompts import encode_prompts

TIE = 1e-4
MAX_NEW_TOKENS = 320
BATCHED = 16


def test_prompts(model: SpeculativeModel, count: int | None = None) -> list[list[int]]:
    """The first `count` of GSM8K's test questions, as chats."""
    questions = load("gsm8k").questions[:count]
    chats: list[Any] = [[{"role": "user", "content": question.turns[0]}] for question in questions]
    return encode_prompts(chats, model.tokenizer)


def transformers_tokens(model: SpeculativeModel, prompt: list[int], **options: Any) -> list[int]:
    """transformers' own greedy continuation, the end token included. options: of its `generate`."""
    ids = torch.tensor([prompt], device=model.device)
    mask, how = torch.ones_like(ids), {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False}
    return model.hf_model.generate(ids, attention_mask=mask, **how, **options)[0, len(prompt) :].tolist()


def divergences(
    exact: Replay, prompts: list[list[int]], expected: list[list[int]], got: Sequence[Completion]
) -> list[dict[str, Any]]:
    """First difference of every answer that differs, with its float64 gap."""
    found = []
    for question, (prompt, own, completion) in enumerate(zip(prompts, expected, got, strict=True)):
        at = first_difference(own, completion.token_ids)
        if at is None:
            continue
        top = exact.logits([*prompt, *own[:at]]).topk(2).values
        gap = float(top[0] - top[1])
        found.append({"question": question, "position": at, "gap_float64": gap, "near_tie": gap < TIE})
    return found


@torch.inference_mode()
def wrong_rounds(model: SpeculativeModel, completions: Sequence[Completion]) -> tuple[int, int]:
    """(rounds that drafted, those of them whose drafts are not the oracle's from the target's true hidden states)."""
    head, rounds, wrong = model.head, 0, 0
    assert head is not None
    for c in completions:
        ids = torch.tensor(c.prompt_token_ids + c.token_ids, device=model.device)
        states = model.hf_model(ids[None], output_hidden_states=True, use_cache=False).hidden_states
        aux_hidden_states = torch.cat([states[layer][0] for layer in head.aux_layers], -1)
        bonus = len(c.prompt_token_ids)
        for record, drafts in zip(c.stats.rounds, c.drafts or (), strict=True):
            if drafts:
                rounds += 1
                oracle = oracle_drafts(head, ids[: bonus + 1], aux_hidden_states[:bonus], len(drafts))
                wrong += list(drafts) != oracle
            bonus += record.emitted
    return rounds, wrong


def check_drafts(model: SpeculativeModel, prompts: list[list[int]]) -> dict[str, int]:
    """The draft oracle, and again with one head-KV slot zeroed before every round."""
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, return_drafts=True)
    rounds, wrong = wrong_rounds(model, model.generate(prompts, params))
    head = model.head
    assert head is not None
    layer = model.runners[1].layers[0]
    fuse = head.fuse

    def planted(aux_hidden_states: torch.Tensor) -> torch.Tensor:
        layer.keys[:, 0] = 0
        layer.values[:, 0] = 0
        return fuse(aux_hidden_states)

    head.fuse = planted  # type: ignore[method-assign]
    try:
        _, caught = wrong_rounds(model, model.generate(prompts[:5], params))
    finally:
        del head.fuse
    return {"rounds": rounds, "wrong": wrong, "wrong_with_a_zeroed_slot": caught}


def check(model: SpeculativeModel, prompts: list[list[int]], oracle_questions: int) -> dict[str, Any]:
    """All of it."""
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    expected = [transformers_tokens(model, p) for p in track(prompts, "transformers")]
    single = [model.generate([p], params)[0] for p in track(prompts, "batch 1")]
    exact = Replay(model.hf_model)
    found = {
        "batch_1": divergences(exact, prompts, expected, single),
        f"batch_{BATCHED}": divergences(exact, prompts, expected, model.generate(prompts, params)),
    }
    return {
        "questions": len(prompts),
        "k": model.num_speculative_tokens,
        "divergences": found,
        "identical": {name: len(prompts) - len(rows) for name, rows in found.items()},
        "draft_oracle": {"questions": oracle_questions, **check_drafts(model, prompts[:oracle_questions])},
    }


def passed(result: dict[str, Any]) -> bool:
    """Whether both oracles pass and the planted defect is caught."""
    ties = all(row["near_tie"] for rows in result["divergences"].values() for row in rows)
    drafts = result["draft_oracle"]
    return ties and drafts["wrong"] == 0 and drafts["wrong_with_a_zeroed_slot"] > 0


@click.command()
@click.option("--target", default="gsm-llama", show_default=True)
@click.option("--draft", default="auto", show_default=True)
@click.option("-k", default=5, show_default=True)
@click.option("--shard", default="0/1", show_default=True, help="I/N: every N-th question from the I-th on.")
@click.option("--questions", type=int, help="Only the first so many.")
@click.option("--oracle-questions", default=50, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(**options: Any) -> None:
    """Check the pair; ends in one JSON line."""
    o = SimpleNamespace(**options)
    index, count = (int(part) for part in o.shard.split("/"))
    model = SpeculativeModel.from_pretrained(
        o.target,
        draft=o.draft,
        num_speculative_tokens=o.k,
        dtype="float32",
        device=o.device,
        backend="torch",
        max_num_seqs=BATCHED,
    )
    prompts = test_prompts(model, o.questions)[index::count]
    facts = {"benchmark": "check_pair", "target": o.target, "shard": o.shard, "device": o.device, "dtype": "float32"}
    result = facts | check(model, prompts, o.oracle_questions)
    publish(result, o.out)
    sys.exit(0 if passed(result) else 1)


if __name__ == "__main__":
    main()
