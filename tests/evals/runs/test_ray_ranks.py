"""Ray actors whose models are divided: each has as many GPUs of one node as its models have ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from evals.errors import WorkerError  # noqa: E402
from evals.runs.conversations import ModelSpec  # noqa: E402
from evals.runs.executor import RayExecutor  # noqa: E402
from specdec.options import LoadOptions  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def cluster() -> Iterator[None]:
    """Ray counts four GPUs; nobody looks for them."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_each_actor_has_a_gpu_for_each_rank(plant: SimpleNamespace) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[plant.Model.__module__])
    model = plant.Model
    divided = {"main": ModelSpec("x", options=LoadOptions(tensor_parallel_size=2))}

    def load(spec: ModelSpec) -> Any:
        return model()

    with pytest.raises(WorkerError, match="3 workers need 2 GPUs each, the cluster has 4"):
        RayExecutor(divided, workers=3, load=load)
    executor = RayExecutor(divided, workers=2, load=load)
    seen = executor.on_one(lambda worker: os.environ["CUDA_VISIBLE_DEVICES"])
    assert len(set(seen.split(",")) & {"0", "1", "2", "3"}) == 2, seen
    executor.close()
