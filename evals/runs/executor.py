"""Run the work of an evaluation and keep what comes back: in this process, or spread over Ray workers.

On Ray (extra [ray]) each worker holds the models and chunks are the work. Answers are keyed by question and seeded by
question, so the result is that of one process.
Source: Ray documentation, "Fault tolerance: actors" (max_restarts, max_task_retries) and "ray.wait".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from evals.data.datasets import DataSet, Question
from evals.errors import WorkerError, require
from evals.runs.answers import Answer, Json
from evals.runs.conversations import Asking, Configuration, ModelSpec, Result, Work, Worker
from evals.runs.store import RunStore

Report = Callable[[list[Answer]], None]


@dataclass(frozen=True)
class Plan:
    """A run: the questions (`data`), the configurations (`arms`), how questions are sent.

    Attributes:
        batch_size: questions generated together. warmup: passes over the first chunk whose answers are dropped.
        predict_batch_sizes: batch sizes to measure round times at, for the prediction, besides the run's own.
        worst: how many questions of lowest τ are shown with their drafts.
        repeats: runs over all questions, whose times are taken together. Not among the settings: more can be added.
    """

    data: DataSet
    arms: tuple[Configuration, ...]
    asking: Asking
    batch_size: int = 1
    warmup: int = 1
    predict_batch_sizes: tuple[int, ...] = ()
    worst: int = 0
    repeats: int = 1

    @property
    def works(self) -> list[Work]:
        """The questions in chunks."""
        starts = range(0, len(self.data.questions), self.batch_size)
        chunks = (self.data.questions[start : start + self.batch_size] for start in starts)
        return [Work(i, chunk, self.arms, self.asking) for i, chunk in enumerate(chunks)]


def collect(executor: Executor, plan: Plan, store: RunStore, report: Report) -> list[Answer]:
    """Answer every question that the store does not hold yet; return all, by question and then by configuration.

    report: called with the answers of every finished chunk, those found in the store first.
    """
    names = [arm.name for arm in plan.arms]
    questions = plan.data.questions
    left = [work for work in plan.works if not all(store.finished(question.id, names) for question in work.chunk)]
    missing = {question.id for work in left for question in work.chunk}
    report(list(_kept([question for question in questions if question.id not in missing], store, names)))
    for answers in executor.run(left):
        store.add(answers)
        report(answers)
    return list(_kept(questions, store, names))


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

    options: Json = {"include_dashboard": False} if address == "local" else {"address": address}
    try:
        ray.init(log_to_driver=False, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise WorkerError(f"cannot reach the Ray cluster {address!r}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


class RayExecutor:
    """Workers that are Ray actors, which Ray starts anew when they die. Needs an initialised Ray (`connect`)."""

    def __init__(
        self,
        specs: Mapping[str, ModelSpec],
        *,
        workers: int,
        load: Callable[[ModelSpec], Any] = ModelSpec.load,
    ) -> None:
        """Start the workers and wait until their models are loaded.

        Every worker of models on a CUDA device (also by default, where the cluster has GPUs) gets one GPU, or as many
        of one node as its tensor-parallel models have ranks.

        Raises:
            WorkerError: the cluster has too few GPUs, a worker does not start, or the workers hold different models.
        """
        import ray

        loading = [spec.options for spec in specs.values()]
        ranks = max(options.tensor_parallel_size for options in loading)
        gpus = _gpus_per_worker(loading[0].device, workers, ranks)
        actor = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1, max_task_retries=ATTEMPTS - 1)(Worker)
        self._actors = [actor.remote(specs, load) for _ in range(workers)]
        found = self._wait_for([actor.facts.remote() for actor in self._actors])
        if any(facts != found[0] for facts in found):
            raise WorkerError("the workers loaded different models; every node needs the same files")
        self._facts: dict[str, Json] = found[0]

    def facts(self) -> dict[str, Json]:
        """What the workers' models are; the same on all of them."""
        return self._facts

    def on_one(self, function: Callable[[Worker], Result]) -> Result:
        """Call a function with one worker, in that worker's process."""
        (found,) = self._wait_for([self._actors[0].on_one.remote(function)])
        return found

    def run(self, works: Sequence[Work]) -> Iterator[list[Answer]]:
        """The answers of each piece of work as they come, in any order.

        A chunk whose worker died is tried ATTEMPTS times in all, by Ray; then its answers are errors.
        """
        import ray

        waiting = list(reversed(works))
        idle = list(self._actors)
        running = dict[Any, tuple[Work, Any]]()
        while waiting or running:
            while waiting and idle:
                work = waiting.pop()
                actor = idle.pop()
                running[actor.answer.remote(work)] = (work, actor)
            done, _ = ray.wait(list(running), timeout=_CHUNK_S)
            for reference in done:
                work, actor = running.pop(reference)
                idle.append(actor)
                yield _answers(reference, work)
            if not done:  # they hang; Ray starts them anew
                for _, actor in running.values():
                    ray.kill(actor, no_restart=False)

    def close(self) -> None:
        """End the workers."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _wait_for(self, references: list[Any]) -> list[Any]:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        try:
            with _named_failures():
                return ray.get(references, timeout=_START_S)
        except (RayActorError, GetTimeoutError) as error:
            raise WorkerError(f"a worker did not start: {error}") from error


@contextmanager
def _named_failures() -> Iterator[None]:
    """Raises WorkerError: a call inside raised where it ran."""
    from ray.exceptions import RayTaskError

    try:
        yield
    except RayTaskError as error:
        raise WorkerError(f"a worker failed: {error.cause}") from error


Executor = Worker | RayExecutor
"""Where chunks are answered: in this process, or on Ray."""


def _answers(reference: Any, work: Work) -> list[Answer]:
    """The answers of a finished call; errors when its worker died each time.

    Raises:
        WorkerError: the call raised, as it would elsewhere.
    """
    import ray
    from ray.exceptions import RayActorError

    try:
        with _named_failures():
            return ray.get(reference)
    except RayActorError:
        text = f"WorkerError: its worker died {ATTEMPTS} times"
        return [
            Answer(question.id, arm.name, question.category, question.task, error=text)
            for question in work.chunk
            for arm in work.arms
        ]


def _gpus_per_worker(device: Any, workers: int, ranks: int) -> int:
    """`ranks` where workers use CUDA, 0 otherwise.

    Raises:
        WorkerError: the cluster has too few GPUs, so workers would wait for ever.
    """
    import ray

    available = ray.cluster_resources().get("GPU", 0.0)
    if str(device) == "cpu" or (device is None and not available):
        return 0
    if available < workers * ranks:
        each = "a GPU" if ranks == 1 else f"{ranks} GPUs"
        raise WorkerError(
            f"{workers} workers need {each} each, the cluster has {available:g}; give --workers or --device cpu"
        )
    return ranks
