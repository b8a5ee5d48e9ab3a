"""Targets with recurrent layers on a GPU: tokens of transformers' `generate`, and rounds from graphs as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import free_everywhere, random_prompts, wrap
from transformers import AutoModelForCausalLM, GenerationConfig

from attention.recurrence.functions import recurrences_of
from specdec import SamplingParams
from specdec.execution.graphs import GraphExecutor
from tests.agreement import agreement, drafted
from tests.hybrids import RecallHead, tiny_config, tiny_hybrid

CUDA = torch.device("cuda")
PROMPTS = random_prompts([17, 3, 90, 9, 41])
KINDS = ("qwen3_next", "kimi_linear", "falcon_h1", "jamba", "lfm2", "mamba2")
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128, "kv_cache_tokens": 640}


def said_by(model: Any, new: int) -> list[list[int]]:
    """Prompts and what transformers' own greedy `generate` adds."""
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=model.device)
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(ids))
        texts.append(out[0].tolist())
    return texts


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_transformers_own_in_float32(name: str, drafts: int) -> None:
    """By whatever computes recurrences on this GPU; attention by the torch backend."""
    model = tiny_hybrid(name).to(CUDA)
    right = said_by(model, 24)
    head = RecallHead(right, 0.7).to(CUDA) if drafts else None
    wrapped = wrap(model, head, backend="torch", cuda_graphs=False, num_speculative_tokens=drafts or None, **SIZES)
    for _ in range(2):
        completions = wrapped.generate(PROMPTS, SamplingParams(24))
        assert [p + list(c.token_ids) for p, c in zip(PROMPTS, completions, strict=True)] == right
    assert free_everywhere(wrapped)


def wide(name: str) -> Any:
    """Heads that kernels for half precision take."""
    changes: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    changes["max_position_embeddings"] = 512
    if name == "qwen3_next":
        changes |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    else:
        changes |= {"mamba_d_head": 64, "mamba_d_ssm": 512, "mamba_d_state": 64}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes)).eval().requires_grad_(False)
    model.generation_config = GenerationConfig()
    return model.to(CUDA, torch.bfloat16)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_graphs_give_the_eager_tokens_and_drafts(name: str, drafts: int) -> None:
    if not recurrences_of(CUDA).capturable:
        pytest.skip(f"recurrences by {recurrences_of(CUDA).name} functions stand in no graph")
    model, params = wide(name), SamplingParams(64, return_drafts=True)
    head = RecallHead(said_by(model, 64), 0.7, head_dim=64).to(CUDA) if drafts else None
    options = {**SIZES, "page_size": 16, "max_model_len": 256, "num_speculative_tokens": drafts or None}
    eager = wrap(model, head, cuda_graphs=False, **options).generate(PROMPTS, params)
    loaded = wrap(model, head, cuda_graphs=True, **options)
    assert isinstance(loaded.engine.executor, GraphExecutor)
    graphed = loaded.generate(PROMPTS, params)
    assert agreement([c.token_ids for c in graphed], [c.token_ids for c in eager]) >= 0.9
    if drafts:
        assert agreement(drafted(graphed), drafted(eager)) >= 0.9
    assert free_everywhere(loaded)
