"""What the documentation names exists, and the map of the code names every room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("attention", "drafters", "specdec", "evals", "benchmarks", "examples")


def mapped_rooms() -> set[str]:
    """Folders in the tables of docs/architecture.md: a row is a room, or several of a kind."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    return {
        room
        for row in re.findall(r"^\| (`[\w/]+/`[^|]*)\|", text, re.MULTILINE)
        for room in re.findall(r"`([\w/]+)/`", row)
    }


def test_the_map_names_every_room_and_no_other() -> None:
    files = (path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    rooms = {file.parent.as_posix() for file in files if file.name != "__init__.py"}
    assert rooms - mapped_rooms() == set()
    assert [room for room in mapped_rooms() if not (ROOT / room).is_dir()] == []


def test_every_section_that_is_referred_to_exists() -> None:
    pages = [path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md")]
    headings = {page: set(re.findall(r"^## (.+)$", page, re.MULTILINE)) for page in pages}
    named = [(page, name) for page in pages for name in re.findall(r"\(see ([A-Z][a-z]+(?: [a-z]+)*)\)", page)]
    assert named and [name for page, name in named if name not in headings[page]] == []
    elsewhere = [
        found for page in pages for found in re.findall(r"`(docs/\w+\.md)`, \"?([A-Z][a-z]+(?: [a-z]+)*)", page)
    ]
    assert len(elsewhere) >= 2
    assert [(path, name) for path, name in elsewhere if f"## {name}\n" not in (ROOT / path).read_text("utf-8")] == []


def test_the_map_can_be_read_at_one_go() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text("utf-8").splitlines()) <= 350


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    named = re.findall(r"\b((?:attention|drafters|specdec|evals|benchmarks|tests|examples|docs)/[\w./-]*\w)", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
