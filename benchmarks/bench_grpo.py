"""GRPO on a built-in model without a trainer's package: what `specdec.invariant` makes of the log-probabilities.

    python -m benchmarks.bench_grpo --steps 10 --device cuda --dtype bfloat16 --out benchmarks/results/FILE.jsonl

Each step: six answers to each of eight prompts at temperature 1.5, with drafts; the reward is the share of digits;
the model's own forward under autograd, with gradient checkpointing, left padding; a step of AdamW. The line has the
largest difference between the rollout's log-probabilities and the trainer's of all steps, without and with
`invariant`, and the median seconds of a step's parts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import specdec
from benchmarks.document import publish
from specdec import SamplingParams, SpeculativeModel
from specdec.loading.names import builtin_path

TEMPERATURE, ANSWERS = 1.5, 6
PROMPTS = [f"Question: Anna has {n} apples and buys 4 more. How many?\nAnswer:" for n in range(3, 11)]


def padded(done: list[Any], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [B, L] and mask [B, L] of prompts and answers, padded on the left, and the rollout's log-probabilities."""
    rows = [torch.tensor([*c.prompt_token_ids, *c.token_ids]) for c in done]
    most = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), most, dtype=torch.int64), torch.zeros(len(rows), most, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, most - len(row) :] = row
        mask[i, most - len(row) :] = 1
    rollout = torch.zeros(len(rows), max(len(c.token_ids) for c in done))
    for i, c in enumerate(done):
        rollout[i, rollout.shape[1] - len(c.token_ids) :] = torch.tensor([each.logprob for each in c.logprobs])
    return ids.to(device), mask.to(device), rollout.to(device)


def own_log_probs(model: Any, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    """The trainer's log-probabilities [B, count] of the last tokens, by the model's own forward."""
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    chosen = logits[:, -count - 1 : -1].float() / TEMPERATURE
    return chosen.log_softmax(-1).gather(2, ids[:, -count:, None])[..., 0]


@click.command(help=__doc__)
@click.option("--model", "name", default="gsm-llama", show_default=True)
@click.option("--steps", default=10, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--new", default=48, show_default=True, help="New tokens of an answer.")
@click.option("--out", type=click.Path(path_type=Path), help="A line of JSON is appended to it.")
def main(name: str, steps: int, device: str, dtype: str, new: int, out: Path | None) -> None:
    path = builtin_path(name)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.to(device)
    options: dict[str, Any] = {"num_speculative_tokens": 4, "max_num_seqs": 48, "backend": "batch_invariant"}
    if device == "cuda":
        options["cuda_graphs"] = True
    tokenizer = AutoTokenizer.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    params = SamplingParams(new, temperature=TEMPERATURE, logprobs=0, logprobs_mode="processed", n=ANSWERS)
    seconds, largest, rewards = defaultdict[str, list[float]](list), {"without": 0.0, "with": 0.0}, []
    with SpeculativeModel.from_pretrained(model, "auto", tokenizer=tokenizer, **options) as wrapped:
        policy = specdec.invariant(wrapped)
        model.gradient_checkpointing_enable()
        for _ in range(steps):
            began = time.perf_counter()

            def took(what: str) -> None:
                nonlocal began
                if device == "cuda":
                    torch.cuda.synchronize()
                now = time.perf_counter()
                seconds[what].append(now - began)
                began = now

            done = wrapped.generate(PROMPTS, params)
            took("rollout")
            ids, mask, rollout = padded(done, device)
            answered = rollout != 0
            reward = torch.tensor([sum(map(str.isdigit, c.text)) / max(1, len(c.text)) for c in done], device=device)
            groups = reward.view(-1, ANSWERS)
            advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
            model.train()
            own = own_log_probs(model, ids, mask, rollout.shape[1])
            took("forward")
            valued = policy.log_probs(own, ids, mask, TEMPERATURE)
            took("invariant")
            for key, values in (("without", own), ("with", valued)):
                largest[key] = max(largest[key], float((values.detach() - rollout)[answered].abs().max()))
            ratio = (valued - rollout).exp()
            loss = -(ratio * advantage)[answered].mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            took("backward")
            rewards.append(round(float(reward.mean()), 3))
    document = {"model": name, "dtype": dtype, "device": device, "steps": steps, "answers": len(PROMPTS) * ANSWERS}
    document |= {"largest_difference": largest, "rewards": rewards}
    publish(document | {"median_seconds": {what: median(found) for what, found in seconds.items()}}, out, append=True)


if __name__ == "__main__":
    main()
