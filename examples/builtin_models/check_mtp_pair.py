"""Measure a target with its own multi-token-prediction module on GSM8K test questions: one JSON line a K.

Both oracles on the CPU in float32: tokens against the same engine without drafts and against transformers' greedy
generate, drafts against the oracle that recomputes every prefix without a cache.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import gsm8k_text
import torch

from drafters.oracle import oracle_drafts
from specdec import SamplingParams, SpeculativeModel
from specdec.requests.stats import pool_requests

LIMIT = 320


def generate(model: SpeculativeModel, prompts: list[Any]) -> tuple[list[Any], float]:
    """Completions one after the other (batch 1), and seconds."""
    params = SamplingParams(max_new_tokens=LIMIT, return_drafts=True)
    started = time.perf_counter()
    return [model.generate([prompt], params)[0] for prompt in prompts], time.perf_counter() - started


@torch.inference_mode()
def different_drafts(model: SpeculativeModel, completion: Any) -> tuple[int, int]:
    """(rounds whose drafts are not the oracle's, rounds with drafts)."""
    head, hf_model = model.head, model.hf_model
    assert head is not None
    ids = torch.tensor(list(completion.prompt_token_ids) + list(completion.token_ids))
    states = hf_model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    bonus, wrong, rounds = len(completion.prompt_token_ids), 0, 0
    for record, drafts in zip(completion.stats.rounds, completion.drafts, strict=True):
        if len(drafts):
            rounds += 1
            wrong += list(drafts) != oracle_drafts(head, ids[: bonus + 1], states[:bonus], len(drafts))
        bonus += record.emitted
    return wrong, rounds


@torch.inference_mode()
def transformers_tokens(model: SpeculativeModel, prompt: list[int]) -> list[int]:
    """transformers' own greedy continuation, the end token included."""
    ids = torch.tensor([prompt])
    out = model.hf_model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-k", "drafts", multiple=True, type=int, default=(1, 2, 3))
@click.option("--questions", default=200)
@click.option("--oracle-questions", default=50, help="Of these, how many go through the two oracles.")
def main(folder: Path, drafts: tuple[int, ...], questions: int, oracle_questions: int) -> None:
    """Print acceptance, speed and both oracles for every K."""
    prompts: list[Any] = [[{"role": "user", "content": p.question}] for p in gsm8k_text.read("test")[:questions]]
    plain, plain_seconds = generate(SpeculativeModel.from_pretrained(folder, max_num_seqs=1), prompts)
    tokens = sum(len(c.token_ids) for c in plain)
    for k in drafts:
        model = SpeculativeModel.from_pretrained(folder, "mtp", num_speculative_tokens=k, max_num_seqs=1)
        done, seconds = generate(model, prompts)
        pooled = pool_requests([c.stats for c in done])
        checked = [different_drafts(model, c) for c in done[:oracle_questions]]
        own = [transformers_tokens(model, list(c.prompt_token_ids)) == c.token_ids for c in done[:oracle_questions]]
        line = {
            "k": k,
            "questions": len(prompts),
            "tau": round(pooled.tau, 3),
            "conditional": [round(p, 3) for p in pooled.conditional],
            "same_tokens_as_without_drafts": sum(a.token_ids == b.token_ids for a, b in zip(done, plain, strict=True)),
            "same_tokens_as_transformers": f"{sum(own)} of {len(own)}",
            "rounds_with_other_drafts": f"{sum(w for w, _ in checked)} of {sum(n for _, n in checked)}",
            "tokens_a_second": round(tokens / seconds, 1),
            "tokens_a_second_without": round(tokens / plain_seconds, 1),
            "speed_up": round(plain_seconds / seconds, 3),
        }
        click.echo(json.dumps(line))


if __name__ == "__main__":
    main()
