"""The mutation run: every edit of the list is made on its own, and the tests named for it must fail.

One process imports torch, transformers and pytest, and nothing of this repository. For each mutant it forks a child,
which imports the edited file and runs the tests: from memory, or, as Triton reads the source of its kernels from disk,
from a copy of the packages in a temporary folder. Nothing is written to the source tree. Processes that tests start
themselves import the file from there, unedited.

    python -m tests.mutants.run [--jobs 2] [--only PATTERN …] [--json PATH]
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from os import _exit
from pathlib import Path
from typing import Any

from tests.mutants.edits import edit
from tests.mutants.entries import LIST, PLACES, ROOT, Mutant, WrongEntryError, read

MARKERS = {"quick": "not slow and not long", "test": "not long"}
_PRELOADED = (
    "torch",
    "numpy",
    "hypothesis",
    "hypothesis.strategies",
    "hypothesis.extra.numpy",
    "pytest",
    "_pytest.assertion.rewrite",
    "torch.utils.collect_env",
    "torch.utils._python_dispatch",
    "transformers",
    "transformers.models.llama.modeling_llama",
)
_LEAST_LIMIT_S = 30.0
_LIMIT_FACTOR = 10.0
"""A run that takes so many times as long as without an edit, and `_LEAST_LIMIT_S`, hangs: it counts as killed."""
_PAUSE_S = 0.02
_LIMIT_S = 1800.0
"""Of a run that there is nothing to compare with."""


@dataclass(frozen=True)
class Ran:
    """How the tests of one child ended.

    Attributes:
        verdict: "passed", "failed", "hung", "crashed", "not importable", "no tests" or "not imported".
        by: the test that failed first, or the end of what was printed. seconds: wall clock.
    """

    verdict: str
    by: str
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether the edit was noticed."""
        return self.verdict in ("failed", "hung", "crashed", "not importable")


@dataclass(frozen=True)
class Task:
    """Tests to be run on one mutant, or on the unedited library (None)."""

    mutant: Mutant | None
    tests: tuple[str, ...]
    place: str


@dataclass(frozen=True)
class Judged:
    """What became of a mutant.

    Attributes:
        found: "quick", "test", "survived", "equivalent", or "error" where it could not be run.
        right: whether that is what the list says. by: see `Ran`. seconds: of all its runs.
    """

    mutant: Mutant
    found: str
    right: bool
    by: str
    seconds: float


class FirstFailure:
    """A pytest plugin that notes the first failing test."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Of a test."""
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        """Of a file."""
        if report.failed and not self.name:
            self.name = f"{report.nodeid} (at its import)"


def preload() -> None:
    """Import what children would import each for themselves; nothing of this repository."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "SPECDEC_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    sys.path.insert(0, str(ROOT))
    for name in _PRELOADED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def _in_child(task: Task, folder: Path) -> None:
    """Run the tests of a task and write how they ended; does not return."""
    os.setsid()
    out = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(ROOT)
    edited, failure, code = None, FirstFailure(), 3
    try:
        import pytest
        from hypothesis import Phase, settings

        # The same examples in every run, and none remembered: what is found does not depend on runs before. That one
        # fails is enough: searching for a smaller one takes minutes.
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", database=None, derandomize=True, phases=phases)
        settings.load_profile("mutants")
        if task.mutant is not None:
            edited = edit(task.mutant, folder / "edited")
        options = ["-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-m", MARKERS[task.place]]
        code = int(pytest.main([*options, *task.tests], plugins=[failure]))
    finally:
        used = edited is None or edited.used
        (folder / "result").write_text(json.dumps({"code": code, "by": failure.name, "used": used}))
        sys.stdout.flush()
        _exit(0)


_VERDICTS = {0: "passed", 1: "failed", 2: "not importable", 5: "no tests"}


class Running:
    """A child at work."""

    def __init__(self, task: Task, limit_s: float) -> None:
        self.task = task
        self._limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="mutant-")
        self._began = time.perf_counter()
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            _in_child(task, Path(self._folder.name))

    def ended(self) -> Ran | None:
        """How it ended; None while it runs."""
        seconds = time.perf_counter() - self._began
        pid, _ = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            if seconds < self._limit_s:
                return None
            self.stop()
            return Ran("hung", f"no end after {self._limit_s:.0f} s", seconds)
        self._end_group()
        ran = self._ran(seconds)
        self._folder.cleanup()
        return ran

    def stop(self) -> None:
        """End it and what it started."""
        self._end_group()
        os.waitpid(self._pid, 0)
        self._folder.cleanup()

    def _end_group(self) -> None:
        """Processes that its tests started and left."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)

    def _ran(self, seconds: float) -> Ran:
        folder = Path(self._folder.name)
        printed = (folder / "output").read_text(errors="replace") if (folder / "output").exists() else ""
        if not (folder / "result").exists():
            return Ran("crashed", printed[-200:].strip(), seconds)
        result = json.loads((folder / "result").read_text())
        verdict = _VERDICTS.get(result["code"], "crashed")
        if verdict == "passed" and not result["used"]:
            verdict = "not imported"
        return Ran(verdict, result["by"] or printed[-400:].strip(), seconds)


Next = Callable[[Ran], "Task | None"]
"""What is to be run after a run, if anything."""


def run_all(tasks: Iterable[tuple[Task, Next]], limit_s: Callable[[Task], float], jobs: int) -> None:
    """Run tasks, `jobs` at a time, each followed at once by what it asks for."""
    waiting, running = list(tasks)[::-1], list[tuple[Running, Next]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task, after = waiting.pop()
                running.append((Running(task, limit_s(task)), after))
            for each in list(running):
                ran = each[0].ended()
                if ran is not None:
                    running.remove(each)
                    following = each[1](ran)
                    if following is not None:
                        waiting.append((following, each[1]))
            time.sleep(_PAUSE_S)
    finally:
        for child, _ in running:
            child.stop()


def baselines(mutants: Sequence[Mutant], jobs: int) -> dict[tuple[tuple[str, ...], str], Ran]:
    """How each set of tests ends without an edit, by tests and place."""
    wanted = sorted({(m.tests, place) for m in mutants for place in PLACES if place == "quick" or m.killed != "quick"})
    found: dict[tuple[tuple[str, ...], str], Ran] = {}

    def noting(key: tuple[tuple[str, ...], str]) -> Next:
        def note(ran: Ran) -> None:
            found[key] = ran
            print(f"  unedited {ran.verdict} in {ran.seconds:.1f} s: {' '.join(key[0])} ({key[1]})", flush=True)

        return note

    run_all(((Task(None, *key), noting(key)) for key in wanted), lambda task: _LIMIT_S, jobs)
    return found


class Judging:
    """Runs one mutant: by the quick tests, and where these pass by all that are not long."""

    def __init__(self, mutant: Mutant, done: Callable[[Judged], None]) -> None:
        self.first = Task(mutant, mutant.tests, "quick")
        self._mutant = mutant
        self._done = done
        self._place = "quick"
        self._seconds = 0.0

    def after(self, ran: Ran) -> Task | None:
        """Takes a run's end; returns the next one."""
        self._seconds += ran.seconds
        if ran.killed:
            return self._judge(self._place, ran.by)
        if self._place == "quick" and ran.verdict in ("passed", "no tests", "not imported"):
            self._place = "test"
            return replace(self.first, place="test")
        return self._judge("survived" if ran.verdict == "passed" else "error", ran.verdict)

    def _judge(self, found: str, by: str) -> None:
        equivalent = self._mutant.equivalent is not None
        if equivalent and found == "survived":
            found, by = "equivalent", self._mutant.equivalent or ""
        right = found == "equivalent" if equivalent else found == self._mutant.killed
        self._done(Judged(self._mutant, found, right, by, self._seconds))


def judge_all(mutants: Sequence[Mutant], jobs: int) -> list[Judged]:
    """Run every mutant. Raises WrongEntryError when tests fail without an edit."""
    unedited = baselines(mutants, jobs)
    broken = [f"{' '.join(key[0])}: {ran.by}" for key, ran in unedited.items() if ran.killed]
    if broken:
        raise WrongEntryError("these tests fail without any edit:\n" + "\n".join(broken))
    judged: list[Judged] = []

    def done(each: Judged) -> None:
        judged.append(each)
        mark = "    " if each.right else "!!! "
        print(f"{mark}{len(judged)}/{len(mutants)} {each.mutant.id}: {each.found} ({_short(each.by)})", flush=True)

    def limit_s(task: Task) -> float:
        ran = unedited.get((task.tests, task.place))
        return _LIMIT_S if ran is None else max(_LEAST_LIMIT_S, _LIMIT_FACTOR * ran.seconds)

    judgings = [Judging(mutant, done) for mutant in mutants]
    run_all(((judging.first, judging.after) for judging in judgings), limit_s, jobs)
    return judged


def _short(text: str) -> str:
    return text.splitlines()[-1][-110:] if text.strip() else ""


def table(judged: Sequence[Judged]) -> Iterator[str]:
    """The report's lines: counts by room, then what is not as the list says."""
    columns = (*PLACES, "survived", "error", "equivalent")
    rooms = sorted({_room(each.mutant) for each in judged})
    yield f"{'room':<28}{'edits':>7}" + "".join(f"{name:>12}" for name in columns)
    for room in [*rooms, "all"]:
        own = [each for each in judged if room in (_room(each.mutant), "all")]
        counts = Counter(each.found for each in own)
        yield f"{room:<28}{len(own):>7}" + "".join(f"{counts[name]:>12}" for name in columns)
    counts = Counter(each.found for each in judged)
    real = len(judged) - counts["equivalent"]
    if real:
        quick = counts["quick"]
        yield f"of {real} that are not equivalent: {quick / real:.1%} killed by tests that are not slow, "
        yield f"{(quick + counts['test']) / real:.1%} by those that CI runs"
    for each in sorted(judged, key=lambda each: each.mutant.id):
        if not each.right:
            said = "equivalent" if each.mutant.equivalent else each.mutant.killed or "nothing yet"
            yield f"NOT AS LISTED {each.mutant.id}: {each.found}, listed as {said} ({_short(each.by)})"


def _room(mutant: Mutant) -> str:
    parts = mutant.file.split("/")
    return "evals" if parts[0] == "evals" else "/".join(parts[:2])


def _as_json(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    keys = ("found", "right", "by", "seconds")
    return [asdict(each.mutant) | {key: getattr(each, key) for key in keys} for each in judged]


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the list. Returns 0 when every entry does what it says, else 1."""
    signal.signal(signal.SIGTERM, _stop)  # so that children are ended, too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="children at a time")
    parser.add_argument("--only", nargs="*", default=["*"], help="patterns of ids or files")
    parser.add_argument("--list", type=Path, default=LIST, help="another list")
    parser.add_argument("--json", type=Path, help="where all results are written")
    given = parser.parse_args(arguments)
    try:
        every = read(given.list)
        mutants = [m for m in every if any(fnmatch.fnmatch(name, p) for name in (m.id, m.file) for p in given.only)]
        for mutant in mutants:
            mutant.check_syntax()
        preload()
        judged = judge_all(mutants, given.jobs)
    except WrongEntryError as error:
        print(error, file=sys.stderr)
        return 1
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(_as_json(judged), indent=1))
    print(*table(judged), sep="\n")
    return 0 if all(each.right for each in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
