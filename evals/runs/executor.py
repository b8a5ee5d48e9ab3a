"""Run the work of an evaluation and keep what comes back: in this process, or spread over Ray workers.

On Ray (extra [ray]) each worker holds the models, chunks are the work, and a dead worker is replaced. Answers are keyed
by question and seeded by question, so the result is that of one process.
Source: Ray documentation, "Fault tolerance: actors" (an actor that died stays dead: make another) and "ray.wait".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from evals.data.datasets import DataSet, Question
from evals.errors import WorkerError, require
from evals.runs.answers import Answer
from evals.runs.conversations import Asking, Configuration, ModelSpec, Result, Work, Worker
from evals.runs.store import RunStore


class Executor(Protocol):
    """Where chunks are answered."""

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the workers' models are; the same on all of them."""

    def run(self, works: Sequence[Work]) -> Iterator[list[Answer]]:
        """The answers of each piece of work as they come, in any order."""

    def on_one(self, function: Callable[[Worker], Result]) -> Result:
        """Call a function with one worker, in that worker's process."""

    def close(self) -> None:
        """Free what the executor holds."""


class LocalExecutor:
    """An `Executor` of one worker in this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def facts(self) -> dict[str, dict[str, Any]]:
        return self._worker.facts()

    def run(self, works: Sequence[Work]) -> Iterator[list[Answer]]:
        return (self._worker.run(work) for work in works)

    def on_one(self, function: Callable[[Worker], Result]) -> Result:
        return self._worker.apply(function)

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


ATTEMPTS = 3
_START_S = 600.0
_CHUNK_S = 3600.0


@contextmanager
def connect(address: str) -> Iterator[None]:
    """Connect to a cluster ("local": start one on this machine), and disconnect at the end.

    Raises:
        MissingExtraError: Ray is not installed. WorkerError: the cluster cannot be reached.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    require("ray", "ray")
    import ray

    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {"address": address}
    try:
        ray.init(log_to_driver=False, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise WorkerError(f"cannot reach the Ray cluster {address!r}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


@dataclass
class _Task:
    """A chunk that is being answered, and how often it was tried."""

    work: Work
    attempts: int = 0


class RayExecutor:
    """An `Executor` whose workers are Ray actors. Needs an initialised Ray (`connect`)."""

    def __init__(
        self,
        specs: Mapping[str, ModelSpec],
        *,
        workers: int = 2,
        device: str | None = None,
        load: Callable[[ModelSpec], Any] = ModelSpec.load,
        attempts: int = ATTEMPTS,
    ) -> None:
        """Start the workers and wait until their models are loaded.

        device: as of the specs; every worker of a CUDA device (also None, where the cluster has GPUs) gets one GPU, or
            as many of one node as its tensor-parallel models have ranks.

        Raises:
            WorkerError: the cluster has too few GPUs, a worker does not start, or the workers hold different models.
        """
        self._specs, self._load, self._attempts = dict(specs), load, attempts
        ranks = max((spec.options.tensor_parallel_size for spec in specs.values()), default=1)
        self._num_gpus = _gpus_per_worker(device, workers, ranks)
        self._actors = [self._start() for _ in range(workers)]
        found = self._wait_for([actor.facts.remote() for actor in self._actors])
        if any(facts != found[0] for facts in found):
            raise WorkerError("the workers loaded different models; every node needs the same files")
        self._facts: dict[str, dict[str, Any]] = found[0]

    def facts(self) -> dict[str, dict[str, Any]]:
        return self._facts

    def on_one(self, function: Callable[[Worker], Result]) -> Result:
        (found,) = self._wait_for([self._actors[0].apply.remote(function)])
        result: Result = found
        return result

    def run(self, works: Sequence[Work]) -> Iterator[list[Answer]]:
        """See Executor. A chunk whose worker died is tried `attempts` times in all; then its answers are errors."""
        import ray

        waiting = [_Task(work) for work in reversed(works)]
        idle, running = list(self._actors), dict[Any, tuple[_Task, Any]]()
        while waiting or running:
            while waiting and idle:
                task, actor = waiting.pop(), idle.pop()
                task.attempts += 1
                running[actor.run.remote(task.work)] = (task, actor)
            done, _ = ray.wait(list(running), timeout=_CHUNK_S)
            for reference in done or list(running):
                task, actor = running.pop(reference)
                answers = _result(reference) if done else None
                if answers is None:
                    actor = self._replace(actor)
                    answers = self._failed(task, waiting)
                idle.append(actor)
                if answers is not None:
                    yield answers

    def close(self) -> None:
        """End the workers."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _failed(self, task: _Task, waiting: list[_Task]) -> list[Answer] | None:
        """Queue a chunk again, or give it up and return its answers as errors."""
        if task.attempts < self._attempts:
            waiting.append(task)
            return None
        text = f"WorkerError: its worker died {task.attempts} times"
        return [
            Answer(question.id, arm.name, question.category, question.task, error=text)
            for question in task.work.chunk
            for arm in task.work.arms
        ]

    def _start(self) -> Any:
        import ray

        return ray.remote(num_cpus=1, num_gpus=self._num_gpus)(Worker).remote(self._specs, self._load)

    def _replace(self, dead: Any) -> Any:
        import ray

        ray.kill(dead)
        self._actors[self._actors.index(dead)] = new = self._start()
        return new

    def _wait_for(self, references: list[Any]) -> list[Any]:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return list(ray.get(references, timeout=_START_S))
        except RayTaskError as error:
            raise WorkerError(f"a worker failed: {error.cause}") from error
        except (RayActorError, GetTimeoutError) as error:
            raise WorkerError(f"a worker did not start: {error}") from error


def _result(reference: Any) -> list[Answer] | None:
    """The answers of a finished call; None when its worker died.

    Raises:
        WorkerError: the call raised, as it would elsewhere.
    """
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    try:
        answers: list[Answer] = ray.get(reference)
        return answers
    except RayTaskError as error:
        raise WorkerError(f"a worker failed: {error.cause}") from error
    except RayActorError:
        return None


def _gpus_per_worker(device: str | None, workers: int, ranks: int) -> int:
    """`ranks` where workers use CUDA, 0 otherwise.

    Raises:
        WorkerError: the cluster has too few GPUs, so workers would wait for ever.
    """
    import ray

    available = ray.cluster_resources().get("GPU", 0.0)
    if device == "cpu" or (device is None and not available):
        return 0
    if available < workers * ranks:
        each = "a GPU" if ranks == 1 else f"{ranks} GPUs"
        raise WorkerError(
            f"{workers} workers need {each} each, the cluster has {available:g}; give --workers or --device cpu"
        )
    return ranks
