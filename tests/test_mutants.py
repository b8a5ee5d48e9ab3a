"""The list of mutants can be run: every edit finds its place; what the runner says of a run is what happened."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.edits import PACKAGES, EditedCopy, EditedFinder, edit, has_kernels
from tests.mutants.entries import ROOT, Mutant, WrongEntryError, read
from tests.mutants.run import Judged, Judging, Ran, Task, table
from tests.rank_server import run_python

__all__ = ["run_python"]

LENGTHS = Mutant(
    "short",
    "specdec/rounds/rows.py",
    "np.maximum(0, np.minimum(num_speculative_tokens, room))",
    "np.maximum(0, num_speculative_tokens)",
    "more drafts than the room",
    ("tests/specdec/rounds/test_draft_room.py",),
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


def test_every_file_of_kernels_is_edited() -> None:
    """By several edits: issue 56 asks for 60 in all."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    kernels = {path.relative_to(ROOT).as_posix() for path in files if has_kernels(path.read_text("utf-8"))}
    counts = Counter(mutant.file for mutant in read() if mutant.file in kernels)
    assert counts.keys() == kernels and min(counts.values()) >= 2 and counts.total() >= 60


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"old": "return num_old"}, "found 0 times in specdec/rounds/rows.py"),
        ({"old": "return"}, "found .. times"),
        ({"file": "specdec/rounds/rwos.py"}, "there is no file"),
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
        Mutant(**{**vars(LENGTHS), "new": "np.maximum("}).check_syntax()
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
    spec = finder.find_spec("specdec.rounds.rows", [str(path.parent)])
    assert spec is not None and spec.loader is not None and finder.used
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.drafts_within(5, 2) == 5
    assert path.read_bytes() == before


KERNEL = Mutant(
    "norm",
    "specdec/ops/elementwise_kernel.py",
    "tl.sum(values * values, 0) / WIDTH + eps",
    "tl.sum(values * values, 0) / BLOCK + eps",
    "the mean is that of a power of two",
    ("tests/test_triton_kernels.py",),
    "quick",
)


@pytest.mark.slow
def test_kernels_are_edited_on_disk_in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads a kernel's source from the file of its module; all other files are edited in memory."""
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr("sys.meta_path", list(sys.meta_path))
    before = (ROOT / KERNEL.file).read_bytes()
    edited = edit(KERNEL, tmp_path)
    assert isinstance(edited, EditedCopy) and sys.path[0] == str(tmp_path) and not edited.used
    assert (tmp_path / KERNEL.file).read_text() == KERNEL.source()
    assert (tmp_path / LENGTHS.file).read_bytes() == (ROOT / LENGTHS.file).read_bytes()
    assert (ROOT / KERNEL.file).read_bytes() == before
    assert isinstance(edit(LENGTHS, tmp_path), EditedFinder)
    name = "specdec.ops.elementwise_kernel"
    for origin, used in ((ROOT, False), (tmp_path, True)):
        module = types.ModuleType(name)
        module.__file__ = str(origin / KERNEL.file)
        monkeypatch.setitem(sys.modules, name, module)
        assert edited.used is used


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")
@pytest.mark.thorough
def test_an_edited_kernel_is_what_runs(run_python: Any) -> None:
    """In a child of the runner; as Triton reads the file, it is not enough that Python runs the edit."""
    script = """
import sys
from tests.mutants.entries import Mutant
from tests.mutants.run import judge_all, preload
preload()
(judged,) = judge_all([Mutant(*sys.argv[1:6], (sys.argv[6] + "::test_norm",), "quick")], 1)
print(judged.found, judged.by)
"""
    given = [value if isinstance(value, str) else value[0] for value in vars(KERNEL).values() if value][:6]
    done = run_python(script, *given, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.splitlines()[-1].startswith("quick tests/test_triton_kernels.py::test_norm"), done.stderr[-2000:]


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
