"""The list of mutants can be run: every edit finds its place; what the runner says of a run is what happened."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.entries import ROOT, Mutant, WrongEntryError, read
from tests.mutants.run import EditedFinder, Judged, Judging, Ran, Task, table

LENGTHS = Mutant(
    "short",
    "drafters/loops/lengths.py",
    "return num_new + num_accepted",
    "return num_new - num_accepted",
    "rows shrink",
    ("tests/drafters/loops/test_lengths.py",),
    "quick",
)
ROOMS = {"drafters/loops", "specdec/acceptance", "specdec/rounds", "specdec/engine", "specdec/requests"}
ROOMS |= {"attention/batch", "attention/cache"}


def test_every_edit_finds_its_place_and_is_judged() -> None:
    """And enough of them are killed: what issue 33 asks for."""
    mutants = read()
    assert len(mutants) >= 200 and all(mutant.killed or mutant.equivalent for mutant in mutants)
    assert all(mutant.does for mutant in mutants)
    counts = Counter(mutant.killed for mutant in mutants if mutant.equivalent is None)
    assert counts["quick"] >= 0.85 * counts.total()
    files = {mutant.file for mutant in mutants}
    assert {"/".join(file.split("/")[:2]) for file in files} >= ROOMS and any(f.startswith("evals/") for f in files)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"old": "return num_old"}, "found 0 times in drafters/loops/lengths.py"),
        ({"old": "return"}, "found 4 times"),
        ({"file": "drafters/loops/lenghts.py"}, "there is no file"),
        ({"new": LENGTHS.old}, "are the same"),
        ({"killed": "never"}, "allowed are quick, test"),
        ({"equivalent": "it is"}, "both killed and equivalent"),
        ({"tests": ()}, "name the narrowest file"),
        ({"tests": ("tests/test_nothing.py",)}, "there are no tests tests/test_nothing.py"),
    ],
)
def test_entries_that_cannot_be_run_are_refused(change: dict[str, object], words: str) -> None:
    LENGTHS.check()
    wrong = Mutant(**{**vars(LENGTHS), **change})  # type: ignore[arg-type]
    with pytest.raises(WrongEntryError, match=words):
        wrong.check()


def test_edits_that_are_no_python_and_lists_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongEntryError, match="is no Python"):
        Mutant(**{**vars(LENGTHS), "new": "return num_new +"}).check_syntax()
    entry = "[[mutant]]\n" + "\n".join(
        f"{name} = {value!r}" for name, value in vars(LENGTHS).items() if isinstance(value, str) and value
    )
    entry += f"\ntests = {list(LENGTHS.tests)}\n"
    for text, words in ((entry * 2, "two entries have the id short"), (entry + "by = 'x'\n", "unknown: by")):
        (tmp_path / "list.toml").write_text(text)
        with pytest.raises(WrongEntryError, match=words):
            read(tmp_path / "list.toml")
    (tmp_path / "list.toml").write_text(entry)
    assert read(tmp_path / "list.toml") == [LENGTHS]


def test_the_edited_file_is_imported_from_memory() -> None:
    """And no other; the file and what Python keeps of it stay as they are."""
    path, finder = ROOT / LENGTHS.file, EditedFinder(LENGTHS)
    before = path.read_bytes()
    assert finder.find_spec("drafters.loops.base", None) is None and not finder.used
    spec = finder.find_spec("drafters.loops.lengths", [str(path.parent)])
    assert spec is not None and spec.loader is not None and finder.used
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.tokens_accepted(5, 2) == 3
    assert path.read_bytes() == before


PASSED, FAILED, HUNG = Ran("passed", "", 1.0), Ran("failed", "a test", 1.0), Ran("hung", "", 1.0)


@pytest.mark.parametrize(
    ("said", "runs", "found", "right"),
    [
        ("quick", [FAILED], "quick", True),
        ("quick", [HUNG], "quick", True),
        ("quick", [PASSED, FAILED], "test", False),
        ("test", [PASSED, FAILED], "test", True),
        ("test", [FAILED], "quick", False),
        ("quick", [PASSED, PASSED], "survived", False),
        ("quick", [Ran("not imported", "", 1.0)] * 2, "error", False),
        ("test", [Ran("no tests", "", 1.0), FAILED], "test", True),
        ("equivalent", [PASSED, PASSED], "equivalent", True),
        ("equivalent", [PASSED, FAILED], "test", False),
        (None, [FAILED], "quick", False),
    ],
)
def test_a_mutant_is_judged_by_its_runs(said: str | None, runs: list[Ran], found: str, right: bool) -> None:
    fate = {"killed": None, "equivalent": "it is"} if said == "equivalent" else {"killed": said}
    judged: list[Judged] = []
    judging = Judging(Mutant(**{**vars(LENGTHS), **fate}), judged.append)  # type: ignore[arg-type]
    task: Task | None = judging.first
    places = []
    for ran in runs:
        assert task is not None
        places.append(task.place)
        task = judging.after(ran)
    assert task is None and places == ["quick", "test"][: len(runs)]
    (one,) = judged
    assert (one.found, one.right, one.seconds) == (found, right, len(runs))
    assert any("NOT AS LISTED short" in line for line in table(judged)) is not right
