"""`specdec batch` over many rows of a tiny model: memory stays flat, and a run that is killed ends as one that is not.

    python -m tests.public.soak_batches [--rows 20000] [--kills 3] [--ray 2] [--out FILE]

One run goes through undisturbed, its memory sampled. A second one is killed (SIGKILL) at random moments and started
again until it ends. With --ray N a third one is spread over N workers, of which one is killed in the middle. Every row
must be answered exactly once, and alike in all runs, sampled rows too. Ends in one JSON line; exits with 1 where it is
not so.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import fakes

MB = 2**20
SIZES = ("--max-new-tokens", "6", "--max-num-seqs", "64", "--kv-cache-tokens", "16384", "--device", "cpu")


@dataclass(frozen=True)
class Place:
    """What a run answers, and with what."""

    source: Path
    rows: int
    model: str
    draft: str


def save_model(folder: Path) -> None:
    """A tiny random Llama and a tokenizer of words w0, w1, …"""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(fakes.VOCAB)}, unk_token="w0"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    fakes.tiny_llama().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def write_rows(path: Path, count: int, rng: random.Random) -> None:
    """Rows of every form; every second one is sampled, and one of fifty cannot be answered."""
    with path.open("w") as file:
        for i in range(count):
            text = " ".join(f"w{rng.randrange(fakes.VOCAB)}" for _ in range(rng.randrange(3, 12)))
            row: dict[str, Any] = {"id": f"row-{i}", "prompt": text, "temperature": 0.9 * (i % 2)}
            if i % 5 == 1:
                body = {"model": "tiny", "prompt": text, "max_tokens": 3, "temperature": 1.0, "n": 1 + i % 2}
                row = {"custom_id": f"row-{i}", "method": "POST", "url": "/v1/completions", "body": body}
            elif i % 5 == 2:
                row = {"token_ids": [rng.randrange(fakes.VOCAB) for _ in range(8)], "temperature": 0.5, "top_k": 9}
            elif i % 50 == 3:
                row["prompt"] = text * 400
            file.write(("{bad" if i % 50 == 4 else "") + json.dumps(row) + "\n")


def answers(path: Path) -> list[dict[str, Any]]:
    """The answers of a file, without the time at which they were made."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for each in found:
        ((each.get("response") or {}).get("body") or {}).pop("created", None)
    return sorted(found, key=json.dumps)


class Run:
    """The command, in a process of its own."""

    def __init__(self, place: Place, target: Path, *options: str) -> None:
        self.target, self.log = target, tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", "specdec.cli.main", "batch", str(place.source), str(target)]
        options = ("--model", place.model, "--draft", place.draft, *SIZES, *options)
        self.process = subprocess.Popen(
            [*command, *options], stderr=self.log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )

    def wait(self, until: Callable[[int], bool] = lambda lines: False) -> list[tuple[int, float]]:
        """(answers written, resident MiB) until the process ends, or so many answers are there."""
        seen, lines, place = [], 0, 0
        while self.process.poll() is None:
            if self.target.exists():
                with self.target.open("rb") as file:
                    file.seek(place)
                    new = file.read()
                place, lines = place + len(new), lines + new.count(b"\n")
                seen.append((lines, psutil.Process(self.process.pid).memory_info().rss / MB))
            if until(lines):
                break
            time.sleep(0.2)
        return seen

    def end(self) -> str:
        """What it has written to standard error. Raises AssertionError: it failed."""
        self.log.seek(0)
        text = self.log.read()
        assert self.process.wait() in (0, 1), text
        return text.strip().splitlines()[-1]

    def workers(self) -> list[psutil.Process]:
        """Processes of its Ray workers."""
        each = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in each if "ray::Worker" in " ".join(one.cmdline())]


def undisturbed(place: Place, target: Path) -> dict[str, Any]:
    """A run that goes through, and its memory in the first tenth of its rows and in the last."""
    run = Run(place, target)
    seen = [(lines, rss) for lines, rss in run.wait() if lines]
    first = statistics.median(rss for lines, rss in seen if lines <= place.rows / 10)
    last = statistics.median(rss for lines, rss in seen if lines > place.rows * 0.9)
    return {"summary": run.end(), "rss_first_tenth_mib": round(first, 1), "rss_last_tenth_mib": round(last, 1)}


def killed(place: Place, target: Path, kills: int, rng: random.Random) -> dict[str, Any]:
    """A run that is killed at random moments and started again each time."""
    moments = []
    for share in sorted(rng.uniform(0.05, 0.95) for _ in range(kills)):
        run = Run(place, target)
        run.wait(lambda lines, share=share: lines >= share * place.rows)  # type: ignore[misc]
        run.process.kill()
        run.process.wait()
        moments.append(target.read_bytes().count(b"\n"))
    run = Run(place, target)
    run.wait()
    return {"killed_after_rows": moments, "summary": run.end()}


def spread(place: Place, target: Path, workers: int) -> dict[str, Any]:
    """A run over Ray's workers, of which one is killed in the middle."""
    run = Run(place, target, "--ray", str(workers))
    run.wait(lambda lines: lines >= place.rows / 2)
    victim = run.workers()[0]
    victim.kill()
    after = target.read_bytes().count(b"\n")
    run.wait()
    return {"workers": workers, "worker_killed_after_rows": after, "summary": run.end()}


@click.command()
@click.option("--rows", default=20_000, show_default=True)
@click.option("--kills", default=3, show_default=True)
@click.option("--ray", "workers", default=0, show_default=True, help="Ray workers; 0: without Ray.")
@click.option("--seed", default=0, show_default=True)
@click.option("--model", default="tiny", show_default=True, help="As of the command; tiny: a random one.")
@click.option("--draft", default="lookup", show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(rows: int, kills: int, workers: int, seed: int, model: str, draft: str, out: Path | None) -> None:
    """See above."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        place = Place(root / "in.jsonl", rows, str(root / "model") if model == "tiny" else model, draft)
        if model == "tiny":
            save_model(root / "model")
        write_rows(place.source, rows, rng)
        result: dict[str, Any] = {"rows": rows, "undisturbed": undisturbed(place, root / "a.jsonl")}
        right = answers(root / "a.jsonl")
        once = {"a.jsonl": len(right) == rows}
        if kills:
            result["killed"] = killed(place, root / "b.jsonl", kills, rng)
            once["b.jsonl"] = answers(root / "b.jsonl") == right
        if workers:
            result["ray"] = spread(place, root / "c.jsonl", workers)
            once["c.jsonl"] = answers(root / "c.jsonl") == right
    flat = result["undisturbed"]["rss_last_tenth_mib"] < 1.1 * result["undisturbed"]["rss_first_tenth_mib"]
    result |= {"each_row_once_and_alike": all(once.values()), "memory_flat": flat}
    click.echo(json.dumps(result, ensure_ascii=False))
    if out is not None:
        out.write_text(json.dumps(result, ensure_ascii=False) + "\n")
    sys.exit(0 if flat and all(once.values()) else 1)


if __name__ == "__main__":
    main()
