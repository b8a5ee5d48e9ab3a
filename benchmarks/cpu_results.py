"""Medians, ratios and bounds of what bench_cpu measured, and the tables of docs/performance.md.

python -m benchmarks.cpu_results RESULTS.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.document import md_table, usage

TRANSFORMERS, PROMPT_LOOKUP = "transformers", "transformers, prompt lookup"
K0, LOOKUP, HEAD = "specdec, K = 0", "specdec, lookup", "specdec, head"
LLAMA, LLAMA_NGRAM = "llama.cpp", "llama.cpp, n-gram drafts"
ALL, QUOTING, BATCH = "all", "quoting", "batch"
"""Spec-Bench's six categories together; a category beside them; the six in batches."""
BASES = {"to_transformers": TRANSFORMERS, "to_K0": K0, "to_llama": LLAMA}
SPENT = ("wall_s", "cpu_s")
Line = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """What an arm took once for prompts that it was asked at once.

    Attributes:
        turn: from 0. category: of the prompts. asked: their names. arm: whose. wall_s, cpu_s: of all prompts together.
        rounds: forwards that decided tokens, or None. answers: token ids of each.
    """

    turn: int
    category: str
    asked: tuple[str, ...]
    arm: str
    wall_s: float
    cpu_s: float
    rounds: int | None
    answers: list[list[int]]


def within(records: Iterable[Record], category: str) -> list[Record]:
    """Those of a category."""
    return [r for r in records if category in (r.category, ALL if r.category not in (QUOTING, BATCH) else None)]


def by_turn(records: Iterable[Record], arm: str) -> list[list[float]]:
    """Wall and CPU seconds of an arm in each turn; empty where it was not measured."""
    turns: dict[int, list[float]] = {}
    for r in records:
        if r.arm == arm:
            wall, cpu = turns.get(r.turn, (0.0, 0.0))
            turns[r.turn] = [wall + r.wall_s, cpu + r.cpu_s]
    return list(turns.values())


def ratios(own: list[list[float]], base: list[list[float]]) -> list[float] | None:
    """Medians of the turns' ratios, of wall and of CPU seconds; None without a base.

    >>> ratios([[1.0, 1.0], [4.0, 2.0], [9.0, 3.0]], [[2.0, 1.0], [4.0, 1.0], [6.0, 1.0]])
    [1.0, 2.0]
    """
    turns = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(own, base, strict=False)]
    return [round(median(each), 3) for each in zip(*turns, strict=True)] if turns else None


def common(one: list[int], other: list[int]) -> int:
    """Tokens before the first difference.

    >>> common([1, 2, 3], [1, 2, 4])
    2
    """
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def compared(answers: dict[str, list[int]], reference: dict[str, list[int]]) -> Line:
    """How many answers equal the reference's, and the median of the tokens before they part."""
    pairs = [(own, reference[name]) for name, own in answers.items()]
    equal = sum(own == other for own, other in pairs)
    return {"answers": len(pairs), "equal": equal, "part_after": median(common(*pair) for pair in pairs)}


def answers_of(records: Iterable[Record]) -> dict[str, list[int]]:
    """By the prompt's name, the last turn's."""
    return {name: ids for r in records for name, ids in zip(r.asked, r.answers, strict=True)}


def line(records: list[Record], arm: str, reference: dict[str, list[int]]) -> Line:
    """An arm in a category. `reference`: what its answers are compared with."""
    own, spent = [r for r in records if r.arm == arm], by_turn(records, arm)
    answers = answers_of(own)
    tokens = sum(map(len, answers.values()))
    wall, cpu = (median(each) for each in zip(*spent, strict=True))
    rounds = sum(r.rounds or 0 for r in own) / len(spent)
    found: Line = {"arm": arm, "turns": len(spent), "wall_s": round(wall, 3), "cpu_s": round(cpu, 3)}
    found |= {"tokens_per_s": round(tokens / wall, 2), "tokens_per_cpu_s": round(tokens / cpu, 2)}
    found |= {"tokens_per_round": round(tokens / rounds, 3) if rounds else None}
    found |= {"repeated": all(answers[name] == ids for r in own for name, ids in answers_of([r]).items())}
    return found | compared(answers, reference) | {to: ratios(spent, by_turn(records, b)) for to, b in BASES.items()}


def results(records: list[Record]) -> list[Line]:
    """Each arm in each category. Answers are compared with those of transformers to the same prompts."""
    reference = answers_of(r for r in records if r.arm == TRANSFORMERS)
    found = []
    for category in [ALL, *dict.fromkeys(r.category for r in records)]:
        own = within(records, category)
        found += [{"category": category} | line(own, arm, reference) for arm in dict.fromkeys(r.arm for r in own)]
    return found


def bounds(records: list[Record]) -> list[Line]:
    """The bounds of issue 60 on one arm's seconds over another's, wall and CPU, where both were measured."""
    categories = list(dict.fromkeys(r.category for r in records if r.category != BATCH))
    wanted: list[tuple[str, str, str, float]] = [(ALL, K0, TRANSFORMERS, 0.75), (ALL, HEAD, K0, 0.70)]
    wanted += [(ALL, HEAD, base, 1.0) for base in (LLAMA, LLAMA_NGRAM)]
    wanted += [(c, LOOKUP, K0, 1.02) for c in [ALL, *categories]]
    wanted += [(c, LOOKUP, PROMPT_LOOKUP, 1.0) for c in categories]
    wanted += [(BATCH, arm, LLAMA, 1.0) for arm in (K0, LOOKUP, HEAD)]
    return list(_measured(records, wanted))


def _measured(records: list[Record], wanted: Iterable[tuple[str, str, str, float]]) -> Iterator[Line]:
    for category, arm, base, limit in wanted:
        own = within(records, category)
        found = ratios(by_turn(own, arm), by_turn(own, base))
        if found:
            named = {"category": category, "arm": arm, "over": base, "limit": limit}
            yield named | {"measured": found, "met": max(found) <= limit}


def table(document: Line) -> str:
    """Tokens a second, prompts included, as a table of Markdown: an arm a row, a category a column."""
    lines = {(each["category"], each["arm"]): each for each in document["results"]}
    categories = list(dict.fromkeys(category for category, _ in lines))
    rows = [[document["dtype"], "tokens a forward", *categories]]
    for arm in dict.fromkeys(arm for _, arm in lines):
        own = [lines.get((category, arm)) for category in categories]
        taken = next((each["tokens_per_round"] for each in own if each), None)
        rows.append([arm, f"{taken:.2f}" if taken else "", *(f"{e['tokens_per_s']:.1f}" if e else "" for e in own)])
    return md_table(rows)


@click.command(help=usage(__doc__))
@click.argument("file", type=click.Path(exists=True, path_type=Path))
def main(file: Path) -> None:
    """Print the table of each line, and the bounds that were missed."""
    for document in map(json.loads, file.read_text("utf-8").splitlines()):
        click.echo(f"{document['threads']} threads, batches of {document['rows']}:\n\n{table(document)}")
        for each in document["bounds"]:
            if not each["met"]:
                click.echo("missed: {category}, {arm} over {over}: {measured}, at most {limit}".format(**each))


if __name__ == "__main__":
    main()
