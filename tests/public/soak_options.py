"""Many threads, one model: requests with random options, processors, criteria, K, cancels and preemptions; every greedy
one is compared with transformers' generate with the same processors, every log-probability with a plain forward.

    PYTHONPATH=tests python -m tests.public.soak_options [--model tiny] [--threads 8] [--requests 250] [--out FILE]
    PYTHONPATH=tests python -m tests.public.soak_options --model gsm-llama --questions 50 --data FOLDER

With `--questions` every option alone, for so many GSM8K questions, drafted and not, in place of random ones. Ends in
one JSON line: `wrong` and `unexpected` must be 0, `clean` true. Exits with 1 otherwise.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria

from specdec import SamplingParams, SpeculativeModel
from specdec.loading.names import builtin_path
from tests import fakes
from tests.specdec.logits import test_requests

MOST_NEW = 40


class Paced(LogitsProcessor):
    """Bans tokens by how often it was called."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.arange(self.calls % 4, scores.shape[1], 4, device=scores.device), -torch.inf)


class Fading(LogitsProcessor):
    """Takes from the scores a mean of all that it has seen."""

    mean: Any = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + scores / 2
        return scores - 0.7 * self.mean


class AtSum(StoppingCriteria):
    """Stops where the last three tokens add up to a multiple of a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -3:].sum(1) % self.number == 0


class Asked(NamedTuple):
    """A request: its prompt, options of logits, names of the user's code, other fields."""

    prompt: list[int]
    options: dict[str, Any]
    code: tuple[str, ...]
    other: dict[str, Any]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(ignore_eos=True, **self.options, **user_code(self.code), **self.other)


def user_code(names: Sequence[str]) -> dict[str, Any]:
    """Fields of SamplingParams, and arguments of generate."""
    made: dict[str, Callable[[], Any]] = {"paced": Paced, "fading": Fading}
    found: dict[str, Any] = {}
    if own := [made[name]() for name in names if name in made]:
        found["logits_processor"] = LogitsProcessorList(own)
    if "criterion" in names:
        found["stopping_criteria"] = [AtSum(7)]
    return found


def random_options(rng: random.Random, vocab: int, prompt_len: int) -> dict[str, Any]:
    """Any mixture of them."""
    tokens = [rng.randrange(vocab) for _ in range(8)]
    every: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: rng.choice([0.8, 1.1, 1.6]),
        "frequency_penalty": lambda: rng.choice([-0.3, 0.2, 0.8]),
        "presence_penalty": lambda: rng.choice([-0.5, 0.4, 1.5]),
        "no_repeat_ngram_size": lambda: rng.randint(2, 4),
        "sequence_bias": lambda: {(tokens[0],): 2.0, (tokens[1], tokens[2]): -5.0},
        "logit_bias": lambda: {tokens[3]: 3.0, tokens[4]: -3.0},
        "min_new_tokens": lambda: rng.randint(1, 12),
        "exponential_decay_length_penalty": lambda: (rng.randint(1, 9), rng.choice([1.05, 1.5])),
        "suppress_tokens": lambda: tokens[5:],
        "begin_suppress_tokens": lambda: tokens[:5],
    }
    chosen = rng.sample(list(every), rng.choice([0, 1, 1, 2, 3, 5]))
    if "min_new_tokens" in chosen and "exponential_decay_length_penalty" in chosen:
        chosen.remove("min_new_tokens")  # both together are NaN in transformers, which ends the request
    return {name: make() for name, make in every.items() if name in chosen}


class Soak:
    """Threads that ask one model, and what they got."""

    def __init__(self, model: SpeculativeModel, plain: Any, prompts: list[list[int]], eos: int) -> None:
        """plain: the same weights in transformers alone; eos: id that ends a request."""
        self.model, self.plain, self.prompts, self.eos = model, plain, prompts, eos
        self.got: list[tuple[Asked, Any]] = []
        self.kinds: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self.lock = threading.Lock()

    def work(self, rng: random.Random, count: int) -> None:
        for _ in range(count):
            try:
                kind, found = self._one(rng)
            except Exception as error:
                kind, found = "unexpected", []
                with self.lock:
                    self.unexpected.append(repr(error)[:300])
            with self.lock:
                self.kinds[kind] += 1
                self.got += found

    def random_request(self, rng: random.Random) -> Asked:
        prompt = rng.choice(self.prompts)
        code = tuple(rng.sample(["paced", "fading", "criterion"], rng.choice([0, 0, 1, 2])))
        other = {
            "max_new_tokens": rng.randint(1, MOST_NEW),
            "num_speculative_tokens": rng.choice([None, 0, *range(1, self.model.num_speculative_tokens + 1)]),
            "stop_token_ids": (self.eos,),
            "logprobs": rng.choice([None, None, 0, 3]),
        }
        return Asked(prompt, random_options(rng, self.model.target.vocab_size, len(prompt)), code, other)

    def _one(self, rng: random.Random) -> tuple[str, list[tuple[Asked, Any]]]:
        asked = [self.random_request(rng) for _ in range(rng.choice([1, 1, 2, 4]))]
        kind = rng.choices(["greedy", "sampled", "cancelled"], [70, 15, 15])[0]
        params = [one.params for one in asked]
        prompts = [one.prompt for one in asked]
        if kind == "sampled":
            own = [SamplingParams(**{**_fields(p), "temperature": 0.8, "top_p": 0.9, "typical_p": 0.9}) for p in params]
            self.model.generate(prompts, own)
            return kind, []
        if kind == "cancelled":
            stream = self.model.stream(prompts, params)
            for _ in range(rng.randint(0, 6)):
                next(stream, None)
            stream.close()
            return kind, []
        return kind, list(zip(asked, self.model.generate(prompts, params), strict=True))

    def problems(self) -> list[str]:
        """What is not as transformers has it."""
        found = []
        known: dict[str, list[int]] = {}  # the same for every K
        for asked, completion in self.got:
            key = repr((asked.prompt, asked.options, asked.code, asked.other["max_new_tokens"]))
            right = known[key] = known[key] if key in known else self.right(asked)
            if completion.token_ids != right:
                found.append(f"{asked.options} {asked.code} {asked.other}: {completion.token_ids}, not {right}")
            elif asked.other.get("logprobs") is not None and (difference := self._far(asked, completion)) > 1e-4:
                found.append(f"{asked.other}: log-probabilities differ by {difference}")
        return found

    def right(self, asked: Asked) -> list[int]:
        own = user_code(asked.code)
        test_requests.EOS = self.eos
        every = [*test_requests.processors_of(asked.options, asked.prompt), *own.get("logits_processor", ())]
        ids = torch.tensor([asked.prompt], device=self.plain.device)
        config = GenerationConfig(
            max_new_tokens=asked.other["max_new_tokens"], do_sample=False, eos_token_id=self.eos, pad_token_id=0
        )
        said = self.plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=LogitsProcessorList(every),
            stopping_criteria=own.get("stopping_criteria"),
        )
        return list(said[0, len(asked.prompt) :].tolist())

    def _far(self, asked: Asked, completion: Any) -> float:
        ids = torch.tensor([asked.prompt + completion.token_ids], device=self.plain.device)
        with torch.no_grad():
            logits = self.plain(ids).logits[0, len(asked.prompt) - 1 : -1].log_softmax(1)
        given = torch.tensor([one.logprob for one in completion.logprobs])
        right = logits.gather(1, ids[0, len(asked.prompt) :, None])[:, 0].cpu()
        return float((given - right).abs().max())


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def loaded(name: str, device: str) -> tuple[SpeculativeModel, Any, list[list[int]]]:
    """The model with a pool that preempts, the same in transformers alone, and prompts."""
    sizes: dict[str, Any] = {"num_speculative_tokens": 5, "max_num_seqs": 12, "cuda_graphs": False}
    if name == "tiny":
        target = fakes.tiny_llama()
        model = fakes.wrap(target, fakes.table_head(target), kv_cache_tokens=160, max_num_batched_tokens=96, **sizes)
        return model, fakes.tiny_llama(), fakes.random_prompts((5, 33, 1, 17, 60, 9, 3, 21))
    model = SpeculativeModel.from_pretrained(
        name,
        "auto",
        dtype=torch.float32,
        device=device,
        backend="torch",
        kv_cache_tokens=2048,
        max_model_len=512,
        **sizes,
    )
    plain = AutoModelForCausalLM.from_pretrained(builtin_path(name), dtype=torch.float32).to(device).eval()
    said = [
        f"Tom has {n} boxes of {n + 7} eggs and gives {n - 1} to Ann. How many eggs are left?" for n in range(2, 18)
    ]
    return model, plain, [model.tokenizer(text)["input_ids"] for text in said]


def by_options(soak: Soak, questions: int, folder: Path) -> None:
    """Every option of the tests alone, with K = 5 and K = 0."""
    lines = [json.loads(line) for line in (folder / "gsm8k" / "test.jsonl").read_text().splitlines()[:questions]]
    tokenizer, vocab = soak.model.tokenizer, soak.model.target.vocab_size
    prompts = [tokenizer(f"Question: {line['question']}\nAnswer:")["input_ids"] for line in lines]
    rng = random.Random(0)
    for name in ("nothing", *(n for n in test_requests.OPTIONS if not {n} & set(_NOT_BUILT))):
        options = {} if name == "nothing" else _with_ids(test_requests.OPTIONS[name], vocab, rng)
        for drafts in (5, 0):
            other = {"max_new_tokens": 64, "num_speculative_tokens": drafts, "stop_token_ids": (soak.eos,)}
            asked = [Asked(prompt, options, (), other) for prompt in prompts]
            soak.got += zip(asked, soak.model.generate(prompts, [one.params for one in asked]), strict=True)
            soak.kinds[f"{name} K={drafts}"] += len(prompts)


_NOT_BUILT = (
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "allowed_token_ids", "bad_words_ids"),
    *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
)
"""Options for which `processors_of` has no class; tests/specdec/logits has them against generate itself."""


def _with_ids(options: dict[str, Any], vocab: int, rng: random.Random) -> dict[str, Any]:
    """The same with ids of this vocabulary."""
    if "suppress_tokens" in options and len(options["suppress_tokens"]) > 9:
        return options | {"suppress_tokens": sorted(rng.sample(range(vocab), vocab // 3))}
    return options


@click.command(help=__doc__)
@click.option("--model", "name", default="tiny", show_default=True, help="tiny, or a built-in model.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", default=8, show_default=True)
@click.option("--requests", default=250, show_default=True, help="Calls of each thread.")
@click.option("--questions", default=0, show_default=True)
@click.option("--data", type=click.Path(path_type=Path), help="Folder with gsm8k/, for --questions.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(
    name: str, device: str, threads: int, requests: int, questions: int, data: Path, seed: int, out: Path | None
) -> None:
    """Run it."""
    started = time.perf_counter()
    model, plain, prompts = loaded(name, device)
    eos = test_requests.EOS if name == "tiny" else int(model.tokenizer.eos_token_id)
    soak = Soak(model, plain, prompts, eos)
    if questions:
        by_options(soak, questions, data)
    else:
        workers = [
            threading.Thread(target=soak.work, args=(random.Random(f"{seed} {k}"), requests)) for k in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    usage, problems = model.usage(), soak.problems()
    accepted = [r.accepted / r.drafted for _, c in soak.got for r in c.stats.rounds if r.drafted]
    figures = {
        "benchmark": "soak_options",
        "model": name,
        "requests": sum(soak.kinds.values()),
        **dict(soak.kinds),
        "compared": len(soak.got),
        "tokens": sum(len(c.token_ids) for _, c in soak.got),
        "accepted": round(sum(accepted) / max(1, len(accepted)), 3),
        "preemptions": model.engine_stats.preemptions,
        "wrong": len(problems),
        "unexpected": len(soak.unexpected),
        "first_problems": (problems + soak.unexpected)[:3],
        "clean": usage.requests == usage.rows == 0,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(figures))
    if out is not None:
        out.write_text(json.dumps(figures) + "\n")
    sys.exit(bool(problems or soak.unexpected or not figures["clean"]))


if __name__ == "__main__":
    main()
