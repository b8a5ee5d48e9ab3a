"""Sampled requests of random options, in random company: with `sampling="keyed"` their tokens are those of K = 0, and
those of the law: each is the arg max of float64 scores, by transformers' own processors, with the noise of its place.

    PYTHONPATH=tests python -m tests.public.soak_keyed [--model NAME] [--requests 100] [--drafts 0,1,3,5,8] [--out FILE]

NAME is a built-in model or one of the tiny ones; without it all. Pools are small, so rows are preempted; prompts are
read in chunks. Every token of K = 0 and the first token in which another K differs are replayed. Where float64 has
another winner, `near ties` counts those whose scores lie within 1e-3, `edges` those that a filter lets in or out within
1e-6 of the edge. Ends in a JSON line for each model; exits with 1 where `wrong` is not 0.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from transformers import LogitsProcessorList

from benchmarks.document import publish
from evals.lossless.greedy import noise_at
from specdec import SamplingParams, SpeculativeModel
from specdec.rounds.randomness import request_key
from tests import fakes
from tests.hybrids import RecallHead, tiny_hybrid
from tests.mtp_cases import tiny
from tests.public.soak_options import random_options
from tests.specdec.logits import test_requests
from tests.specdec.test_hybrid_kv_cache import mixed

TIE, EDGE, MOST_NEW = 1e-3, 1e-6, 40
TINY: dict[str, Callable[[], Any]] = {
    "llama": fakes.tiny_llama,
    "gemma3_text": partial(mixed, "gemma3_text"),
    "deepseek_v3": lambda: tiny("deepseek_v3").model,
    "glm4_moe": lambda: tiny("glm4_moe").model,
    "qwen3_next": partial(tiny_hybrid, "qwen3_next"),
    "mamba2": partial(tiny_hybrid, "mamba2"),
}
BUILT_IN = ("gsm-llama", "gsm-deepseek")
FILTERS: dict[str, tuple[float, ...]] = {
    "top_p": (0.5, 0.9),
    "top_k": (3, 20),
    "min_p": (0.05, 0.2),
    "typical_p": (0.8,),
    "epsilon_cutoff": (0.01,),
}
Asked = tuple[list[int], dict[str, Any], SamplingParams]
"""A prompt, its options of logits and filters, and both with the rest."""


def asked_of(rng: random.Random, prompt: list[int], vocab: int, end: int) -> Asked:
    """A request of any options, temperature and filters."""
    options = random_options(rng, vocab, len(prompt))
    options["temperature"] = rng.choice([0.3, 0.7, 1.0, 1.5])
    options |= {name: rng.choice(FILTERS[name]) for name in rng.sample(list(FILTERS), rng.choice([0, 0, 1, 2]))}
    own = {"max_new_tokens": rng.randint(1, MOST_NEW), "seed": rng.randrange(2**40), "ignore_eos": True}
    own["logprobs"] = rng.choice([None, None, 2])
    return prompt, options, SamplingParams(**own, **options, stop_token_ids=(end,))


def answers(
    model: SpeculativeModel, asked: Sequence[Asked], rng: random.Random, every_other_k: bool
) -> list[list[int]]:
    """Tokens, asked in calls of random sizes and order."""
    order, found = rng.sample(range(len(asked)), len(asked)), dict[int, list[int]]()
    while order:
        call = [order.pop() for _ in range(min(rng.choice([1, 3, 8, 16]), len(order)))]
        params = [asked[i][2] for i in call]
        if every_other_k:
            k = model.num_speculative_tokens
            params = [
                replace(own, num_speculative_tokens=rng.choice([None, None, rng.randint(0, k)])) for own in params
            ]
        completions = model.generate([asked[i][0] for i in call], params)
        found |= {i: list(one.token_ids) for i, one in zip(call, completions, strict=True)}
    return [found[i] for i in range(len(asked))]


class Law:
    """What float64 draws at a place."""

    def __init__(self, model: Any, end: int) -> None:
        """model: of transformers, made float64."""
        self.model, self.end = model.double(), end
        model.set_experts_implementation("eager")  # the others have no float64

    def distances(self, one: Asked, tokens: list[int], places: Sequence[int]) -> list[float]:
        """How far each token is behind the winner; infinite where no score within EDGE of a filter's lets it in."""
        prompt, options, params = one
        test_requests.EOS = self.end
        ids = torch.tensor([prompt + tokens])
        with torch.inference_mode():
            logits = self.model(ids, use_cache=False).logits[0].double()
        found = []
        for place in places:
            length = len(prompt) + place
            noise = noise_at(request_key(params.seed or 0, 0), length, logits.shape[1])
            best = float("inf")
            for scale in (1.0, 1 + EDGE, 1 - EDGE):
                own = {name: value * scale if name in ("top_p", "min_p", "typical_p", "epsilon_cutoff") else value
                       for name, value in options.items()}  # fmt: skip
                own["top_p"] = min(own.get("top_p", 1.0), 1.0)
                every: LogitsProcessorList = test_requests.processors_of(own, prompt)
                scores = every(ids[:, :length], logits[length - 1 : length].clone())[0] + noise
                best = min(best, float(scores.max() - scores[tokens[place]]))
            found.append(best)
        return found


def pair(name: str, sizes: dict[str, Any]) -> tuple[Callable[..., SpeculativeModel], Any, list[list[int]], int]:
    """Wraps with a number of drafts, the model alone, prompts, the id that ends a request."""
    if name in TINY:
        prompts = fakes.random_prompts((5, 33, 1, 17, 28, 9, 3, 21))
        target, double = TINY[name](), TINY[name]()

        def wrapped(k: int, texts: list[list[int]]) -> SpeculativeModel:
            draft = RecallHead(texts, 0.6) if k else None
            model: SpeculativeModel = fakes.wrap(target, draft, num_speculative_tokens=k, **sizes)
            return model

        return wrapped, double, prompts, fakes.EOS
    plain = SpeculativeModel.from_pretrained(name, dtype="float32", device="cpu", max_num_seqs=1)
    said = (f"Question: Tom has {n} boxes of {n + 7} eggs. How many has he?\nAnswer:" for n in range(2, 18))
    prompts = [plain.tokenizer(text)["input_ids"] for text in said]
    end = int(plain.tokenizer.eos_token_id)
    double = plain.hf_model
    plain.close()

    def loaded(k: int, texts: list[list[int]]) -> SpeculativeModel:
        drafts: dict[str, Any] = {"num_speculative_tokens": k} if k else {}
        own = sizes | {"page_size": 16, "kv_cache_tokens": 288, "max_model_len": 256, "max_num_batched_tokens": 128}
        return SpeculativeModel.from_pretrained(
            name, "auto" if k else None, dtype="float32", device="cpu", **drafts, **own
        )

    return loaded, double, prompts, end


def soak(name: str, requests: int, drafts: Sequence[int], seed: int, ranks: int) -> dict[str, Any]:
    """Numbers of one model. ranks: processes of a built-in one."""
    started, rng = time.perf_counter(), random.Random(f"{seed} {name}")
    sizes: dict[str, Any] = {"sampling": "keyed", "max_num_seqs": 6, "max_num_batched_tokens": 56}
    sizes |= {"kv_cache_tokens": 160, "max_model_len": 96, "page_size": 4}
    sizes |= {"tensor_parallel_size": ranks} if ranks > 1 else {}
    wrapped, double, prompts, end = pair(name, sizes)
    vocab, law = double.get_output_embeddings().weight.shape[0], Law(double, end)
    asked = [asked_of(rng, rng.choice(prompts), vocab, end) for _ in range(requests)]
    right: list[list[int]] = []
    counts = dict.fromkeys(("tokens", "different", "near ties", "wrong", "preemptions", "verified", "emitted"), 0)
    problems: list[str] = []

    def judged(i: int, tokens: list[int], places: Sequence[int]) -> None:
        for place, behind in zip(places, law.distances(asked[i], tokens, places), strict=True):
            if behind:
                counts["near ties" if behind < TIE else "wrong"] += 1
                problems.append(f"{i} {asked[i][1]} token {place}: {behind:.3g} behind")

    for k in drafts:
        texts = [p + t for (p, _, _), t in zip(asked, right, strict=False)]
        with wrapped(k, texts) as model:
            found = answers(model, asked, rng, k > 0)
            stats = model.engine_stats
        counts["preemptions"] += stats.preemptions
        if k:
            counts["verified"] += stats.verified
            counts["emitted"] += stats.emitted
        counts["tokens"] += sum(map(len, found))
        if not right:
            right = found
            for i, tokens in enumerate(right):
                judged(i, tokens, range(len(tokens)))
        for i, (one, other) in enumerate(zip(right, found, strict=True)):
            if one != other:
                counts["different"] += 1
                place = next((n for n, ids in enumerate(zip(one, other, strict=False)) if ids[0] != ids[1]), None)
                if place is None:
                    counts["wrong"] += 1
                    problems.append(f"{i} K={k}: {len(other)} tokens in place of {len(one)}")
                else:
                    judged(i, other, [place])
    seconds = round(time.perf_counter() - started, 1)
    return {"benchmark": "soak_keyed", "model": name, "requests": requests, "K": list(drafts), "ranks": ranks, **counts,
            "first problems": problems[:4], "seconds": seconds}  # fmt: skip


@click.command(help=__doc__)
@click.option("--model", "names", multiple=True, type=click.Choice([*BUILT_IN, *TINY]))
@click.option("--requests", default=100, show_default=True)
@click.option("--drafts", default="0,1,3,5,8", show_default=True, help="K, the first one 0.")
@click.option("--seed", default=0, show_default=True)
@click.option("--ranks", default=1, show_default=True, help="Processes that a built-in model is divided among.")
@click.option("--out", type=click.Path(path_type=Path))
def main(names: tuple[str, ...], requests: int, drafts: str, seed: int, ranks: int, out: Path | None) -> None:
    """Run it."""
    wrong = 0
    for name in names or (*BUILT_IN, *TINY):
        line = soak(name, requests, [int(k) for k in drafts.split(",")], seed, ranks)
        wrong += line["wrong"]
        publish(line, out, append=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
