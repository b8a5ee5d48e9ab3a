"""What the documentation names exists, and the map of the code names every file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("attention", "drafters", "specdec", "evals", "benchmarks", "examples")


def mapped_files() -> set[str]:
    """Paths in the tables of docs/architecture.md: a row is a room and its files."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w/]+)/` \|([^|]*)\|", text, re.MULTILINE)
    return {f"{room}/{name}" for room, names in rows for name in re.findall(r"`([^`]+)`", names)}


def test_the_map_names_every_file_and_no_other() -> None:
    mapped = mapped_files()
    files = {path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    files |= {f"tests/{path.name}" for path in (ROOT / "tests").glob("*.py") if not path.name.startswith("test_")}
    assert {name for name in files if not name.endswith("__init__.py")} - mapped == set()
    assert [name for name in mapped if not (ROOT / name).exists()] == []


def moves() -> dict[str, str]:
    """Old path -> new path, of docs/moves.md."""
    text = (ROOT / "docs" / "moves.md").read_text("utf-8")
    return dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", text, re.MULTILINE))


def test_moved_files_are_listed_once_in_order() -> None:
    text = (ROOT / "docs" / "moves.md").read_text("utf-8")
    assert len(moves()) == text.count("\n| `") > 200
    assert list(moves()) == sorted(moves())


def test_every_section_that_is_referred_to_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    named = re.findall(r"\bsee ([A-Z][a-z]+(?: [a-z]+)*)\)", text)
    assert len(named) >= 2 and [name for name in named if name not in headings] == []


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    named = re.findall(r"\b((?:attention|drafters|specdec|evals|benchmarks|tests|examples|docs)/[\w./-]*\w)", text)
    old = moves() if page == "docs/moves.md" else {}
    assert [name for name in named if not (ROOT / name).exists() and name not in old] == []
