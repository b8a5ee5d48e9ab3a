"""Prompts to train a chat model's head with, which the model itself makes up: it writes the user's turn.

    python -m benchmarks.own_prompts --model MODEL --count 8000 --avoid EVALUATED.jsonl … --out prompts.jsonl

Half of the turns are free, the others go on from an opening that names a task, so that translations, summaries and
questions about a given text are among them. Prompts that share eight words in a row with an evaluated question are left
out, and those that the model did not end. Source: Xu et al., "Magpie", arXiv 2406.08464, section 2.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import click

from benchmarks.chat_prompts import lines, runs, texts
from specdec import SamplingParams, SpeculativeModel

OPENINGS = """
Translate this German sentence into English: Die
Translate from German to English: Der
Translate into English: Wir
Summarize this article:
Give a short summary of the news report below.
Answer the question from the documents below. Documents:
Using the passages that follow, answer a question.
Write a function in Python that
What is the difference between
Who was
When did
Imagine that you are
Rewrite the following paragraph:
Extract from the following text
Solve this problem step by step.
Write an essay about
Give me advice:
""".strip().split("\n")
MARK = "THE USER'S TURN"


def begins(model: SpeculativeModel, count: int, pick: random.Random) -> list[tuple[str, str]]:
    """(opening, the rendered chat up to it) of each turn; every second opening is empty."""
    before, _, _ = model.tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False).partition(
        MARK
    )
    openings = [pick.choice(OPENINGS) if i % 2 else "" for i in range(count)]
    return [(opening, before + opening) for opening in openings]


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--model", required=True)
@click.option("--count", default=8000, show_default=True)
@click.option("--avoid", type=click.Path(exists=True, path_type=Path), multiple=True, help="Evaluated questions.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--rows", "max_num_seqs", default=256, show_default=True, help="Turns that are written at once.")
@click.option("--kv-cache-tokens", type=int)
@click.option("--seed", default=0, show_default=True)
@click.option("--max-new-tokens", default=320, show_default=True)
def main(
    model: str, count: int, avoid: tuple[Path, ...], out: Path, seed: int, max_new_tokens: int, **options: Any
) -> None:
    """Write the prompts."""
    evaluated = set[tuple[str, ...]]().union(*(runs(text) for row in lines(avoid) for text in texts(row)))
    with SpeculativeModel.from_pretrained(model, max_model_len=1024, **options) as loaded:
        begun = begins(loaded, count, random.Random(seed))
        params = [SamplingParams(temperature=1.0, top_p=0.95, seed=seed * 10**6 + i) for i in range(count)]
        encode = loaded.tokenizer.encode
        ids = [encode(text, add_special_tokens=False) for _, text in begun]
        results = loaded.generate(ids, params, max_new_tokens=max_new_tokens)
    ended = [
        f"{opening} {result.text.strip()}".strip()
        for (opening, _), result in zip(begun, results, strict=True)
        if result.finish_reason == "eos" and result.text.strip()
    ]
    kept = [prompt for prompt in dict.fromkeys(ended) if not runs(prompt) & evaluated]
    out.write_text("".join(json.dumps({"question": prompt}) + "\n" for prompt in kept), "utf-8")
    print(json.dumps({"written": count, "ended": len(ended), "kept": len(kept), "characters": sum(map(len, kept))}))


if __name__ == "__main__":
    main()
