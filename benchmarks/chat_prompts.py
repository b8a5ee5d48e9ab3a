"""Prompts to train a chat model's head with: GSM8K's training questions, and tasks from templates and public text.

    python -m benchmarks.chat_prompts --gsm8k TRAIN.jsonl --avoid EVALUATED.jsonl … --out prompts.jsonl

Public text: docstrings of Python's standard library. Prompts that share eight words in a row with an evaluated question
are left out. The same seed gives the same prompts with the same Python.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import click

COMMON_WORDS = 8
TOPICS = """
volcanoes; the water cycle; honey bees; the French Revolution; solar panels; chess openings; sourdough bread; coral
reefs; the human heart; the Roman Empire; electric cars; photosynthesis; jazz; the Silk Road; black holes; vaccines;
inflation; the printing press; earthquakes; machine learning; the Olympic Games; tea; glaciers; democracy; the immune
system; medieval castles; recycling; migration of birds; the Great Wall of China; gravity; compound interest; public
libraries; the moon landing; rainforests; bridges; the alphabet; whales; renewable energy; cheese; the Industrial
Revolution; sleep; memory; batteries; the stock market; tides; Shakespeare; antibiotics; deserts; bicycles; DNA;
architecture; the Nile; clocks; magnetism; nutrition; theatre; satellites; soil; the violin; dinosaurs; trade unions;
rockets; poetry; wolves; cartography; the periodic table; city planning; ballet; the deep sea; probability; coffee;
the ozone layer; robots; folk tales; hurricanes; the Renaissance; lighthouses; enzymes; railways; perfume; the Arctic;
mirrors; crystals; novels; elections; gardens; the brain; paper; telescopes; salt; airports; mathematics in nature;
the Aztecs; noise; glass; islands
""".replace("\n", " ").split(";")
TEMPLATES = """
Explain {} to a child.
Write a short poem about {}.
What are three common misconceptions about {}?
Give me a brief history of {}.
Write an email to a colleague who asked for facts about {}.
List five interesting facts about {}, each in one sentence.
Compare {} and {}. What do they have in common, and how do they differ?
You are a travel guide. Tell your guests a story in which {} plays a role.
Write the opening paragraph of a novel about {}.
What are the advantages and disadvantages of studying {}?
Summarize what an educated person should know about {} in four sentences.
Write a quiz of four questions about {}, with the answers at the end.
Pretend to be a scientist who is interviewed about {}. Write three questions and your answers.
How has our understanding of {} changed during the last hundred years?
Draft a persuasive blog post that makes people care about {}.
Describe {} and {} as if they were characters in a play.
What would happen if {} had never existed?
Make an outline for a lecture of one hour about {}.
Write a product description for a museum exhibition about {}.
Who should I thank for what we know about {}, and why?
Name the main causes and effects that matter for {}.
Turn this note into a polite message: "need book on {} by friday, thanks".
Extract the nouns from this sentence as a JSON list: "My aunt gave a talk about {} at the town hall."
Write a dialogue between two friends who disagree about {}.
""".strip().split("\n")
TASKS = (
    "Summarize the following text in two or three sentences.\n\n{}",
    "Rewrite this text so that a beginner understands it.\n\n{}",
    "What are the main points of this documentation?\n\n{}",
)


def from_templates(pick: random.Random) -> Iterator[str]:
    """Every template with every topic; a second topic is drawn."""
    topics = [topic.strip() for topic in TOPICS]
    for template, topic in product(TEMPLATES, topics):
        yield template.format(topic, *(pick.choice(topics) for _ in range(template.count("{}") - 1)))


def from_docstrings(pick: random.Random) -> Iterator[str]:
    """Tasks about documented functions of the standard library: to sum up a text, and to write the function."""
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in ("antigravity", "this", "idlelib", "turtledemo"):
            continue
        try:
            module = importlib.import_module(name)
        except Exception:
            continue
        for member, found in sorted(vars(module).items()):
            text = inspect.getdoc(found) if callable(found) and not member.startswith("_") else None
            if text is None or getattr(found, "__module__", None) != name or len(text) > 3000:
                continue
            if len(text) > 300:
                yield pick.choice(TASKS).format(text)
            elif inspect.isfunction(found) and len(text) > 40:
                signature = str(inspect.signature(found))
                if " at 0x" not in signature:  # an address, which differs from process to process
                    yield f'Write a Python function.\n\ndef {member}{signature}:\n    """{text}"""\n'


def runs(text: str) -> set[tuple[str, ...]]:
    """Every run of `COMMON_WORDS` words."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + COMMON_WORDS]) for i in range(len(words) - COMMON_WORDS + 1)}


def texts(value: Any) -> Iterator[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts(each)


def lines(paths: Iterable[Path]) -> Iterator[Any]:
    """Every line of JSONL files."""
    for path in paths:
        yield from map(json.loads, path.read_text("utf-8").splitlines())


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--gsm8k", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--avoid", type=click.Path(exists=True, path_type=Path), multiple=True, help="Evaluated questions.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(gsm8k: Path, avoid: tuple[Path, ...], out: Path) -> None:
    """Write the prompts."""
    pick = random.Random(0)
    evaluated = set[tuple[str, ...]]().union(*(runs(text) for row in lines(avoid) for text in texts(row)))
    made = [*(row["question"] for row in lines([gsm8k])), *from_templates(pick), *from_docstrings(pick)]
    kept = [prompt for prompt in dict.fromkeys(made) if not runs(prompt) & evaluated]
    pick.shuffle(kept)
    out.write_text("".join(json.dumps({"question": prompt}) + "\n" for prompt in kept), "utf-8")
    print(json.dumps({"made": len(made), "kept": len(kept), "characters": sum(map(len, kept))}))


if __name__ == "__main__":
    main()
