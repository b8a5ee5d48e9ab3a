"""Heads of widths that FlashInfer has no kernel for: by our own kernel, from CUDA graphs too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attention.batch.host import HostBatch
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import FP8, KVFormat
from attention.spec import AttentionSpec
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.attention.batches import Batch
from tests.attention.oracle import Rig, Variant
from tests.gpu.test_bad_input import LetterTokenizer, llama

CUDA = torch.device("cuda")
OTHER = [16, 80, 96, 112, 160, 192, 512]


def lengths(rows: int, query_len: int, longest: int) -> Batch:
    computed = np.random.default_rng(longest).integers(0, longest, rows)
    return Batch((query_len,) * rows, tuple(computed.tolist()))


@pytest.mark.parametrize("dim", OTHER)
@pytest.mark.parametrize(("rows", "query_len", "cache"), [(1, 1, None), (8, 6, None), (40, 6, None), (8, 6, FP8)])
def test_one_captured_launch_serves_all_lengths(dim: int, rows: int, query_len: int, cache: torch.dtype | None) -> None:
    """Captured on one batch, replayed on others whose arrays lie in the same places, each against the oracle."""
    from attention.backends.flashinfer.backend import FlashInferBackend

    variant = Variant(AttentionSpec(8, 2, dim, dim, scale=dim**-0.5), format=KVFormat(cache))
    rigs = [Rig(variant, lengths(rows, query_len, n), torch.bfloat16, CUDA, seed=n) for n in (900, 30, 400, 3)]
    arena, bucket = single_batch_arena(rows, rows * query_len, 64, CUDA)
    largest = max(rigs, key=lambda rig: rig.batch.num_pages(16))
    runner = largest.runner(FlashInferBackend(CUDA))
    planner = runner.fixed_planner(rows, query_len)
    static = [x.clone() for x in rigs[0].new_states()]

    def send(host: HostBatch) -> None:
        planner.replan(stage(host, arena, bucket).host)

    plan = planner.plan(stage(rigs[0].host, arena, bucket))
    runner.attend(plan, 0, *static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = runner.attend(plan, 0, *static)
    for rig in rigs:
        rig.store(runner.layers[0], rig.batch.computed)
        for place, states in zip(static, rig.new_states(), strict=True):
            place.copy_(states)
        send(rig.host)
        graph.replay()
        whole, worst = rig.errors(out)
        assert whole <= (4e-3 if cache else 3e-3) and worst <= 8e-3


@pytest.mark.parametrize("dim", [80, 96, 112, 160, 192])
def test_a_model_runs_from_graphs_and_says_by_what(dim: int) -> None:
    """Its load tests the logits against the model's own."""
    options = {"tokenizer": LetterTokenizer(), "max_model_len": 256, "max_num_seqs": 2, "cuda_graphs": True}
    model = SpeculativeModel.from_pretrained(llama(head_dim=dim), **options)  # type: ignore[arg-type]
    facts = model.describe()
    assert facts["attention"]["target"].startswith(f"Triton kernel, bfloat16, head dim {dim} (FlashInfer has head dims")
    assert facts["graphs"]["state"].startswith("on"), facts["graphs"]
    assert len(model.generate("hello", SamplingParams(max_new_tokens=32))[0].token_ids) == 32
    model.close()
