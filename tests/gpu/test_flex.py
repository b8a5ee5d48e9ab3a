"""FlexAttention compiled: how often, without synchronisation, and whole rounds over it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import backend_of_ours, eagle3_head, hf_greedy, keep_gpu_busy, random_prompts, tiny_llama, wrap
from torch._dynamo.utils import counters

from attention.backends.flex import FlexBackend
from attention.backends.reference import TorchBackend
from attention.cache.kv_cache import KVLayout
from attention.spec import AttentionSpec
from specdec.requests.sampling import SamplingParams
from tests.attention.batches import full_size
from tests.attention.oracle import Rig, Variant

CUDA = torch.device("cuda")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_all_batches_of_a_tile_size_share_one_compilation(layout: KVLayout) -> None:
    key = AttentionSpec(16, 4, 128, 128, scale=0.1 if layout == "NHD" else 0.11)  # no other test's kernel
    for new, names in (
        (1, ("decode, small", "decode, medium", "single long")),
        (1, ("verify, q = 5", "verify, q = 8")),
    ):
        before = counters["stats"]["unique_graphs"]
        for name in names:
            rig = Rig(Variant(key, layout=layout), full_size()[name], torch.bfloat16, CUDA)
            assert rig.errors(rig.attended(rig.runner(FlexBackend(CUDA))))[0] <= 3e-3
        assert counters["stats"]["unique_graphs"] - before == new


def test_planning_never_synchronises() -> None:
    rig = Rig(Variant(AttentionSpec(16, 4, 128, 128, scale=0.1)), full_size()["mixed"], torch.bfloat16, CUDA)
    runner, metadata, states = rig.runner(FlexBackend(CUDA)), rig.metadata(), rig.new_states()
    runner.attend(runner.plan(metadata), 0, *states)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        keep_gpu_busy(1_000_000)
        runner.attend(runner.plan(metadata), 0, *states)
        with pytest.raises(RuntimeError, match="synchroniz"):
            metadata.seq_lens.cpu()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("drafts", [0, 3])
def test_rounds_give_the_models_own_tokens(drafts: int) -> None:
    """float32, where every backend decides alike."""
    prompts, answers = random_prompts((5, 33, 1)), []
    for backend in (FlexBackend(CUDA), TorchBackend(CUDA)):
        with backend_of_ours(backend):
            target: Any = tiny_llama()
            head: Any = eagle3_head(target).to(CUDA) if drafts else None
            wrapped = wrap(target.to(CUDA), head, num_speculative_tokens=drafts, page_size=16)
            answers.append([c.token_ids for c in wrapped.generate(prompts, SamplingParams(max_new_tokens=16))])
            wrapped.close()
    assert answers[0] == answers[1] == [hf_greedy(p, 16) for p in prompts]
