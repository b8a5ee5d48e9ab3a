"""The house stays liveable: how long its files are, how far a token walks, and that the spine names no wing.

`python -m tests.house` prints where the house is. How much code there may be in all is not decided here: `.ci/run`
runs a check of the parse tree's nodes, which lies beside the checkout.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests import house
from tests.rank_server import run_python

__all__ = ["run_python"]

ROOT = Path(__file__).resolve().parent.parent
MOST_IN_A_ROOM = 16
MOST_LINES_A_FILE, MOST_LINES_A_FUNCTION = 430, 45
MOST_WITH_ONE_IMPORTER, MOST_NAMES_TWICE, MOST_CLASSES_TWICE = 83, 17, 1
MOST_OF_A_ROUND = {"functions": 160, "files": 38, "visits": 95, "depth": 17}
MOST_OF_A_COPY = {"functions": 15, "files": 5}
MOST_LINES_OF_STEP = 14
MOST_LINES_THAT_NAME_A_WING = 0.002
"""Share of the spine's lines."""
IGNORED_FOLDERS = (
    *("__pycache__", "build", "develop-eggs", "dist", "downloads", "eggs", ".eggs", "lib", "lib64", "parts", "sdist"),
    *("var", "wheels", "htmlcov", "cover", "instance", "target", "profile_default", "env", "venv", "ENV", "site"),
)
IGNORED_FILES = (
    "*.py[codz]",
    "*.so",
    "*.manifest",
    "*.spec",
    "*.mo",
    "*.pot",
    "*.log",
    "local_settings.py",
    "MANIFEST",
)
"""What GitHub takes for output of tools in a Python repository, and searches skip.

Source: github/gitignore, Python.gitignore.
"""


def ignored(paths: list[Path]) -> list[Path]:
    """Paths that tools take for output."""
    return [
        path
        for path in paths
        if set(path.parts[:-1]) & set(IGNORED_FOLDERS) or any(fnmatch(path.name, form) for form in IGNORED_FILES)
    ]


@pytest.fixture(scope="module", autouse=True)
def trees_are_freed() -> Iterator[None]:
    yield
    house.trees.cache_clear()


def test_no_room_is_overcrowded() -> None:
    rooms = Counter(path.parent.as_posix() for path in house.modules(ROOT))
    assert [room for room, count in rooms.items() if count > MOST_IN_A_ROOM] == []


@pytest.mark.slow
def test_a_token_walks_no_further_than_it_may(run_python: Any) -> None:
    """Of one steady round on a CPU, in a process without the check mode of the tests, whose checks would be counted."""
    code = """
import json, pathlib, sys
from tests import house
print(json.dumps(house.distances(pathlib.Path(sys.argv[1]))))
"""
    done = run_python(code, str(ROOT), env={**os.environ, "SPECDEC_CHECK": "0", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: count for name, count in found["round"].items() if count > MOST_OF_A_ROUND[name]} == {}
    assert {name: count for name, count in found["copy"].items() if count > MOST_OF_A_COPY[name]} == {}
    assert house.step_lines(ROOT) <= MOST_LINES_OF_STEP


def test_no_file_and_no_function_is_too_long() -> None:
    (lines, file), (body, function) = house.longest(ROOT)
    assert lines <= MOST_LINES_A_FILE, file
    assert body <= MOST_LINES_A_FUNCTION, function


def test_the_spine_names_no_wing() -> None:
    door = Path("specdec/model.py")  # its methods call extensions, one line each
    spine = [path for path in house.modules(ROOT) if house.is_spine(path) and path != door]
    named = {path.as_posix(): len(house.wing_lines(ROOT, path)) for path in spine}
    lines = sum((ROOT / path).read_text("utf-8").count("\n") for path in spine)
    assert sum(named.values()) / lines <= MOST_LINES_THAT_NAME_A_WING, Counter(named).most_common(5)


def test_classes_and_modules_are_not_cut_in_two() -> None:
    assert house.single_heirs(ROOT) == []
    assert sum(len(own) == 1 for own in house.importers(ROOT).values()) <= MOST_WITH_ONE_IMPORTER
    names = Counter(path.name for path in house.modules(ROOT))
    assert sum(count > 1 for count in names.values()) <= MOST_NAMES_TWICE
    assert len(house.classes_twice(ROOT)) <= MOST_CLASSES_TWICE


def test_no_file_lies_where_tools_expect_output() -> None:
    assert ignored(house.modules(ROOT)) == []
    assert ignored([Path("specdec/target/live.py"), Path("specdec/live.py")]) == [Path("specdec/target/live.py")]


@pytest.fixture
def cottage(tmp_path: Path) -> Path:
    """A repository with two files of the spine and a room of its own."""
    sources = {
        "specdec/engine/engine.py": "class Base:\n    pass\n\n\nclass Engine(Base):\n    pass\n\n\n"
        "class Made:\n    pass\n\n\nclass Heir(Made):\n    pass\n\n\ndef turn(x):\n    x.__class__ = Made\n",
        "specdec/rounds/rows.py": "from specdec.other.alone import f\n\n\ndef rows(handoff):\n    return f(handoff)\n",
        "specdec/other/alone.py": "def f(x):\n" + "    x += 1\n" * 50 + "    return x\n",
        "specdec/other/rows.py": "moved = 1\n",
        "specdec/extensions/handoff/moved.py": "leaves = 1\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def test_ordinary_words_name_no_wing(cottage: Path) -> None:
    """A graph is replayed and text is moved in rounds that have no wing."""
    text = "moved = cut()\ngraph.replay()\nstates.max_replay = 1\nrow.moved_shapes = replay_of(row)\n"
    (cottage / "specdec/rounds/words.py").write_text(text)
    found = house.wing_lines(cottage, Path("specdec/rounds/words.py"))
    assert [line for line, _ in found] == [3, 4] and found[0][1] == "recurrence"


def test_planted_faults_are_found(cottage: Path) -> None:
    assert len(house.modules(cottage)) == 5
    assert house.wing_lines(cottage, Path("specdec/rounds/rows.py")) == [(4, "handoff"), (5, "handoff")]
    assert not house.is_spine(Path("specdec/other/rows.py"))
    assert house.single_heirs(cottage) == ["Base"]
    assert house.importers(cottage)["specdec.other.alone"] == {"specdec.rounds.rows"}
    assert house.longest(cottage)[1] == (51, "specdec/other/alone.py: f")
