"""Questions for training a draft head of the built-in targets: what the target answers need not be right, but typical.

    SPECDEC_DATA=… python examples/builtin_models/make_questions.py OUTPUT --shards 6

A head learns the target's own answers. On questions the target was trained on those are memorised, unlike on new ones;
so most questions here are new: GSM8K train questions with other names and numbers, and questions joined from the
beginning of one and the end of another. GSM8K's test split is never read.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import click
import gsm8k_text

from evals.data import arithmetic

_SENTENCE = re.compile(r"(?<=[.?!])\s+")
_NUMBER = re.compile(r"(?<![\d.,/])\d{1,3}(?![\d.,/%])")


def renumbered(question: str, rng: random.Random) -> str:
    """The question with its small integers replaced at random, equal ones alike; nobody needs the answer."""
    new: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        old = match.group()
        if old not in new:
            value = int(old)
            new[old] = str(rng.randint(max(2, value // 2), value + value // 2 + 3))
        return new[old]

    return _NUMBER.sub(replace, question)


def joined(first: str, second: str) -> str:
    """The beginning of one question and the end of another."""
    a, b = _SENTENCE.split(first), _SENTENCE.split(second)
    return " ".join(a[: max(1, len(a) // 2)] + b[max(1, len(b) // 2) :] if len(b) > 1 else a[:-1] + b)


def questions(renumbered_passes: int, joined_count: int, generated: int, seed: int) -> list[str]:
    """All questions in random order, each once."""
    rng = random.Random(seed)
    pairs = gsm8k_text.read("train")
    found = [pair.question for pair in pairs]
    for _ in range(renumbered_passes):
        found += [renumbered(gsm8k_text.renamed(pair, rng).question, rng) for pair in pairs]
    for _ in range(joined_count):
        first, second = rng.sample(pairs, 2)
        found.append(renumbered(joined(first.question, second.question), rng))
    found += [p.question for p in arithmetic.problems("train", generated, seed)]
    unique = list(dict.fromkeys(found))
    rng.shuffle(unique)
    return unique


@click.command()
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--renumbered", default=2, show_default=True, help="Passes over GSM8K train with other names and numbers."
)
@click.option("--joined", default=12000, show_default=True, help="Questions joined from two.")
@click.option("--generated", default=5000, show_default=True, help="Generated arithmetic problems.")
@click.option("--shards", default=1, show_default=True, help="Files to write; their answers can be made in parallel.")
@click.option("--seed", default=0, show_default=True)
def main(output: Path, renumbered: int, joined: int, generated: int, shards: int, seed: int) -> None:
    """Write OUTPUT/questions-0.jsonl, questions-1.jsonl, …"""
    output.mkdir(parents=True, exist_ok=True)
    found = questions(renumbered, joined, generated, seed)
    for shard in range(shards):
        lines = (json.dumps({"question": q}, ensure_ascii=False) + "\n" for q in found[shard::shards])
        (output / f"questions-{shard}.jsonl").write_text("".join(lines), encoding="utf-8")
    click.echo(f"{len(found)} questions in {shards} files")


if __name__ == "__main__":
    main()
