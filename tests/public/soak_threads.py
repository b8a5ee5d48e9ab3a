"""Many threads, one model: mixed requests, cancels, refusals, faults; greedy ones are compared with their solo runs.

    python -m tests.public.soak_threads [--model tiny] [--threads 8] [--requests 200] [--out FILE]

Ends in one JSON line: how many requests of each kind there were, and what went wrong (`wrong`, `unexpected` and `hung`
must be 0, `clean` true). Exits with 1 otherwise.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch

from specdec import SamplingParams, SpecdecError, SpeculativeModel
from specdec.errors import InvalidInputError
from tests import fakes

MOST_NEW = 24
PARAMS = SamplingParams(max_new_tokens=MOST_NEW)


class TokenizerFault(Exception):
    """Planted: raised while the text of a certain request is decoded."""


class FaultyTokenizer:
    """A tokenizer whose `decode` raises when it meets one of the planted runs of ids."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.faults: set[tuple[int, ...]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner(*args, **kwargs)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """As the inner one, but for the planted runs."""
        if any(is_in(run, token_ids) for run in self.faults):
            raise TokenizerFault("planted")
        return str(self._inner.decode(token_ids, **kwargs))


def is_in(run: tuple[int, ...], ids: list[int]) -> bool:
    """Whether `run` stands in `ids`, one after the other."""
    return any(tuple(ids[i : i + len(run)]) == run for i in range(len(ids) - len(run) + 1))


@dataclass
class Tally:
    """What happened; threads add to it under `lock`."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Soak:
    """Threads that ask one model for all kinds of things."""

    def __init__(self, model: SpeculativeModel, tokenizer: FaultyTokenizer, prompts: list[list[int]]) -> None:
        """Make the solo runs, and plant a fault in the last prompt's that no other's has."""
        self.model, self.prompts, self.tally = model, prompts, Tally()
        self.solo = [model.generate(p, PARAMS)[0].token_ids for p in prompts]
        *others, faulty = self.solo
        runs = (tuple(faulty[i : i + 3]) for i in range(len(faulty) - 2))
        self.fault = next(run for run in runs if not any(is_in(run, ids) for ids in others))
        tokenizer.faults.add(self.fault)

    def run(self, threads: int, requests: int, seed: int = 0, timeout_s: float = 900.0) -> dict[str, Any]:
        """Run them; returns the figures."""
        started, rounds = time.perf_counter(), self.model.engine_stats.rounds
        workers = [
            threading.Thread(target=self._work, args=(random.Random(seed * 1000 + k), requests), daemon=True)
            for k in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(max(0.0, timeout_s - (time.perf_counter() - started)))
        tally = self.tally
        return {
            "benchmark": "soak_threads",
            "threads": threads,
            "requests": sum(tally.kinds.values()),
            **dict(sorted(tally.kinds.items())),
            "wrong": len(tally.wrong),
            "unexpected": len(tally.unexpected),
            "first_problems": (tally.wrong + tally.unexpected)[:3],
            "hung": sum(worker.is_alive() for worker in workers),
            "rounds": self.model.engine_stats.rounds - rounds,
            "preemptions": self.model.engine_stats.preemptions,
            "longest_request_s": round(tally.longest_s, 2),
            "seconds": round(time.perf_counter() - started, 1),
        }

    def _work(self, rng: random.Random, requests: int) -> None:
        kinds = {self._greedy: 55, self._sampled: 15, self._cancelled: 15, self._refused: 5, self._faulty: 10}
        for _ in range(requests):
            (kind,) = rng.choices(list(kinds), list(kinds.values()))
            name, started = kind.__name__.strip("_"), time.perf_counter()
            problem = None
            try:
                wrong = kind(rng)
            except (SpecdecError, AssertionError, RuntimeError, LookupError, TypeError, ValueError) as error:
                wrong, problem = None, f"{name}: {error!r}"
            with self.tally.lock:
                self.tally.kinds[name] += 1
                self.tally.longest_s = max(self.tally.longest_s, time.perf_counter() - started)
                self.tally.wrong += [f"{name}: {wrong}"] if wrong else []
                self.tally.unexpected += [problem] if problem else []

    def _params(self, rng: random.Random, **options: Any) -> SamplingParams:
        drafts = rng.choice([None, 0, *range(1, self.model.num_speculative_tokens + 1)])
        new = rng.randint(1, MOST_NEW)
        return SamplingParams(**{"max_new_tokens": new, "num_speculative_tokens": drafts, **options})

    def _greedy(self, rng: random.Random) -> str | None:
        places = [rng.randrange(len(self.prompts) - 1) for _ in range(rng.choice([1, 1, 1, 3]))]
        params = [self._params(rng) for _ in places]
        found = self.model.generate([self.prompts[i] for i in places], params)
        for i, own, completion in zip(places, params, found, strict=True):
            right = self.solo[i][: own.max_new_tokens]
            if completion.token_ids != right:
                return f"prompt {i}: {completion.token_ids}, not {right}"
        return None

    def _sampled(self, rng: random.Random) -> str | None:
        params = self._params(rng, temperature=rng.choice([0.5, 1.0]), seed=rng.randrange(1 << 30), top_p=0.9)
        try:
            (completion,) = self.model.generate(self.prompts[rng.randrange(len(self.prompts) - 1)], params)
        except SpecdecError as error:
            if isinstance(error.__cause__, TokenizerFault):
                return None  # it drew the planted run of ids
            raise
        return None if 1 <= len(completion.token_ids) <= params.max_new_tokens else "too many tokens"

    def _cancelled(self, rng: random.Random) -> str | None:
        place, tokens = rng.randrange(len(self.prompts) - 1), []
        stream = self.model.stream(self.prompts[place], self._params(rng))
        for _ in range(rng.randint(0, 3)):
            update = next(stream, None)
            tokens += [] if update is None else update.token_ids
        if rng.random() < 0.5:
            stream.close()
        return None if tokens == self.solo[place][: len(tokens)] else f"prompt {place}: {tokens}"

    def _refused(self, rng: random.Random) -> str | None:
        much = self.model.num_speculative_tokens + 1
        prompt, params = rng.choice(
            [([], PARAMS), ([10**9], PARAMS), ([1], SamplingParams(num_speculative_tokens=much))]
        )
        try:
            self.model.generate([self.prompts[0], prompt], params)
        except InvalidInputError:
            return None
        return "was not refused"

    def _faulty(self, rng: random.Random) -> str | None:
        try:
            self.model.generate(self.prompts[-1], PARAMS)
        except SpecdecError as error:
            return None if isinstance(error.__cause__, TokenizerFault) else f"another cause: {error.__cause__!r}"
        return "the fault was not reported"


def tiny() -> Soak:
    """A tiny random Llama with a head that is right about half of the time, in a cache that is too small for all."""
    target, tokenizer = fakes.tiny_llama(), FaultyTokenizer(fakes.LetterTokenizer())
    sizes = {"kv_cache_tokens": 160, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_speculative_tokens": 3}
    model = fakes.wrap(target, fakes.table_head(target), tokenizer=tokenizer, **sizes)
    return Soak(model, tokenizer, fakes.random_prompts((5, 33, 1, 17, 60, 9, 12, 25)))


def built_in() -> Soak:
    """The built-in gsm-llama and its head."""
    whole = SpeculativeModel.from_pretrained("gsm-llama", "auto")
    tokenizer = FaultyTokenizer(whole.tokenizer)
    sizes = {"kv_cache_tokens": 640, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_speculative_tokens": 5}
    model = SpeculativeModel.from_pretrained(whole.hf_model, whole.head, tokenizer=tokenizer, **sizes)
    texts = [f"Tom has {n} boxes of {n + 5} {what}. How many {what}?" for n, what in enumerate(("eggs", "pens"), 3)]
    texts += [f"Anna buys {n} apples for {n * 2} dollars each. What does she pay?" for n in range(2, 7)]
    texts.append("A train drives 60 miles in an hour. How far does it go in 3 hours?")
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts = [c.prompt_token_ids for c in model.generate(chats, SamplingParams(max_new_tokens=1))]
    return Soak(model, tokenizer, prompts)


@click.command()
@click.option("--model", "kind", type=click.Choice(["tiny", "gsm-llama"]), default="tiny", show_default=True)
@click.option("--threads", default=8, show_default=True)
@click.option("--requests", default=200, show_default=True, help="Requests a thread.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON there.")
def main(kind: str, threads: int, requests: int, seed: int, out: Path | None) -> None:
    """Run the soak."""
    from benchmarks.document import publish

    torch.set_num_threads(1)
    soak = tiny() if kind == "tiny" else built_in()
    figures = {"model": kind, **soak.run(threads, requests, seed)}
    figures["clean"] = fakes.free_everywhere(soak.model)
    publish(figures, out)
    bad = figures["wrong"] or figures["unexpected"] or figures["hung"] or not figures["clean"]
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
