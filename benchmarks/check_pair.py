"""Both oracles on a pair: tokens against transformers' own greedy `generate`, drafts against a head without cache.

    SPECDEC_DATA=… python -m benchmarks.check_pair --out benchmarks/results/check_pair.json
    SPECDEC_DATA=… python -m benchmarks.check_pair --shard 0/2 …     # half of the questions, for two processes

Float32, torch backend, greedy, GSM8K test questions, batch 1 and batch 16. A divergence is replayed in float64; it is
allowed only if the top-2 gap there is below 1e-4, and is listed. The draft oracle must also fail once one slot of the
head's cache is zeroed. Exit code 1 when anything is not as it must be.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
from rich.progress import track

from benchmarks.document import publish
from drafters.oracle import oracle_drafts
from evals.lossless.greedy import Replay
from specdec import Completion, SamplingParams, SpeculativeModel
from specdec.requests.prompts import encode_prompts

TIE = 1e-4
MAX_NEW_TOKENS = 320
BATCHED = 16


def test_chats(data: Path) -> list[Any]:
    """GSM8K's test questions as chats."""
    lines = (data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").split("\n")
    return [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines if line.strip()]


def transformers_tokens(model: SpeculativeModel, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' own greedy continuations, end token included, of one batch padded on the left."""
    pad, width = model.tokenizer.pad_token_id, max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    out = model.hf_model.generate(ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    end = model.tokenizer.eos_token_id
    rows = [row[width:] for row in out.tolist()]
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def matching(ids: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(ids), len(others)))


def divergences(
    exact: Replay, prompts: list[list[int]], expected: list[list[int]], got: Sequence[Completion]
) -> list[dict[str, Any]]:
    """First difference of every answer that differs, with its float64 gap."""
    found = []
    for question, (prompt, own, completion) in enumerate(zip(prompts, expected, got, strict=True)):
        if own == completion.token_ids:
            continue
        at = matching(own, completion.token_ids)
        top = exact.logits([*prompt, *own[:at]]).topk(2).values
        gap = float(top[0] - top[1])
        found.append({"question": question, "position": at, "gap_float64": gap, "near_tie": gap < TIE})
    return found


@torch.inference_mode()
def drafted_rounds(
    model: SpeculativeModel, completions: Sequence[Completion]
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Of every round that drafted: its draft ids, the oracle's from the target's true hidden states, and the answer."""
    head = model.head
    assert head is not None
    for c in completions:
        ids = torch.tensor(c.prompt_token_ids + c.token_ids, device=model.device)
        states = model.hf_model(ids[None], output_hidden_states=True, use_cache=False).hidden_states
        aux_hidden_states = torch.cat([states[layer][0] for layer in head.aux_layers], -1)
        bonus = len(c.prompt_token_ids)
        for record, drafts in zip(c.stats.rounds, c.drafts or (), strict=True):
            if drafts:
                oracle = oracle_drafts(head, ids[: bonus + 1], aux_hidden_states[:bonus], len(drafts))
                yield list(drafts), oracle, ids[bonus + 1 :].tolist()
            bonus += record.emitted


def wrong_rounds(model: SpeculativeModel, completions: Sequence[Completion]) -> tuple[int, int]:
    """(rounds, rounds whose draft ids differ from the oracle's)."""
    wrong = [drafts != oracle for drafts, oracle, _ in drafted_rounds(model, completions)]
    return len(wrong), sum(wrong)


def check_drafts(model: SpeculativeModel, chats: list[Any]) -> dict[str, int]:
    """The draft oracle, and again with one head-KV slot zeroed before every round."""
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, return_drafts=True)
    rounds, wrong = wrong_rounds(model, model.generate(chats, params))
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
        _, caught = wrong_rounds(model, model.generate(chats[:5], params))
    finally:
        del head.fuse
    return {"rounds": rounds, "wrong": wrong, "wrong_with_a_zeroed_slot": caught}


def check(model: SpeculativeModel, chats: list[Any], oracle_questions: int, reference_batch: int) -> dict[str, Any]:
    """All of it."""
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    prompts = encode_prompts(chats, model.tokenizer)
    starts = range(0, len(prompts), reference_batch)
    parts = [transformers_tokens(model, prompts[s : s + reference_batch]) for s in track(starts, "transformers")]
    expected = [tokens for part in parts for tokens in part]
    single = [model.generate([p], params)[0] for p in track(prompts, "batch 1")]
    batched = model.generate(prompts, params)
    exact = Replay(model.hf_model)
    found = {
        "batch_1": divergences(exact, prompts, expected, single),
        f"batch_{BATCHED}": divergences(exact, prompts, expected, batched),
    }
    return {
        "questions": len(chats),
        "k": model.num_speculative_tokens,
        "divergences": found,
        "identical": {name: len(chats) - len(rows) for name, rows in found.items()},
        "draft_oracle": {"questions": oracle_questions, **check_drafts(model, chats[:oracle_questions])},
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
@click.option("--reference-batch", default=1, show_default=True, help="Questions a call of transformers' generate.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(**options: Any) -> None:
    """Check the pair; ends in one JSON line."""
    o = SimpleNamespace(**options)
    index, count = (int(part) for part in o.shard.split("/"))
    chats = test_chats(Path(os.environ["SPECDEC_DATA"]))[: o.questions][index::count]
    model = SpeculativeModel.from_pretrained(
        o.target,
        draft=o.draft,
        num_speculative_tokens=o.k,
        dtype="float32",
        device=o.device,
        backend="torch",
        max_num_seqs=BATCHED,
    )
    result = {
        "benchmark": "check_pair",
        "target": o.target,
        "shard": o.shard,
        "device": o.device,
        "reference_batch": o.reference_batch,
        **check(model, chats, o.oracle_questions, o.reference_batch),
        "dtype": "float32",
    }
    publish(result, o.out)
    sys.exit(0 if passed(result) else 1)


if __name__ == "__main__":
    main()
