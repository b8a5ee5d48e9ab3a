"""Two GPUs: rounds among two ranks, from graphs and not, sums by both kinds of collectives, a lost rank.

Needs transformers 5.23 or later and accelerate. `python -m pytest -q tests/gpu/test_parallel.py`
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specdec import SamplingParams, SpeculativeModel
from specdec.extensions.parallel.engine import differing_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(
        tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23), reason="needs transformers 5.23"
    ),
]

TEXTS = [
    "Anna has 12 apples and buys 8 more. How many apples does she have?",
    "Tom reads 7 pages a day. How many pages does he read in 5 days?",
    "A box holds 6 eggs.",
    "There are 30 birds on a tree and 11 fly away. How many are left?",
]
GREEDY = SamplingParams(max_new_tokens=64)
SAMPLED = SamplingParams(max_new_tokens=64, temperature=0.8, top_p=0.95, seed=5)
PAIRS = [("gsm-llama", "auto"), ("gsm-deepseek", "mtp")]
FLOAT32: dict[str, Any] = {"backend": "torch", "cuda_graphs": False}
"""No backend with graphs computes in float32; bfloat16 below runs from graphs."""


@pytest.fixture(autouse=True, scope="module")
def packages(every_self_test: None) -> Iterator[None]:
    pytest.importorskip("accelerate")
    yield


def load(name: str, draft: str | None, size: int, dtype: str, **options: Any) -> SpeculativeModel:
    sizes = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_tokens": 4096}  # little memory: others may run beside
    return SpeculativeModel.from_pretrained(name, draft, tensor_parallel_size=size, dtype=dtype, **sizes, **options)


def said(model: SpeculativeModel, params: SamplingParams) -> list[list[int]]:
    return [answer.token_ids for answer in model.generate(TEXTS, params)]


@pytest.mark.parametrize(("name", "draft"), PAIRS)
def test_float32_says_the_same_with_one_rank_and_two_with_drafts_and_without(name: str, draft: str) -> None:
    with load(name, draft, 1, "float32", num_speculative_tokens=5, **FLOAT32) as one:
        right = said(one, GREEDY), said(one, SAMPLED)
    with load(name, draft, 2, "float32", num_speculative_tokens=5, **FLOAT32) as two:
        found = said(two, GREEDY), said(two, SAMPLED)
        print(two.describe()["tensor_parallel"], differing_ids(two.engine))  # type: ignore[arg-type]
    with load(name, None, 2, "float32", **FLOAT32) as plain:
        alone = said(plain, GREEDY)
    assert found[0] == right[0] == alone
    assert sum(a == b for a, b in zip(found[1], right[1], strict=True)) >= 3


@pytest.mark.parametrize(("name", "draft"), PAIRS)
def test_bfloat16_with_and_without_drafts(name: str, draft: str) -> None:
    """Up to near ties, which the evaluation of greedy losslessness judges; here most answers must be equal."""
    with load(name, draft, 2, "bfloat16", num_speculative_tokens=5) as two:
        assert two.graphs == "on", two.graphs
        drafted, stats = said(two, GREEDY), two.engine_stats
        alone = said(two, replace(GREEDY, num_speculative_tokens=0))
        print(two.describe()["tensor_parallel"], differing_ids(two.engine), stats)  # type: ignore[arg-type]
    assert sum(a == b for a, b in zip(drafted, alone, strict=True)) >= 3


def test_nccl_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_COLLECTIVES", "nccl")
    with load("gsm-llama", "auto", 1, "float32", num_speculative_tokens=5, **FLOAT32) as one:
        right = said(one, GREEDY)
    with load("gsm-llama", "auto", 2, "float32", num_speculative_tokens=5, **FLOAT32) as two:
        assert two.describe()["tensor_parallel"]["collectives"] == "NCCL"
        assert said(two, GREEDY) == right
    with load("gsm-llama", "auto", 2, "bfloat16", num_speculative_tokens=5) as graphed:
        assert graphed.graphs == "on", graphed.graphs
        graphed.generate(TEXTS, GREEDY)


def test_symmetric_memory_is_used_where_peers_reach_each_other_by_every_model_of_a_process() -> None:
    """Rank 0 stays and has exchanged memory before; the other rank of the second model is new."""
    names, answers = [], []
    for _ in range(2):
        with load("gsm-llama", None, 2, "bfloat16", cuda_graphs=False) as two:
            names.append(two.describe()["tensor_parallel"]["collectives"])
            answers.append(said(two, GREEDY))
    print(names)
    assert answers[0] == answers[1]
    if torch.cuda.can_device_access_peer(0, 1):
        assert names == ["symmetric memory, NCCL"] * 2


KILLED = """
import os, signal, sys, threading, time
import torch
from specdec import RanksLostError, SamplingParams, SpeculativeModel

model = SpeculativeModel.from_pretrained("gsm-llama", "auto", tensor_parallel_size=2, dtype="bfloat16",
    num_speculative_tokens=5, max_model_len=256, max_num_seqs=8, kv_cache_tokens=4096)
print(model.describe()["tensor_parallel"]["collectives"], flush=True)
pid = model.ranks.channel.workers.processes[0].process.pid
stream = model.stream(["A box holds 6 eggs."] * 4, SamplingParams(max_new_tokens=180, ignore_eos=True))
next(stream)
if sys.argv[1] == "waiting":
    os.kill(pid, signal.SIGSTOP)  # rank 0 waits for it on the device when it is killed
killed = []

def kill():
    killed.append(time.monotonic())
    os.kill(pid, signal.SIGKILL)

threading.Timer(1.0 if sys.argv[1] == "waiting" else 0.02, kill).start()
try:
    for update in stream:
        pass
except RanksLostError as error:
    print(f"error after {time.monotonic() - killed[0]:.2f} s: {error}", flush=True)
model.close()
torch.cuda.synchronize()
print(f"closed after {time.monotonic() - killed[0]:.2f} s", flush=True)
"""


@pytest.mark.parametrize("when", ["waiting", "running"])
@pytest.mark.parametrize("collectives", ["nccl", "auto"])
def test_a_killed_rank_is_named_soon_and_the_gpu_is_free_again(collectives: str, when: str) -> None:
    """In a process of its own: a GPU that waits for a lost rank for ever would keep this one from ending."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, when],
        env={**os.environ, "SPECDEC_COLLECTIVES": collectives, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "killed by SIGKILL" in done.stdout
    seconds = [float(found) for found in re.findall(r"after ([0-9.]+) s", done.stdout)]
    assert len(seconds) == 2 and max(seconds) < 5
