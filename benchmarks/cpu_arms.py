"""What bench_cpu compares: each arm answers prompts of token ids greedily and says what that took."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from specdec.model import SpeculativeModel

LOOKUP_K = 8
"""Drafts by lookup, in transformers and here."""
Prompts = list[list[int]]


@dataclass(frozen=True)
class Setting:
    """What all arms have in common.

    Attributes:
        model: the quantised GGUF file. dtype: of the dequantised weights. threads: of each arm.
        new: tokens of each answer. suppress: ids that no answer may have, those that would end one.
        longest: tokens of the longest prompt.
    """

    model: Path
    dtype: str
    threads: int
    new: int
    suppress: list[int]
    longest: int

    @property
    def row_tokens(self) -> int:
        """Room of one request, a multiple of 256, with some for drafts."""
        return -(-(self.longest + self.new + 64) // 256) * 256


@dataclass(frozen=True)
class Outcome:
    """answers: token ids of each prompt. wall_s, cpu_s: of all prompts together. rounds: forwards that decided tokens,
    summed over the prompts, where the arm says so."""

    answers: Prompts
    wall_s: float
    cpu_s: float
    rounds: int | None = None


@dataclass(frozen=True)
class Arm:
    """name: as in the results. rows: prompts that it takes at once. run: prompts -> what they took. facts: what it runs
    on, for the results. close: ends its process or gives back its memory."""

    name: str
    rows: int
    run: Callable[[Prompts], Outcome]
    facts: dict[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


def timed(answer: Callable[[Prompts], Prompts], prompts: Prompts) -> Outcome:
    """The answers, and the seconds that this process took."""
    wall, cpu = time.perf_counter(), time.process_time()
    answers = answer(prompts)
    return Outcome(answers, time.perf_counter() - wall, time.process_time() - cpu)


def transformers_arms(setting: Setting) -> list[Arm]:
    """Its greedy generate with the dynamic cache, and its prompt lookup, on one model."""
    where = {"pretrained_model_name_or_path": setting.model.parent, "gguf_file": setting.model.name}
    whole = {"dtype": getattr(torch, setting.dtype), "quantization_config": GgufConfig(dequantize=True)}
    model: Any = AutoModelForCausalLM.from_pretrained(**where, **whole)
    forwards: list[int] = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))

    def arm(name: str, **options: Any) -> Arm:
        def answer(prompts: Prompts) -> Prompts:
            return [generated(model, ids, setting, options) for ids in prompts]

        def run(prompts: Prompts) -> Outcome:
            forwards.clear()
            found = timed(answer, prompts)
            return Outcome(found.answers, found.wall_s, found.cpu_s, len(forwards))

        return Arm(name, 1, run)

    return [arm("transformers"), arm("transformers, prompt lookup", prompt_lookup_num_tokens=LOOKUP_K)]


def generated(model: Any, ids: list[int], setting: Setting, options: dict[str, Any]) -> list[int]:
    """One answer by transformers."""
    prompt = torch.tensor([ids])
    own = {"max_new_tokens": setting.new, "suppress_tokens": setting.suppress, "do_sample": False, **options}
    found: list[int] = model.generate(prompt, attention_mask=torch.ones_like(prompt), **own)[0, len(ids) :].tolist()
    return found


def specdec_arm(setting: Setting, name: str, draft: Any, drafts: int | None, rows: int, **options: Any) -> Arm:
    """A model loaded as a user loads it, but that prompts are not taken from the prefix cache."""
    model = SpeculativeModel.from_pretrained(
        *(setting.model, draft),
        num_speculative_tokens=drafts,
        dtype=setting.dtype,
        device="cpu",
        max_num_seqs=rows,
        kv_cache_tokens=rows * setting.row_tokens,
        enable_prefix_caching=False,
        generation_config="ignore",
        **options,
    )

    def answer(prompts: Prompts) -> Prompts:
        own = {"max_new_tokens": setting.new, "suppress_tokens": setting.suppress, "temperature": 0}
        return [list(each.token_ids) for each in model.generate(prompts, **own)]

    def run(prompts: Prompts) -> Outcome:
        before = model.engine_stats.rounds
        found = timed(answer, prompts)
        rounds = model.engine_stats.rounds - before if rows == 1 else None
        return Outcome(found.answers, found.wall_s, found.cpu_s, rounds)

    facts = {"K": drafts, "start": model.describe()["start"]}
    return Arm(name, rows, run, facts, model.close)


def llama_arm(setting: Setting, name: str, python: Path, model: Path, rows: int, ngram: list[Any] | None) -> Arm:
    """A process that runs `benchmarks/llama_child.py`. Raises click.ClickException: it did not start."""
    own = {"threads": setting.threads, "rows": rows, "row_tokens": setting.row_tokens, "ngram": ngram}
    own["cache"] = "F32" if setting.dtype == "float32" else "F16"
    child = subprocess.Popen(
        [str(python), str(Path(__file__).with_name("llama_child.py")), str(model), json.dumps(own)],
        env=os.environ | {"OMP_NUM_THREADS": str(setting.threads)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    requests, replies = child.stdin, child.stdout

    def read() -> dict[str, Any]:
        line = replies.readline()
        if not line:
            raise click.ClickException(f"{name}: its process ended with exit code {child.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(prompts: Prompts) -> Outcome:
        asked = {"prompts": prompts, "new": setting.new, "suppress": setting.suppress}
        print(json.dumps(asked), file=requests, flush=True)
        found = read()
        rounds = sum(map(len, found["answers"])) - found["accepted"] if rows == 1 else None
        return Outcome(found["answers"], found["wall_s"], found["cpu_s"], rounds)

    def close() -> None:
        requests.close()
        child.wait()

    return Arm(name, rows, run, read() | {"ngram": ngram}, close)
