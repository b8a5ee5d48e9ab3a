"""Predictor: a stage of Ray Data; and the same workers for `specdec batch --ray`.

    rows.map_batches(Predictor, fn_constructor_kwargs={"model": …, "draft": …}, concurrency=8, num_gpus=1)

Source: Ray documentation, "ray.data.Dataset.map_batches", "Fault tolerance: actors" and "ray.wait".
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

from specdec.errors import InvalidInputError, SpecdecError
from specdec.extensions.batches.lines import Line
from specdec.extensions.batches.records import Record, TaskResult, answer_columns, answered, record_of, records
from specdec.extensions.batches.tasks import TaskDefaults, task_of, tasks_of
from specdec.model import SpeculativeModel
from specdec.options import LoadOptions
from specdec.requests.sampling import SamplingParams
from specdec.values import Fields, Json

IN_FLIGHT = 3
"""Chunks of lines that a worker has at once: while one ends, the others fill its batch."""
ATTEMPTS = 3
"""Workers that a chunk is given to, where they die of it or with it."""


class BatchActor:
    """A model in the process that makes this object. Its calls may overlap, on any threads: they share one batch."""

    def __init__(
        self,
        model: str,
        draft: str | None = None,
        *,
        params: SamplingParams | Fields | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Load it.

        Args:
            model, draft, options: as of `SpeculativeModel.from_pretrained`, by name: they travel to other machines.
            params: sampling of rows that have none of their own; default greedy. seed: of the run, see `TaskDefaults`.
        """
        given = params if isinstance(params, SamplingParams) else SamplingParams.from_dict(dict(params or {}))
        self.asking = TaskDefaults(given, seed, model)
        self.model = SpeculativeModel.from_pretrained(model, draft, seed=seed, **options)
        self.close = weakref.finalize(self, self.model.close)
        """Free the model. Also called when the actor ends."""

    def __ray_shutdown__(self) -> None:
        """Called by Ray where an actor ends in order."""
        self.close()

    def ready(self) -> bool:
        """Once the model is loaded."""
        return True

    def predict(self, batch: Fields) -> Json:
        """The columns of a batch and those of its answers: see `tasks_of`, `answer_columns`."""
        tasks = tasks_of(batch, self.asking)
        return answer_columns(batch, answered(self.model, tasks))

    def records(self, lines: list[Line]) -> list[Record]:
        """The records of some lines."""
        return list(records(self.model, lines, self.asking))


class Predictor(BatchActor):
    """For `ray.data.Dataset.map_batches`: columns in, columns out, one batch after the other."""

    def __call__(self, batch: Fields) -> Json:
        return self.predict(batch)


class AsyncPredictor(BatchActor):
    """As `Predictor`, but the batches that Ray gives to one actor overlap, so that the model's own is never drained."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pool = ThreadPoolExecutor(64)  # they sleep while one of them runs a round

    async def __call__(self, batch: Fields) -> Json:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.predict, batch)


def spread(
    lines: Iterable[Line], *, count: int, model: str, draft: str | None, asking: TaskDefaults, options: LoadOptions
) -> Iterator[Record]:
    """The records of some lines, answered by `count` workers of a Ray cluster: see `Records` of `run_batch`.

    A worker that dies is started again, and its chunks with it. A chunk with which ATTEMPTS workers died is errors.

    Raises:
        InvalidInputError: Ray is not installed, or the cluster has too few GPUs or cores for these workers.
        SpecdecError: the cluster cannot be reached, workers cannot be started, or one failed otherwise than by dying.
    """
    with _connected() as ray:
        # Workers would wait for ever for what the cluster does not have.
        there = ray.cluster_resources()
        on_gpus = there.get("GPU") and str(options.device or "cuda").startswith("cuda")
        gpus = options.tensor_parallel_size if on_gpus else 0
        for name, each in {"CPU": 1, "GPU": gpus}.items():
            if there.get(name, 0) < each * count:
                raise InvalidInputError(
                    f"{count} workers need {each * count} {name}s; the cluster has {there.get(name, 0):g}"
                )
        sizes = {"num_cpus": 1, "num_gpus": gpus}
        kind = ray.remote(max_concurrency=IN_FLIGHT, max_restarts=-1, max_task_retries=ATTEMPTS - 1, **sizes)(
            BatchActor
        )
        given = {**options.as_arguments(), "params": asking.params, "seed": asking.seed}
        actors = [kind.remote(model, draft, **given) for _ in range(count)]
        try:
            try:
                ray.get([actor.ready.remote() for actor in actors])  # waits until all models are loaded
            except ray.exceptions.RayActorError as error:
                reason = str(error).strip().splitlines()[-1]
                raise SpecdecError(f"a worker cannot be started: {reason}") from error
            yield from shared_out(ray, actors, iter(lines), options.max_num_seqs, asking)
        finally:
            for actor in actors:
                ray.kill(actor)


def shared_out(ray: Any, actors: list[Any], lines: Iterator[Line], size: int, asking: TaskDefaults) -> Iterator[Record]:
    """Chunks of `size` lines, IN_FLIGHT for each worker, and their records as a chunk ends.

    Raises:
        SpecdecError: a worker failed otherwise than by dying, or they die without an answer between.
    """
    idle = deque(actors * IN_FLIGHT)
    running = {}
    lost = 0
    while True:
        while idle and (chunk := list(islice(lines, size))):
            actor = idle.popleft()
            running[actor.records.remote(chunk)] = (actor, chunk)
        if not running:
            return
        (done,), _ = ray.wait(list(running))
        actor, chunk = running.pop(done)
        idle.append(actor)
        try:
            yield from ray.get(done)
            lost = 0
        except ray.exceptions.RayTaskError as error:
            raise SpecdecError(f"a worker failed: {error.cause}") from error
        except ray.exceptions.RayActorError as error:
            lost += 1
            if lost > IN_FLIGHT * len(actors):
                raise SpecdecError(f"workers die, or cannot be started again, without an answer: {error}") from error
            yield from (_lost(line, asking) for line in chunk)


def _lost(line: Line, asking: TaskDefaults) -> Record:
    error = f"SpecdecError: {ATTEMPTS} workers died with the chunk of this row"
    return record_of(TaskResult(task_of(line, asking), error=error), None)


@contextmanager
def _connected() -> Iterator[Any]:
    """Ray, connected to the cluster of RAY_ADDRESS or to one on this machine, unless it is already."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise InvalidInputError("Ray is not installed; install it with: pip install 'specdec-hf[ray]'") from error
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(log_to_driver=False, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SpecdecError(f"cannot reach the Ray cluster: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()
