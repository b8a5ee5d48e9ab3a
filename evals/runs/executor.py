"""Runs the work of an evaluation and keeps what comes back: in this process here, on Ray in `ray_executor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from evals.data.datasets import DataSet, Question
from evals.runs.answers import Answer
from evals.runs.conversations import Asking, Configuration, Work, Worker
from evals.runs.store import RunStore

Result = TypeVar("Result")


class Executor(Protocol):
    """Where chunks are answered."""

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the workers' models are; the same on all of them."""

    def run(self, works: Sequence[Work]) -> Iterator[list[Answer]]:
        """The answers of each piece of work as they come, in any order."""

    def on_one(self, function: Callable[[Worker], Result]) -> Result:
        """Call a function with one worker, where that worker is."""

    def close(self) -> None:
        """Give back what the executor holds."""


class LocalExecutor:
    """One worker in this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def facts(self) -> dict[str, dict[str, Any]]:
        """See Executor."""
        return self._worker.facts()

    def run(self, works: Sequence[Work]) -> Iterator[list[Answer]]:
        """See Executor."""
        return (self._worker.run(work) for work in works)

    def on_one(self, function: Callable[[Worker], Result]) -> Result:
        """See Executor."""
        return function(self._worker)

    def close(self) -> None:
        """Nothing to give back."""


Report = Callable[[list[Answer]], None]


def collect(
    executor: Executor,
    data: DataSet,
    arms: Sequence[Configuration],
    asking: Asking,
    store: RunStore,
    *,
    batch_size: int = 1,
    report: Report = lambda answers: None,
) -> list[Answer]:
    """Answer every question that the store does not hold yet; return all, by question and then by configuration.

    report: called with the answers of every finished chunk, those found in the store first.
    """
    names = [arm.name for arm in arms]
    works = _works(data, arms, asking, batch_size)
    left = [work for work in works if not _finished(work, store, names)]
    report([answer for work in works if _finished(work, store, names) for answer in _kept(work.chunk, store, names)])
    for answers in executor.run(left):
        store.add(answers)
        report(answers)
    return list(_kept(data.questions, store, names))


def warm_up(
    executor: Executor, data: DataSet, arms: Sequence[Configuration], asking: Asking, batch_size: int, times: int
) -> None:
    """Answer the first chunk `times` times without keeping anything."""
    work = _works(data, arms, asking, batch_size)[0]
    for _ in executor.run([work] * times):
        pass


def _works(data: DataSet, arms: Sequence[Configuration], asking: Asking, batch_size: int) -> list[Work]:
    starts = range(0, len(data.questions), batch_size)
    return [Work(i, data.questions[start : start + batch_size], tuple(arms), asking) for i, start in enumerate(starts)]


def _finished(work: Work, store: RunStore, names: Sequence[str]) -> bool:
    return all(store.finished(question.id, names) for question in work.chunk)


def _kept(questions: Iterable[Question], store: RunStore, names: Sequence[str]) -> Iterator[Answer]:
    return (store.answers[question.id, name] for question in questions for name in names)
