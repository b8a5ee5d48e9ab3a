"""Ray workers give what one process gives, also when one of them is killed in the middle."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from evals.acceptance.acceptance import Plan, run, settings, sweep  # noqa: E402
from evals.errors import WorkerError  # noqa: E402
from evals.runs.conversations import ModelSpec, Worker  # noqa: E402
from evals.runs.executor import Executor, RayExecutor, connect  # noqa: E402
from evals.runs.store import RunStore  # noqa: E402
from specdec.options import LoadOptions  # noqa: E402
from tests.evals.documents import without_times  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


@pytest.fixture
def load(plant: SimpleNamespace, tmp_path: Path) -> Callable[..., Any]:
    """A loader of scripted models that workers can unpickle; the model kills its process at `deadly` questions."""
    module = sys.modules[plant.Model.__module__]
    ray.cloudpickle.register_pickle_by_value(module)

    def make(deadly: str | None = None, times: int = 1) -> Callable[[ModelSpec], Any]:
        marks, scripted = tmp_path / "deaths", plant.Model
        marks.mkdir(exist_ok=True)

        def loader(spec: ModelSpec) -> Any:
            model = scripted()
            plain = model.complete

            def complete(prompt: str, params: Any) -> Any:
                if deadly and deadly in prompt and len(list(marks.iterdir())) < times:
                    (marks / str(os.getpid())).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return plain(prompt, params)

            model.complete = complete
            return model

        return loader

    return make


def document_of(executor: Executor, plant: SimpleNamespace, folder: Path) -> dict[str, Any]:
    plan = Plan(plant.questions(24, turns=2), sweep((1, 3)), plant.asking(), batch_size=2, warmup=0, worst=2)
    store = RunStore(folder, settings(plan, executor.facts()))
    return run(executor, plan, store, lambda answers: None)


@pytest.mark.usefixtures("cluster")
def test_two_workers_one_killed_complete_and_identical(
    plant: SimpleNamespace, tmp_path: Path, load: Callable[..., Any]
) -> None:
    specs = {"main": ModelSpec("scripted", options=LoadOptions(device="cpu"))}
    alone = document_of(Worker(specs, load()), plant, tmp_path / "alone")
    executor = RayExecutor(specs, workers=2, load=load("question 7 "))
    spread = document_of(executor, plant, tmp_path / "spread")
    executor.close()
    assert len(list((tmp_path / "deaths").iterdir())) == 1
    assert spread["failures"] == [] and len(spread["questions"]) == 24
    assert without_times(spread) == without_times(alone)


@pytest.mark.usefixtures("cluster")
def test_a_chunk_that_kills_every_worker_is_given_up(
    plant: SimpleNamespace, tmp_path: Path, load: Callable[..., Any]
) -> None:
    executor = RayExecutor(
        {"main": ModelSpec("x", options=LoadOptions(device="cpu"))}, workers=2, load=load("question 7 ", times=99)
    )
    document = document_of(executor, plant, tmp_path / "run")
    executor.close()
    assert {failure["question_id"] for failure in document["failures"]} == {"6", "7"}  # its chunk
    assert document["failures"][0]["error"] == "WorkerError: its worker died 3 times"
    assert len(document["questions"]) == 22


@pytest.mark.usefixtures("cluster")
def test_what_cannot_work_is_said_at_once(plant: SimpleNamespace, load: Callable[..., Any]) -> None:
    with pytest.raises(WorkerError, match="2 workers need a GPU each, the cluster has 0"):
        RayExecutor({"main": ModelSpec("x", options=LoadOptions(device="cuda"))}, workers=2, load=load())

    def absent(spec: ModelSpec) -> Any:
        raise FileNotFoundError("no such model")

    with pytest.raises(WorkerError, match="no such model"):
        RayExecutor({"main": ModelSpec("x", options=LoadOptions(device="cpu"))}, workers=1, load=absent)


def test_an_unreachable_cluster_is_an_error_of_the_tree() -> None:
    with pytest.raises(WorkerError, match=r"cannot reach the Ray cluster '127\.0\.0\.1:1'"), connect("127.0.0.1:1"):
        pass
