"""longrope and sparse indexers on a GPU, compiled and in CUDA graphs: each request as the model itself says it alone.

Half precision: divergences are judged by `agreement`. The model's own answer is made without a cache for a Phi-3, which
reads a request again when it passes the original length (transformers 5.17 loses what it has read there).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from benchmarks.sweep_configs import VOCAB, named_cases
from benchmarks.sweep_models import NumberTokenizer, ScriptedHead, build, prompts_of
from specdec import SamplingParams, SpeculativeModel
from specdec.execution.graphs import GraphExecutor
from specdec.selftest.twin import enlarge

ORIGINAL, NEW = 64, 40
FLASHINFER_WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
"""Those of the latents, which FlashInfer's MLA takes alone; the indexer's heads hold the rotary part."""
PROMPTS = prompts_of((5, 40, 50, 63, 64, 65, 150), seed=3)


def longrope(kind: str) -> PreTrainedModel:
    pairs = 32
    factors = {"short_factor": [1 + 0.02 * i for i in range(pairs)], "long_factor": [2 + 0.1 * i for i in range(pairs)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCAB,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters=rope | factors,
        pad_token_id=0,
        eos_token_id=None,
        **sizes,
    )
    config.original_max_position_embeddings = ORIGINAL
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    enlarge(model)
    model.generation_config = GenerationConfig()
    return model.to("cuda", torch.float16)


def answer(model: PreTrainedModel, prompt: list[int], new: int, cached: bool) -> list[int]:
    ids = torch.tensor([prompt], device="cuda")
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, use_cache=cached, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def share_of_equal_tokens(ours: list[list[int]], own: list[list[int]]) -> float:
    """Of the tokens before each answer's first divergence, and all after it counted as different."""
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(ours, own, strict=True)
    ]
    return sum(same) / sum(map(len, own))


def served(model: PreTrainedModel, texts: list[list[int]], drafts: int, **options: Any) -> SpeculativeModel:
    head = ScriptedHead(texts, VOCAB, (1, 1, 2), "cuda") if drafts else None
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 96, "kv_cache_tokens": 4096}
    return SpeculativeModel.from_pretrained(
        model, head, tokenizer=NumberTokenizer(), num_speculative_tokens=drafts, cuda_graphs=True, **sizes, **options
    )


@pytest.mark.parametrize("kind", ["llama", "phi3"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_rounds_from_graphs_give_each_request_its_factors(kind: str, drafts: int) -> None:
    model = longrope(kind)
    answers = [answer(model, prompt, NEW, cached=kind == "llama") for prompt in PROMPTS]
    with served(model, [p + a for p, a in zip(PROMPTS, answers, strict=True)], drafts) as wrapped:
        assert isinstance(wrapped.engine.executor, GraphExecutor)
        found = [c.token_ids for c in wrapped.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))]
    # Wrong factors change every answer that passes the original length within a few tokens; rounding, some late ones.
    assert share_of_equal_tokens(found, answers) > 0.8


def test_a_sparse_model_is_captured_as_a_dense_one() -> None:
    (case,) = named_cases(("deepseek_v32",))
    model = build(replace(case, options=FLASHINFER_WIDTHS)).to("cuda", torch.float16)
    prompts = [prompt[:12] for prompt in PROMPTS[1:5]]
    answers = [answer(model, prompt, 16, cached=True) for prompt in prompts]
    with served(model, [p + a for p, a in zip(prompts, answers, strict=True)], 3) as wrapped:
        assert isinstance(wrapped.engine.executor, GraphExecutor)
        found = [c.token_ids for c in wrapped.generate(prompts, SamplingParams(max_new_tokens=16))]
    assert share_of_equal_tokens(found, answers) > 0.7
