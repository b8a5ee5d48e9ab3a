"""The training mix: word problems laid out as chats and plain documents, tokenized and packed into rows.

Two sources (generated problems, GSM8K's training part with variants) and two row lengths: short rows for the many
short documents, long rows for few-shot documents, so that all positions up to the limit are trained.
"""

from __future__ import annotations

import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import gsm8k_text
import numpy as np
from gsm8k_text import Pair
from transformers import PreTrainedTokenizerFast

from evals.data import arithmetic

SHORT, LONG = 512, 2048
SOURCES = ("generated", "gsm8k")
_LAYOUTS = {"chat": 84, "asked": 7, "turns": 4, "few_shot_chat": 2, "few_shot_text": 3}  # weights
_LARGEST_DOCUMENT = 1_500  # tokens
_OPEN_ROWS = 24
Message = dict[str, str]


@dataclass(frozen=True)
class Job:
    """One worker's share: which source, how many problems (of GSM8K: how many passes), with which seed."""

    source: str
    amount: int
    seed: int
    tokenizer: str


def build(folder: Path, tokenizer: str, generated: int, passes: int, workers: int, seed: int) -> dict[str, int]:
    """Write `{source}-{length}.npy` (uint16 [rows, length]) under `folder`; returns the number of rows of each."""
    jobs = [Job("generated", generated // workers, seed * 1000 + i, tokenizer) for i in range(workers)]
    jobs += [Job("gsm8k", 1, seed * 1000 + i, tokenizer) for i in range(passes)]
    with ProcessPoolExecutor(workers) as pool:
        done = list(pool.map(_work, jobs))
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {}
    for source in SOURCES:
        for index, length in enumerate((SHORT, LONG)):
            rows = np.concatenate([part[index] for job, part in zip(jobs, done, strict=True) if job.source == source])
            np.save(folder / f"{source}-{length}.npy", rows)
            sizes[f"{source}-{length}"] = len(rows)
    return sizes


def _work(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Rows of one job: uint16 [rows, SHORT] and [rows, LONG]."""
    rng = random.Random(f"{job.source}/{job.seed}")
    tokenizer = load_tokenizer(Path(job.tokenizer))
    texts = documents(pairs(job, rng), rng, tokenizer)
    encoded = [ids for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] if len(ids) <= _LARGEST_DOCUMENT]
    pad = tokenizer.pad_token_id
    short = [ids for ids in encoded if len(ids) <= SHORT]
    return pack(short, SHORT, pad), pack([ids for ids in encoded if len(ids) > SHORT], LONG, pad)


def pairs(job: Job, rng: random.Random) -> list[Pair]:
    """The job's questions and answers in random order. A pass over GSM8K: each pair renamed, and renumbered if safe."""
    if job.source == "generated":
        return [Pair(p.question, p.answer) for p in arithmetic.problems("train", job.amount, job.seed)]
    originals, _ = gsm8k_text.split_dev(gsm8k_text.read("train"))
    renumbered = [gsm8k_text.renumbered(pair, rng) for pair in originals]
    usable = originals + [pair for pair in renumbered if pair is not None]
    found = [gsm8k_text.renamed(pair, rng) for pair in usable]
    return rng.sample(found, len(found))


def documents(source: list[Pair], rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Lay out all pairs, each once, as documents that end with the end-of-turn token."""
    texts, start = [], 0
    while start < len(source):
        layout = rng.choices(list(_LAYOUTS), list(_LAYOUTS.values()))[0]
        count = {"chat": 1, "asked": 1, "turns": rng.randint(2, 4)}.get(layout, rng.randint(3, 8))
        texts.append(lay_out(layout, source[start : start + count], tokenizer))
        start += count
    return texts


def lay_out(layout: str, group: list[Pair], tokenizer: PreTrainedTokenizerFast) -> str:
    """One document: chat turns with raw questions, a "Question: ... Answer:" turn, or few-shot text."""
    if layout == "few_shot_text":
        return blocks(group).rstrip() + tokenizer.eos_token
    if layout in ("chat", "turns"):
        messages = [message for pair in group for message in turn(pair.question, pair.answer)]
    else:
        messages = turn(f"{blocks(group[:-1])}Question: {group[-1].question}\nAnswer:", group[-1].answer)
    return chat_text(tokenizer, messages)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def chat_text(tokenizer: PreTrainedTokenizerFast, messages: list[Message], add_generation_prompt: bool = False) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt))


def turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def blocks(group: list[Pair]) -> str:
    return "".join(f"Question: {pair.question}\nAnswer: {pair.answer}\n\n" for pair in group)


def pack(encoded: list[list[int]], length: int, pad: int) -> np.ndarray:
    """Whole documents, first fit, into rows padded at the end: uint16 [rows, length]."""
    full: list[list[int]] = []
    open_rows: list[list[int]] = []
    for ids in encoded:
        row = next((row for row in open_rows if len(row) + len(ids) <= length), None)
        if row is None:
            row = []
            open_rows.append(row)
        row.extend(ids)
        if len(open_rows) > _OPEN_ROWS:
            full.append(open_rows.pop(0))
    rows = full + open_rows
    packed = np.full((len(rows), length), pad, dtype=np.uint16)
    for index, row in enumerate(rows):
        packed[index, : len(row)] = row
    return packed
