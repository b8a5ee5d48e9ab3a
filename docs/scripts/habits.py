"""Habits of the library's docstrings and comments, per 10,000 words.

python docs/scripts/habits.py [FOLDER …] [--lines]
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("attention", "drafters", "specdec", "evals")
HABITS = {
    "say, tell, ask, want": r"\b(?:says?|said|tells?|told|asks?|asked|wants?|wanted)\b",
    "stand": r"\b(?:stands?|stood)\b",
    "beside": r"\bbeside\b",
    "there is": r"\bthere (?:is|are|was|were)\b|\bthat there\b",
    "of ours, that of": r"\bof ours\b|\bthat of\b|\bthose of\b|\bof its own\b|\bof their own\b",
    "whoever, nobody": r"\b(?:whoever|nobody|nothing else)\b",
}
"""Phrases that read as translated, from the house's list."""


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring (also of attributes) and comment of a file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for statement in getattr(node, "body", None) or () if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, re.sub(r"(?m)^ *(?:>>>|\.\.\.).*$", "", value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def found(paths: Iterator[Path]) -> tuple[int, dict[str, list[str]]]:
    """Words in all, and the places of each habit."""
    words, places = 0, {name: list[str]() for name in HABITS}
    for path in paths:
        for line, text in texts(path.read_text("utf-8")):
            words += len(text.split())
            for name, pattern in HABITS.items():
                for match in re.finditer(pattern, text, re.I):
                    at = line + text.count("\n", 0, match.start())
                    places[name].append(f"{path.relative_to(ROOT)}:{at}: {match[0]}")
    return words, places


def main() -> None:
    """Print the counts; with --lines every place."""
    folders = [argument for argument in sys.argv[1:] if not argument.startswith("--")] or PACKAGES
    words, places = found(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    for name, own in places.items():
        print(f"{1e4 * len(own) / max(words, 1):6.1f}  {name} ({len(own)} in {words} words)")
        if "--lines" in sys.argv:
            print("\n".join(own))


if __name__ == "__main__":
    main()
