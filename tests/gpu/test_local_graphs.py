"""Attention in chunks and temperature tuning (Llama 4) from CUDA graphs on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from attention.backends.base import AttentionBackend
from attention.backends.invariant import InvariantBackend
from attention.spec import AttentionSpec
from specdec.execution.graphs import GraphExecutor
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.agreement import agreement, drafted
from tests.gpu.test_graph_rounds import PROMPTS, VOCAB, Tokenizer, decided
from tests.local_rounds import Launch, fixed_rounds

CUDA = torch.device("cuda")
SPEC = AttentionSpec(40, 8, 128, 128, scale=128**-0.5, chunk_size=64)
"""Heads of Llama 4 Scout."""


def recorded(launch: Launch) -> Launch:
    """A launch as a CUDA graph."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def backend_of(name: str) -> AttentionBackend:
    if name == "batch_invariant":
        return InvariantBackend()
    from attention.backends.flashinfer.backend import FlashInferBackend

    return FlashInferBackend(CUDA)


@pytest.mark.parametrize("name", ["flashinfer", "batch_invariant"])
@pytest.mark.parametrize("rows", [1, 8, 130])
@pytest.mark.parametrize(("query_len", "chunk"), [(6, 64), (6, 512), (1, 64), (2, 64), (20, 16)])
def test_a_captured_launch_follows_the_rounds(name: str, rows: int, query_len: int, chunk: int) -> None:
    """Verifications in one chunk and over its end, on both sides of it, few rows (split-KV) and many."""
    spec = replace(SPEC, chunk_size=chunk)
    starts = (0, 40, 61, 63, 64, 250, chunk - query_len, chunk - 1, 600)
    firsts = [[max(0, min(start + 7 * (row % 5), 39 * 16 - query_len)) for row in range(rows)] for start in starts]
    rounds = fixed_rounds(backend_of(name), spec, torch.bfloat16, CUDA, firsts, query_len, recorded)
    for first, (own, expected) in zip(firsts, rounds, strict=True):
        error = (own.double() - expected.double()).norm() / expected.double().norm()
        assert float(error) <= 3e-3, first


def llama4(drafts: int, graphs: bool | str, chunk: int = 64, dense: bool = False, **options: Any) -> SpeculativeModel:
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=256,
        intermediate_size_mlp=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        attention_chunk_size=chunk,
        no_rope_layers=[1, 1, 1, 0, 1, 1, 1, 0],
        attn_temperature_tuning=True,
        attn_scale=1.0,
        floor_scale=32,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        moe_layers=[] if dense else None,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    target: Any = Llama4ForCausalLM(config).eval().requires_grad_(False)
    head = decided(target)
    return SpeculativeModel.from_pretrained(
        target.to(CUDA, torch.float16),
        head.to(CUDA, torch.float16) if drafts else None,
        num_speculative_tokens=drafts or None,
        tokenizer=Tokenizer(),
        max_num_seqs=4,
        max_model_len=512,
        cuda_graphs=graphs,
        **{"backend": "flashinfer", **options},
    )


@pytest.mark.parametrize(("drafts", "chunk"), [(0, 64), (1, 64), (5, 64), (5, 16), (5, 256)])
def test_graphs_give_the_eager_tokens_and_drafts(drafts: int, chunk: int) -> None:
    params = SamplingParams(max_new_tokens=96, return_drafts=True)
    eager = llama4(drafts, False, chunk).generate(PROMPTS, params)
    loaded = llama4(drafts, True, chunk)
    assert isinstance(loaded.engine.executor, GraphExecutor)
    graphed = loaded.generate(PROMPTS, params)
    assert agreement([c.token_ids for c in graphed], [c.token_ids for c in eager]) >= 0.97
    if drafts:
        assert agreement(drafted(graphed), drafted(eager)) >= 0.97


def test_drafts_change_no_token_of_a_batch_invariant_target() -> None:
    """Without experts, whose matmuls are not."""
    params = SamplingParams(max_new_tokens=96)
    alone, with_drafts = (
        llama4(drafts, True, dense=True, backend="batch_invariant").generate(PROMPTS, params) for drafts in (0, 5)
    )
    assert [c.token_ids for c in with_drafts] == [c.token_ids for c in alone]
