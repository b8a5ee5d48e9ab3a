"""What drafting on the most frequent tokens alone costs: τ of the built-in module by the size of its draft vocabulary.

    python -m benchmarks.bench_draft_vocab --data gsm8k/test.jsonl --counts gsm8k/train.jsonl [--sizes 1024,512]

Greedy answers to questions of `--data`; tokens are counted in the answers of `--counts` ("frequent"), or the smallest
ids are taken ("first": a byte-pair vocabulary lists what it merged first). Ends in one JSON line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from benchmarks.document import publish, usage
from benchmarks.given import Listed, ResultFile
from specdec import SpeculativeModel, draft_vocab_of
from specdec.loading.tokenizers import load_tokenizer
from specdec.requests.stats import pool_requests

MODEL, K, NEW, FILE = "gsm-deepseek", 3, 256, click.Path(exists=True, dir_okay=False, path_type=Path)
SIZES: dict[str, Any] = {"device": "cpu", "max_model_len": 768, "max_num_seqs": 64, "num_speculative_tokens": K}


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def measured(chats: list[Any], ids: list[int] | None) -> tuple[list[list[int]], dict[str, Any]]:
    """Tokens of the answers, and what drafting on these ids gave."""
    with SpeculativeModel.from_pretrained(MODEL, "mtp", draft_vocab=ids, **SIZES) as model:
        done, size = model.generate(chats, max_new_tokens=NEW), model.describe()["draft_vocab_size"]
    taken = pool_requests([each.stats for each in done])
    return [each.token_ids for each in done], {"drafted_on": size, "tau": taken.tau, "rounds": taken.rounds}


@click.command(help=usage(__doc__))
@click.option("--data", type=FILE, required=True)
@click.option("--counts", type=FILE, required=True)
@click.option("--questions", type=click.IntRange(1), default=128, show_default=True)
@click.option("--sizes", type=Listed(click.IntRange(1)), default="1024,768,512,256", show_default=True)
@click.option("--out", type=ResultFile(), help="Write the line there, too.")
def main(data: Path, counts: Path, questions: int, sizes: list[int], out: Path | None) -> None:
    chats = [[{"role": "user", "content": row["question"]}] for row in read(data)[:questions]]
    texts, tokenizer = [row["answer"] for row in read(counts)], load_tokenizer(MODEL)
    right, whole = measured(chats, None)
    lines = [{"tokens": "all", "size": whole["drafted_on"], **whole, "tau_loss": 0.0}]
    for tokens, size in [(tokens, size) for size in sizes for tokens in ("frequent", "first")]:
        ids = draft_vocab_of(texts, size, tokenizer) if tokens == "frequent" else list(range(size))
        answers, found = measured(chats, ids)
        assert answers == right, "drafts decide no token"
        lines.append({"tokens": tokens, "size": size, **found, "tau_loss": 1 - found["tau"] / whole["tau"]})
    command = f"python -m benchmarks.bench_draft_vocab --data {data} --counts {counts} --questions {len(chats)}"
    publish({"benchmark": "draft_vocab", "command": command, "model": MODEL, "drafts": K, "lines": lines}, out)


if __name__ == "__main__":
    main()
