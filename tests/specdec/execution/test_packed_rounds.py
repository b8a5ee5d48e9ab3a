"""Rounds from graphs whose attention is the packed kernel, in Triton's interpreter on a CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from fakes import count_calls, eagle3_head, random_prompts, tiny_llama, wrap

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernel compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from attention.backends.flashinfer.backend import FlashInferBackend, FlashInferPlan
from attention.backends.flashinfer.short_queries import PackedKernel
from attention.backends.reference import TorchBackend
from specdec.requests.sampling import SamplingParams
from tests.specdec.execution.test_graphs import graphs_on_cpu, recorded_on_cpu, with_graphs  # noqa: F401 (fixtures)

CPU = torch.device("cpu")
PROMPTS = random_prompts((5, 17))


class OnCpu(FlashInferBackend):
    """Rounds with prompts on the torch reference; what a graph would hold on the packed kernel."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self._reference = TorchBackend(CPU)

    def builder(self, *args: Any) -> Any:
        return self._reference.builder(*args)

    def run(self, plan: Any, *args: Any) -> torch.Tensor:
        return super().run(plan, *args) if isinstance(plan, FlashInferPlan) else self._reference.run(plan, *args)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the kernel runs on, in batches of any size and heads of 16."""
    monkeypatch.setattr("attention.backends.flashinfer.short_queries.HEAD_DIMS", (16,))
    monkeypatch.setattr("attention.backends.limits.HEAD_DIMS", (16,))
    monkeypatch.setattr("attention.backends.flashinfer.backend.LEAST_BYTES", 1)
    return count_calls(monkeypatch, PackedKernel, "run")


@pytest.mark.slow
@pytest.mark.thorough
def test_tokens_and_drafts_are_those_of_the_eager_path(
    graphs_on_cpu: list[Any],  # noqa: F811
    launches: list[Any],
) -> None:
    """Pages lie head by head, the less usual order; tests/test_triton_kernels.py has the kernel over both."""
    head, target = eagle3_head(tiny_llama()).half(), tiny_llama().half()
    options: dict[str, Any] = {"num_speculative_tokens": 2, "max_num_seqs": 4, "page_size": 16}
    params = SamplingParams(max_new_tokens=4, return_drafts=True)
    eager = wrap(target, head, **options).generate(PROMPTS, params)
    models = eagle3_head(tiny_llama()).half(), tiny_llama().half()
    graphed = with_graphs(*models, OnCpu(), **options, kv_cache_layout="HND").generate(PROMPTS, params)
    assert {4 * 3, 4} <= {len(query) for query, *_ in launches}  # verifications and draft steps of four rows
    assert [c.token_ids for c in graphed] == [c.token_ids for c in eager]
    assert [c.drafts for c in graphed] == [c.drafts for c in eager]
