"""What the documentation names exists, and the map of the code names every file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("attention", "drafters", "specdec", "evals")


def mapped_files() -> set[str]:
    """Paths in the table of docs/architecture.md; a row without a room belongs to the room above it."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    room, found = "", set()
    for first, names in re.findall(r"^\|([^|]*)\|([^|]*)\|", text, re.MULTILINE):
        room = first.strip() or room
        found |= {f"{room}/{name}" for name in re.findall(r"`([^`]+)`", names)}
    return found


def test_the_map_names_every_file_and_no_other() -> None:
    mapped = mapped_files()
    files = {path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).glob("*.py")}
    assert {name for name in files if not name.endswith("__init__.py")} - mapped == set()
    assert [name for name in mapped if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    named = re.findall(r"\b((?:attention|drafters|specdec|evals|benchmarks|tests|examples|docs)/[\w./-]*\w)", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
