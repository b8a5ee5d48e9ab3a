"""Workers for Ray: in this process without Ray, and on a cluster of this machine where Ray is installed."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from specdec.errors import ClosedModelError, InvalidInputError, SpecdecError
from specdec.extensions.batches.lines import Line
from specdec.extensions.batches.ray import IN_FLIGHT, AsyncPredictor, Predictor, shared_out, spread
from specdec.extensions.batches.records import Record
from specdec.extensions.batches.tasks import TaskDefaults
from specdec.options import LoadOptions
from specdec.requests.sampling import SamplingParams
from tests.public.soak_batches import save_model
from tests.specdec.extensions.batches.made import echoed

OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "kv_cache_tokens": 1024}
RUN = TaskDefaults(SamplingParams(max_new_tokens=4), seed=5, name="tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    save_model(tmp_path_factory.mktemp("model"))
    return str(tmp_path_factory.getbasetemp() / "model0")


def columns(count: int, first: int = 0) -> dict[str, list[Any]]:
    """Every second row is sampled; one is empty."""
    rows = range(first, first + count)
    return {
        "prompt": ["" if i == 3 else f"w{i % 9} w{i % 7}" for i in rows],
        "key": [f"k{i}" for i in rows],
        "params": [{"temperature": float(i % 2)} for i in rows],
    }


def told(found: dict[str, Any]) -> list[Any]:
    names = ("key", "text", "finish_reason", "error")
    return list(zip(*(map(str, found[name]) for name in names), strict=True))


def test_ray_sees_which_one_is_asynchronous() -> None:
    assert inspect.iscoroutinefunction(AsyncPredictor.__call__)
    assert not inspect.iscoroutinefunction(Predictor.__call__)


@pytest.mark.slow
def test_columns_in_and_out_and_the_same_in_any_batch(folder: str) -> None:
    predictor = Predictor(folder, "lookup", params={"max_new_tokens": 4}, seed=5, **OPTIONS)
    whole = told(predictor(columns(10)))
    parts = [row for first in (5, 0) for row in told(predictor(columns(5, first)))]
    assert sorted(whole) == sorted(parts)
    assert [row[0] for row in whole if row[3]] == ["k3"] and "the prompt is empty" in whole[3][3]
    predictor.close()
    with pytest.raises(ClosedModelError):
        predictor(columns(1))


@pytest.mark.slow
def test_asynchronous_batches_share_the_models(folder: str) -> None:
    predictor = AsyncPredictor(folder, "lookup", params={"max_new_tokens": 4}, seed=5, **OPTIONS)

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(predictor(columns(2, first)) for first in range(0, 10, 2)))

    rounds = predictor.model.engine_stats.rounds
    together = [row for found in asyncio.run(all_at_once()) for row in told(found)]
    shared = predictor.model.engine_stats.rounds - rounds
    alone = [row for first in range(0, 10, 2) for row in told(predictor.predict(columns(2, first)))]
    assert together == alone and shared < predictor.model.engine_stats.rounds - rounds - shared
    predictor.close()


@pytest.mark.slow
def test_the_options_of_a_predictor_are_checked(folder: str) -> None:
    with pytest.raises(InvalidInputError, match="unknown sampling option"):
        Predictor(folder, params={"frobnicate": 1})


def test_without_ray_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        InvalidInputError, match=r"Ray is not installed; install it with: pip install 'specdec-hf\[ray\]'"
    ):
        next(spread([], count=1, model="m", draft=None, asking=RUN, options=LoadOptions()))


class Died(Exception):
    """In place of Ray's RayActorError."""


class Failed(Exception):
    """In place of Ray's RayTaskError."""

    cause = ValueError("planted")


class StandIn:
    """Ray, and one worker, that runs a call where its result is asked for."""

    exceptions = SimpleNamespace(RayActorError=Died, RayTaskError=Failed)

    def __init__(self, answer: Callable[[list[Line]], list[Record]]) -> None:
        self.records = SimpleNamespace(remote=lambda chunk: lambda: answer(chunk))

    def wait(self, references: list[Any]) -> tuple[list[Any], list[Any]]:
        return references[:1], references[1:]

    def get(self, reference: Any) -> list[Record]:
        found: list[Record] = reference()
        return found


def answers_of(answer: Callable[[list[Line]], list[Record]], count: int = 40) -> list[Record]:
    one = StandIn(answer)
    return list(shared_out(one, [one], lines(count), 4, RUN))


def test_rows_with_which_workers_died_are_errors_and_the_rest_goes_on() -> None:
    def answer(chunk: list[Line]) -> list[Record]:
        if chunk[0].number == 5:
            raise Died
        return list(echoed(chunk))

    found = answers_of(answer)
    assert sorted(record.number for record in found) == list(range(1, 41))
    assert {record.number for record in found if record.failed} == {4, 5, 6, 7, 8}  # 4 is no JSON
    lost = next(json.loads(record.data) for record in found if record.number == 5)
    assert lost == {"id": 4, "line": 5, "error": "SpecdecError: 3 workers died with the chunk of this row"}


def test_workers_that_only_die_end_the_run() -> None:
    with pytest.raises(SpecdecError, match="workers die, or cannot be started again, without an answer"):
        answers_of(raising(Died()))


def test_a_worker_that_fails_ends_the_run() -> None:
    with pytest.raises(SpecdecError, match="a worker failed: planted"):
        answers_of(raising(Failed()))


def raising(error: Exception) -> Callable[[list[Line]], list[Record]]:
    def answer(chunk: list[Line]) -> list[Record]:
        raise error

    return answer


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster of four cores, whatever this machine has."""
    found = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    found.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield found
    found.shutdown()


def lines(count: int) -> Iterator[Line]:
    for i in range(count):
        row = {"id": i, "prompt": f"w{i % 9} w{i % 7}", "temperature": float(i % 2)}
        yield Line(i + 1, b"bad" if i == 3 else json.dumps(row).encode())


def spread_over(folder: str, count: int, rows: Iterator[Line], **options: Any) -> Iterator[Any]:
    load = LoadOptions(**OPTIONS | options)
    return spread(rows, count=count, model=folder, draft="lookup", asking=RUN, options=load)


@pytest.mark.long
@pytest.mark.slow
def test_lines_are_spread_and_a_worker_that_is_killed_loses_none(ray: Any, folder: str) -> None:
    worker = Predictor(folder, "lookup", params=RUN.params, seed=5, **OPTIONS)
    right = sorted(record.data for record in worker.records(list(lines(120))))
    found, ahead, read = [], [], [0]

    def counted() -> Iterator[Line]:
        for line in lines(120):
            read[0] += 1
            yield line

    for record in spread_over(folder, 2, counted()):
        found.append(record.data)
        ahead.append(read[0] - len(found))
        if len(found) == 40:
            kill_a_worker()
    assert sorted(found) == right and max(ahead) <= 2 * IN_FLIGHT * 4


def kill_a_worker() -> None:
    """One that this process has started."""
    mine = psutil.Process().children(recursive=True)
    next(each for each in mine if "ray::Worker" in " ".join(each.cmdline())).kill()


@pytest.mark.long
@pytest.mark.slow
def test_what_the_cluster_cannot_do_is_named(ray: Any, folder: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="9 workers need 9 CPUs; the cluster has 4"):
        next(spread_over(folder, 9, lines(3)))
    with pytest.raises(SpecdecError, match="a worker cannot be started: "):
        next(spread_over(str(tmp_path / "none"), 1, lines(3)))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", [Predictor, AsyncPredictor])
def test_ray_data(ray: Any, folder: str, kind: type) -> None:
    data = pytest.importorskip("ray.data")
    given = {"model": folder, "draft": "lookup", "params": {"max_new_tokens": 4}, "seed": 5, **OPTIONS}
    batch = columns(40)
    rows = [{name: column[i] for name, column in batch.items()} for i in range(40)]
    stage = {"fn_constructor_kwargs": given, "batch_size": 8, "num_cpus": 1}
    found = data.from_items(rows).map_batches(kind, compute=data.ActorPoolStrategy(size=2), **stage).take_all()
    right = told(Predictor(**given)(batch))
    assert sorted(told({name: [row[name] for row in found] for name in found[0]})) == sorted(right)
