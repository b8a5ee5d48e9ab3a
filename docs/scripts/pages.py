"""Pages of the site: their blocks, links, anchors and sentences. Read by tests/public/test_manual.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
AUTHORS = (
    "architecture",
    "graphs",
    "caches",
    "targets",
    "threads",
    "parallel",
    "handoff",
    "reproduce",
    "performance",
    "benchmarks",
    "log",
)
"""Pages and folders for developers of this library, written before the manual: their examples are fragments."""
GENERATED = ("models.md", "generation_options.md", "reference/command_line.md")
BUILT = "benchmarks.md"
"""Made from benchmarks/results/ by `make docs`, and not in git."""
_BLOCK = re.compile(r"(?:<!-- not run: ([^>]*?) -->\n)?```(\w+)\n(.*?)```", re.S)


@dataclass(frozen=True)
class Block:
    """A code block; `reason`: why it is not run, "" where it is."""

    language: str
    code: str
    reason: str


def user_pages() -> list[str]:
    """Every page for users, by its path in docs/."""
    found = (path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    return sorted(page for page in found if page.partition("/")[0].removesuffix(".md") not in AUTHORS)


def read(page: str) -> str:
    """Its text."""
    return (DOCS / page).read_text("utf-8")


def blocks(page: str) -> list[Block]:
    """Its code blocks, in order."""
    return [Block(language, code, reason or "") for reason, language, code in _BLOCK.findall(read(page))]


def anchors(text: str) -> set[str]:
    """Those of its headings, as the site makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def links(text: str) -> list[str]:
    """Targets of its links, to other pages and inside it."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S))


def sentences(text: str) -> list[str]:
    """Of its running text and lists: no code, tables, headings, directives or comments."""
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", text, flags=re.S)
    text = re.sub(r"^(#|\||:::|!\[| {4}).*$", "\n", text, flags=re.M)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts: list[str] = []
    for paragraph in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.M):
        parts += re.split(r"(?<=[.?!])\**\s+", " ".join(paragraph.split()))
    return [part for part in parts if re.search(r"\w", part)]


def main() -> None:
    """Print the mean length of the sentences of every user page, longest first: python docs/scripts/pages.py."""
    written = (page for page in user_pages() if page not in GENERATED)
    found = {page: [len(one.split()) for one in sentences(read(page))] for page in written}
    for page, lengths in sorted(found.items(), key=lambda item: -sum(item[1]) / len(item[1])):
        print(f"{sum(lengths) / len(lengths):5.1f} words, {len(lengths):3} sentences  {page}")


if __name__ == "__main__":
    main()
