"""The built-in EAGLE-3 pair on GSM8K test questions: acceptance against simple drafters, and speed at batch 1.

    SPECDEC_DATA=… python -m benchmarks.bench_builtin acceptance --questions 200 [--out …]
    SPECDEC_DATA=… python -m benchmarks.bench_builtin speed --questions 80 [--out …]

Greedy. `acceptance`: tau of the head, of prompt lookup, of a bigram table, and of the head with zeroed and shuffled
aux hidden states; simple drafters are simulated on the target's own tokens, which greedy verification makes exact.
`speed`: every question is answered by each configuration in turn, so that a busy machine slows all of them alike: with
speculation, without it (the same engine, K = 0), and by transformers' own `generate` with a static and with a dynamic
cache.
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

from benchmarks.document import publish
from specdec import Completion, SamplingParams, SpeculativeModel
from specdec.requests.prompts import encode_prompts
from specdec.requests.stats import RoundRecord, pool, pool_requests

Propose = Callable[[list[int]], list[int]]
Configuration = Callable[[list[int]], list[int]]
"""Prompt ids -> new token ids."""
MAX_NEW_TOKENS = 320


def questions(data: Path, split: str, count: int | None = None) -> list[dict[str, str]]:
    """The first `count` records of a GSM8K split (fields question, answer)."""
    lines = (data / "gsm8k" / f"{split}.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.strip()][:count]


def simulate(completions: Sequence[Completion], propose: Propose, num_drafts: int) -> float:
    """Tau of a drafter that needs no model: replay its proposals on the target's greedy tokens."""
    rounds: list[RoundRecord] = []
    for c in completions:
        tokens = c.prompt_token_ids + c.token_ids
        at = len(c.prompt_token_ids)  # the first new token is the first bonus token
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


def with_aux_hidden_states(
    model: SpeculativeModel, change: Callable[[torch.Tensor], torch.Tensor], run: Callable[[], Any]
) -> Any:
    """Run with the head's aux hidden states changed."""
    head = model.head
    original = head.fuse
    head.fuse = lambda aux_hidden_states: original(change(aux_hidden_states))  # type: ignore[method-assign, union-attr]
    try:
        return run()
    finally:
        del head.fuse  # type: ignore[union-attr]


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


def answer_all(model: SpeculativeModel, chats: Sequence[Any], num_drafts: int | None) -> list[Completion]:
    """Greedy answers, batched."""
    return model.generate(chats, SamplingParams(max_new_tokens=MAX_NEW_TOKENS, num_speculative_tokens=num_drafts))


def acceptance_numbers(model: SpeculativeModel, data: Path, count: int) -> dict[str, Any]:
    """Tau of the head and of what it must beat."""
    k = model.num_speculative_tokens
    test = questions(data, "test", count)
    chats = [[{"role": "user", "content": r["question"]}] for r in test]
    with_head, without = answer_all(model, chats, None), answer_all(model, chats, 0)
    train = [model.tokenizer(r["answer"])["input_ids"] for r in questions(data, "train")]
    pooled = pool_requests([c.stats for c in with_head])
    generator = torch.Generator().manual_seed(0)
    ablation = {
        "zeroed_taps": torch.zeros_like,
        "shuffled_taps": lambda t: t[:, torch.randperm(t.shape[1], generator=generator)],
    }
    taus = {
        name: pool_requests(
            [c.stats for c in with_aux_hidden_states(model, change, lambda: answer_all(model, chats, None))]
        ).tau
        for name, change in ablation.items()
    }
    return {
        "identical_to_k0": sum(a.token_ids == b.token_ids for a, b in zip(with_head, without, strict=True)),
        "tau": pooled.tau,
        "unconditional": list(pooled.unconditional),
        "conditional": list(pooled.conditional),
        "tau_prompt_lookup": simulate(without, prompt_lookup(k), k),
        "tau_bigram": simulate(without, bigram(train, k), k),
        **{f"tau_{name}": tau for name, tau in taus.items()},
        "mean_answer_tokens": sum(len(c.token_ids) for c in without) / count,
        "perplexity": perplexity(model, test),
    }


def speed_numbers(model: SpeculativeModel, data: Path, count: int) -> dict[str, Any]:
    """Wall seconds of each configuration over the same questions, and speed-ups as ratios of totals."""
    arms = {name: make(model) for name, make in ARMS.items()}
    seconds = dict.fromkeys(arms, 0.0)
    prompts = encode_prompts(
        [[{"role": "user", "content": r["question"]}] for r in questions(data, "test", count)], model.tokenizer
    )
    tokens = 0
    for run in arms.values():
        run(prompts[0])  # warm up
    for prompt in prompts:
        answers = []
        for name, run in arms.items():
            start = time.perf_counter()
            answers.append(run(prompt))
            seconds[name] += time.perf_counter() - start
        assert all(answer == answers[0] for answer in answers), "the configurations disagree"
        tokens += len(answers[0])
    best = min(seconds["k0"], seconds["transformers_static"])
    return {
        "seconds": seconds,
        "tokens": tokens,
        "speed_up": {name: total / seconds["speculative"] for name, total in seconds.items()},
        "speed_up_over_best_of_k0_and_static": best / seconds["speculative"],
        "threads": torch.get_num_threads(),
    }


def engine_arm(num_drafts: int | None) -> Callable[[SpeculativeModel], Configuration]:
    """Our engine with the model's K (None) or without drafts (0)."""

    def make(model: SpeculativeModel) -> Configuration:
        return lambda prompt: answer_all(model, [prompt], num_drafts)[0].token_ids

    return make


def transformers_arm(cache: str | None) -> Callable[[SpeculativeModel], Configuration]:
    """transformers' own greedy `generate`."""
    options = {} if cache is None else {"cache_implementation": cache}

    def make(model: SpeculativeModel) -> Configuration:
        def run(prompt: list[int]) -> list[int]:
            ids = torch.tensor([prompt], device=model.device)
            out = model.hf_model.generate(ids, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, **options)
            return out[0, len(prompt) :].tolist()

        return run

    return make


ARMS = {
    "speculative": engine_arm(None),
    "k0": engine_arm(0),
    "transformers_static": transformers_arm("static"),
    "transformers_dynamic": transformers_arm(None),
}


@click.command()
@click.argument("part", type=click.Choice(["acceptance", "speed"]))
@click.option("--questions", "count", default=200, show_default=True)
@click.option("-k", default=5, show_default=True)
@click.option("--target", default="gsm-llama", show_default=True)
@click.option("--draft", default="auto", show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(part: str, count: int, k: int, target: str, draft: str, out: Path | None) -> None:
    """Measure the pair; ends in one JSON line."""
    data = Path(os.environ["SPECDEC_DATA"])
    options: dict[str, Any] = {"num_speculative_tokens": k, "max_num_seqs": 16, "enable_prefix_caching": False}
    model = SpeculativeModel.from_pretrained(target, draft=draft, **options)  # the same questions, again and again
    numbers = acceptance_numbers if part == "acceptance" else speed_numbers
    head = {"benchmark": f"builtin_{part}", "target": target, "questions": count, "k": k, "device": str(model.device)}
    publish(head | numbers(model, data, count), out)


if __name__ == "__main__":
    main()
