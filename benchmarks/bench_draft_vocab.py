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

MODEL, K, NEW = "gsm-deepseek", 3, 256
SIZES: dict[str, Any] = {"device": "cpu", "max_model_len": 768, "max_num_seqs": 64}
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def rows_of(path: Path) -> list[dict[str, str]]:
    """One JSON object a line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def measured(chats: list[Any], ids: list[int] | None) -> tuple[list[list[int]], dict[str, Any]]:
    """Tokens of the answers, and what drafting on these ids gave."""
    with SpeculativeModel.from_pretrained(MODEL, "mtp", num_speculative_tokens=K, draft_vocab=ids, **SIZES) as model:
        done = model.generate(chats, max_new_tokens=NEW)
        taken = pool_requests([each.stats for each in done])
        found = {"drafted_on": model.describe()["draft_vocab_size"], "tau": taken.tau, "rounds": taken.rounds}
        return [each.token_ids for each in done], found


@click.command(help=usage(__doc__))
@click.option("--data", type=_FILE, required=True)
@click.option("--counts", type=_FILE, required=True)
@click.option("--questions", type=click.IntRange(1), default=128, show_default=True)
@click.option("--sizes", type=Listed(click.IntRange(1)), default="1024,768,512,256", show_default=True)
@click.option("--out", type=ResultFile(), help="Write the line there, too.")
def main(data: Path, counts: Path, questions: int, sizes: list[int], out: Path | None) -> None:
    chats = [[{"role": "user", "content": row["question"]}] for row in rows_of(data)[:questions]]
    texts, tokenizer = [row["answer"] for row in rows_of(counts)], load_tokenizer(MODEL)
    right, whole = measured(chats, None)
    lines = [{"tokens": "all", "size": whole["drafted_on"], **whole}]
    for size in sizes:
        for tokens, ids in (("frequent", draft_vocab_of(texts, size, tokenizer)), ("first", list(range(size)))):
            answers, found = measured(chats, ids)
            assert answers == right, "drafts decide no token"
            lines.append({"tokens": tokens, "size": size, **found, "tau_loss": 1 - found["tau"] / whole["tau"]})
            click.echo(lines[-1])
    publish({"benchmark": "draft_vocab", "model": MODEL, "K": K, "questions": len(chats), "lines": lines}, out)


if __name__ == "__main__":
    main()
