"""Random grammars on random requests, in mixed batches with preemption; finished answers are checked by other means.

    PYTHONPATH=tests python -m tests.public.soak_grammars [--answers 500] [--out FILE]

JSON by `jsonschema`, the others by Python's `re`; greedy answers are compared with those without drafts. Ends in one
JSON line: `invalid`, `differing` and `unexpected` must be 0, `clean` true. Exits with 1 otherwise.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import jsonschema

from specdec import Grammar, SamplingParams, SpeculativeModel
from tests.fakes import free_everywhere

QUESTIONS = (
    "Question: Anna has 12 apples and buys 8 more. How many apples does she have?\nAnswer:",
    "Question: Tom reads 7 pages a day. How many pages does he read in a week?\nAnswer:",
    "Question: A box holds 6 pens. How many pens are in 9 boxes?\nAnswer:",
    "Question: Mia had 40 dollars and spent 13. How much is left?\nAnswer:",
)
WORDS = ("apples", "pens", "total", "name", "cost", "left", "yes", "no", "day", "box")
MOST_NEW, LONGEST = 160, 8


class Case(NamedTuple):
    """A grammar, and whether a whole text is of it."""

    grammar: Grammar
    valid: Callable[[str], bool]


def schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A JSON schema whose values are short."""
    kinds = [
        "integer",
        "string",
        "boolean",
        "enum",
        "const",
        "null",
        "number",
        *["array", "object", "anyOf"] * (depth > 0),
    ]
    kind = rng.choice(kinds)
    if kind == "integer":
        low = rng.randrange(-20, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 500)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": rng.choice([1, 10, 99])}
    if kind == "string":
        pattern = rng.choice([None, "^[a-z]{2,6}$", "^[A-Z][a-z]{1,5}$", "^[0-9]{3}-[0-9]{2}$"])
        return (
            {"type": "string", "pattern": pattern} if pattern else {"type": "string", "maxLength": rng.randrange(1, 12)}
        )
    if kind == "enum":
        return {"enum": rng.sample([*WORDS, 1, 2, True], rng.randrange(1, 4))}
    if kind == "const":
        return {"const": rng.choice(WORDS)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "anyOf":
        return {"anyOf": [schema(rng, 0), schema(rng, 0)]}
    if kind == "array":
        least = rng.randrange(3)
        return {"type": "array", "items": schema(rng, 0), "minItems": least, "maxItems": least + rng.randrange(1, 3)}
    names = rng.sample(WORDS, rng.randrange(1, 4))
    required = names[: rng.randrange(1, len(names) + 1)]
    fields = {name: schema(rng, depth - 1) for name in names}
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def json_case(rng: random.Random) -> Case:
    """A schema, compact or with white space."""
    own = schema(rng)

    def valid(text: str) -> bool:
        jsonschema.validate(json.loads(text), own)
        return max(map(len, re.findall(r"\s+", re.sub(r'"[^"]*"', "x", text))), default=0) <= LONGEST

    return Case(
        Grammar.json(own | {"x-guidance": {"whitespace_flexible": False}} if rng.random() < 0.7 else own), valid
    )


def regex_case(rng: random.Random) -> Case:
    """A regular expression of a few pieces."""
    pieces = [
        r"[a-z]{2,7}",
        r"[0-9]{1,4}",
        r"(?:yes|no|maybe)",
        r"[A-Z]{2}",
        r" ?- ?",
        r"(?:ab|ba){1,3}",
        r"x?y?z",
        r"\.[0-9]{2}",
    ]
    pattern = "".join(rng.choices(pieces, k=rng.randrange(1, 5)))
    return Case(Grammar.regex(pattern), lambda text: re.fullmatch(pattern, text) is not None)


def lark_case(rng: random.Random) -> Case:
    """A context-free grammar that a regular expression describes: a list, or one in brackets."""
    open_, close, item, most = (
        *rng.choice(["()", "[]", "{}"]),
        rng.choice(["[0-9]{1,3}", "[a-z]{2,4}", "[A-C]"]),
        rng.randrange(1, 5),
    )
    separator = rng.choice([",", "; ", "+", "|"])
    written = json.dumps(separator)
    source = f"start: {json.dumps(open_)} ITEM ({written} ITEM)~0..{most} {json.dumps(close)}\nITEM: /{item}/\n"
    pattern = f"{re.escape(open_)}{item}(?:{re.escape(separator)}{item}){{0,{most}}}{re.escape(close)}"
    return Case(Grammar.lark(source), lambda text: re.fullmatch(pattern, text) is not None)


def choice_case(rng: random.Random) -> Case:
    """A few words, and words of words."""
    texts = [" ".join(rng.sample(WORDS, rng.randrange(1, 4))) for _ in range(rng.randrange(2, 6))]
    return Case(Grammar.choice(texts), lambda text: text in texts)


def cases(count: int, seed: int) -> list[Case]:
    """So many different ones, of every kind."""
    rng = random.Random(seed)
    found: dict[Grammar, Case] = {}
    while len(found) < count:
        made = rng.choice([json_case, json_case, regex_case, lark_case, choice_case])(rng)
        found[made.grammar] = made
    return list(found.values())


def soak(answers: int, grammars: int, seed: int) -> dict[str, Any]:
    """Ask until so many answers with a grammar have ended."""
    rng, own = random.Random(seed), cases(grammars, seed)
    counts = dict.fromkeys(("ended", "unended", "greedy", "invalid", "differing", "unexpected", "accepted", "free"), 0)
    wrong: list[Any] = []
    started = time.perf_counter()
    sizes: dict[str, Any] = {
        "max_num_seqs": 6,
        "kv_cache_tokens": 480,
        "max_model_len": 300,
        "enable_prefix_caching": False,
    }
    with SpeculativeModel.from_pretrained(
        "gsm-llama", "auto", device="cpu", num_speculative_tokens=8, **sizes
    ) as model:
        batch = 0
        while counts["ended"] < answers:
            chosen = [rng.choice(own) if rng.random() < 0.85 else None for _ in range(16)]
            prompts = [rng.choice(QUESTIONS) for _ in chosen]
            params = [
                SamplingParams(
                    MOST_NEW,
                    grammar=None if case is None else case.grammar,
                    temperature=rng.choice([0.0, 0.7, 1.0]),
                    seed=batch * 100 + i,
                    num_speculative_tokens=rng.choice([0, 3, 8]),
                    repetition_penalty=rng.choice([None, None, 1.2]),
                )
                for i, case in enumerate(chosen)
            ]
            found = model.generate(prompts, params)
            greedy = [i for i, one in enumerate(params) if one.greedy and one.num_speculative_tokens]
            plain = model.generate(
                [prompts[i] for i in greedy],
                [
                    SamplingParams(
                        MOST_NEW,
                        grammar=params[i].grammar,
                        num_speculative_tokens=0,
                        repetition_penalty=params[i].repetition_penalty,
                    )
                    for i in greedy
                ],
            )
            for i, right in zip(greedy, plain, strict=True):
                counts["greedy"] += 1
                if found[i].token_ids != right.token_ids:
                    counts["differing"] += 1
                    wrong.append((repr(params[i].grammar), found[i].text, right.text))
            for case, completion in zip(chosen, found, strict=True):
                counts["accepted"] += sum(r.accepted for r in completion.stats.rounds)
                if case is None:
                    counts["free"] += 1
                elif completion.finish_reason != "eos":
                    counts["unended"] += 1
                else:
                    counts["ended"] += 1
                    if not is_valid(case, completion.text):
                        counts["invalid"] += 1
                        wrong.append((repr(case.grammar), completion.text))
            batch += 1
        stats = model.engine_stats
        facts = {
            "grammars": len(own),
            "preemptions": stats.preemptions,
            "rounds": stats.rounds,
            "tau": round(stats.tau, 3),
        }
        clean = free_everywhere(model)
    seconds = round(time.perf_counter() - started, 1)
    return counts | facts | {"clean": clean, "seconds": seconds, "wrong": wrong[:10]}


def is_valid(case: Case, text: str) -> bool:
    """Whether a text is of a grammar, by other means than what made it."""
    try:
        return case.valid(text)
    except (ValueError, jsonschema.ValidationError):
        return False


@click.command()
@click.option("--answers", default=500, show_default=True)
@click.option("--grammars", default=80, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(answers: int, grammars: int, seed: int, out: Path | None) -> None:
    """Soak, and say what was found."""
    found = soak(answers, grammars, seed)
    line = json.dumps(found)
    click.echo(line)
    if out is not None:
        out.write_text(line + "\n")
    sys.exit(bool(found["invalid"] or found["differing"] or found["unexpected"] or not found["clean"]))


if __name__ == "__main__":
    main()
