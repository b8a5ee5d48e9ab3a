"""The built-in EAGLE-3 pair on GSM8K test questions: acceptance against simple drafters, and speed at batch 1.

    SPECDEC_DATA=… python benchmarks/bench_builtin.py --questions 200 [--out benchmarks/results/builtin_eagle3.json]

Greedy, one run: tau of the head, of prompt lookup, of a bigram table, and of the head with zeroed and with shuffled
taps; wall time with speculation, without it (the same engine, K = 0), and of transformers' own `generate` with a static
and with a dynamic cache. Simple drafters are simulated on the target's own tokens; greedy makes that exact.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
from document import publish

from specdec import Completion, SamplingParams, SpeculativeModel
from specdec.stats import RoundRecord, pool, pool_requests

Propose = Callable[[list[int]], list[int]]


def questions(data: Path, split: str, count: int | None = None) -> list[dict[str, str]]:
    """The first `count` records of a GSM8K split (fields question, answer)."""
    lines = (data / "gsm8k" / f"{split}.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.strip()][:count]


def simulate(completions: Sequence[Completion], propose: Propose, num_drafts: int) -> float:
    """Tau of a drafter that needs no model: replay its proposals on the target's greedy tokens."""
    rounds: list[RoundRecord] = []
    for c in completions:
        tokens = c.prompt_token_ids + c.token_ids
        at = len(c.prompt_token_ids)  # the first new token is the first root
        while at < len(tokens) - 1:
            drafts = propose(tokens[: at + 1])[:num_drafts]
            rest = tokens[at + 1 :]
            accepted = next((i for i, d in enumerate(drafts) if i >= len(rest) or d != rest[i]), len(drafts))
            emitted = min(accepted + 1, len(rest))
            rounds.append(RoundRecord(len(drafts), accepted, emitted))
            at += emitted
    return pool(rounds).tau


def prompt_lookup(num_drafts: int, max_ngram: int = 3) -> Propose:
    """Copy what followed the last earlier place of the final n-gram (Source: apoorvumang/prompt-lookup-decoding)."""

    def propose(tokens: list[int]) -> list[int]:
        for size in range(max_ngram, 0, -1):
            tail = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == tail:
                    return tokens[start + size : start + size + num_drafts]
        return []

    return propose


def bigram(texts: Sequence[list[int]], num_drafts: int) -> Propose:
    """The most frequent next token, over and over."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for ids in texts:
        for a, b in pairwise(ids):
            counts[a][b] += 1
    best = {a: c.most_common(1)[0][0] for a, c in counts.items()}

    def propose(tokens: list[int]) -> list[int]:
        drafts = [tokens[-1]]
        while len(drafts) <= num_drafts and drafts[-1] in best:
            drafts.append(best[drafts[-1]])
        return drafts[1:]

    return propose


def with_taps(model: SpeculativeModel, change: Callable[[torch.Tensor], torch.Tensor], run: Callable[[], Any]) -> Any:
    """Run with the head's tapped states changed."""
    head = model.head
    original = head.fuse
    head.fuse = lambda tapped: original(change(tapped))  # type: ignore[method-assign, union-attr]
    try:
        return run()
    finally:
        del head.fuse  # type: ignore[union-attr]


def hf_seconds(model: SpeculativeModel, completions: Sequence[Completion], cache: str | None) -> float:
    """Seconds of transformers' own greedy `generate` for the same prompts and lengths, prompt pass included."""
    start = time.perf_counter()
    for c in completions:
        ids = torch.tensor([c.prompt_token_ids], device=model.device)
        options = {} if cache is None else {"cache_implementation": cache}
        model.hf_model.generate(ids, max_new_tokens=len(c.token_ids), do_sample=False, **options)
    return time.perf_counter() - start


@torch.inference_mode()
def perplexity(model: SpeculativeModel, records: Sequence[dict[str, str]]) -> float:
    """Perplexity of the reference answers after the chat prompt."""
    total, count = 0.0, 0
    for r in records:
        chat = [{"role": "user", "content": r["question"]}]
        prompt = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        answer = model.tokenizer(r["answer"])["input_ids"]
        ids = torch.tensor([prompt + answer], device=model.device)
        logp = model.hf_model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        total -= float(logp.gather(1, ids[0, len(prompt) :, None]).sum())
        count += len(answer)
    return float(torch.tensor(total / count).exp())


def timed(model: SpeculativeModel, chats: Sequence[Any], params: SamplingParams) -> tuple[list[Completion], float]:
    """One request after the other: completions and wall seconds."""
    start = time.perf_counter()
    completions = [model.generate(chat, params)[0] for chat in chats]
    return completions, time.perf_counter() - start


def measure(model: SpeculativeModel, data: Path, count: int, k: int) -> dict[str, Any]:
    """All numbers of the pair."""
    test = questions(data, "test", count)
    chats = [[{"role": "user", "content": r["question"]}] for r in test]
    fast = SamplingParams(max_new_tokens=320)
    plain = SamplingParams(max_new_tokens=320, num_speculative_tokens=0)
    model.generate(chats[0], fast)
    with_head, spec_s = timed(model, chats, fast)
    without, plain_s = timed(model, chats, plain)
    hf = {str(cache): hf_seconds(model, without, cache) for cache in ("static", None)}
    train = [model.tokenizer(r["answer"])["input_ids"] for r in questions(data, "train")]
    pooled = pool_requests([c.stats for c in with_head])
    generator = torch.Generator().manual_seed(0)
    ablation = {
        "zeroed_taps": torch.zeros_like,
        "shuffled_taps": lambda t: t[:, torch.randperm(t.shape[1], generator=generator)],
    }
    taus = {
        name: pool_requests([c.stats for c in with_taps(model, change, lambda: model.generate(chats, fast))]).tau
        for name, change in ablation.items()
    }
    best = min(plain_s, *hf.values())
    return {
        "questions": count,
        "k": k,
        "identical_to_k0": sum(a.token_ids == b.token_ids for a, b in zip(with_head, without, strict=True)),
        "tau": pooled.tau,
        "unconditional": list(pooled.unconditional),
        "conditional": list(pooled.conditional),
        "tau_prompt_lookup": simulate(without, prompt_lookup(k), k),
        "tau_bigram": simulate(without, bigram(train, k), k),
        **{f"tau_{name}": tau for name, tau in taus.items()},
        "mean_answer_tokens": sum(len(c.token_ids) for c in without) / count,
        "perplexity": perplexity(model, test),
        "seconds": {"speculative": spec_s, "k0": plain_s, "transformers": hf},
        "speed_up_over_best_plain": best / spec_s,
        "threads": torch.get_num_threads(),
    }


@click.command()
@click.option("--questions", "count", default=200, show_default=True)
@click.option("-k", default=5, show_default=True)
@click.option("--target", default="gsm-llama", show_default=True)
@click.option("--draft", default="auto", show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(count: int, k: int, target: str, draft: str, out: Path | None) -> None:
    """Measure the pair; ends in one JSON line."""
    data = Path(os.environ["SPECDEC_DATA"])
    model = SpeculativeModel.from_pretrained(target, draft=draft, num_speculative_tokens=k, max_num_seqs=16)
    document = {
        "benchmark": "builtin",
        "target": target,
        **measure(model, data, count, k),
        "device": str(model.device),
    }
    publish(document, out)


if __name__ == "__main__":
    main()
