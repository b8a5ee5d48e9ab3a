"""Multi-token-prediction modules of recurrent targets on a GPU: rounds from graphs draft as those without.

Qwen3.5's module has a gate and rotary positions of three sections, Nemotron-H's two blocks, attention and experts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import free_everywhere, random_prompts, wrap
from transformers import AutoModelForCausalLM, GenerationConfig

from attention.recurrence.functions import recurrences_of
from drafters.mtp.head import MtpHead
from drafters.mtp.spec import MtpSpec, mtp_target
from specdec import SamplingParams
from specdec.execution.graphs import GraphExecutor
from tests.agreement import agreement, drafted
from tests.hybrids import tiny_config

CUDA = torch.device("cuda")
PROMPTS = random_prompts([17, 3, 90, 9, 41])
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "kv_cache_tokens": 640}
HEADS: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 512}
WIDE: dict[str, dict[str, Any]] = {
    "qwen3_next": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "qwen3_5_text": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "nemotron_h": {"mamba_head_dim": 64, "ssm_state_size": 64, "moe_intermediate_size": 64},
}
SPECS = {
    "qwen3_next": MtpSpec(experts=True),
    "qwen3_5_text": MtpSpec(experts=False),
    "nemotron_h": MtpSpec(mixers=("full_attention", "moe")),
}


def pair(name: str, device: torch.device) -> tuple[Any, MtpHead]:
    """A target in bfloat16 whose heads the kernels take, and a module that mostly passes the token's embedding on."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **HEADS, **WIDE[name])).eval().requires_grad_(False)
    model.generation_config = GenerationConfig()
    torch.nn.init.normal_(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    model = model.to(device, torch.bfloat16)
    head = MtpHead(SPECS[name], mtp_target(model)).eval().requires_grad_(False)
    for tensor_name, tensor in head.named_parameters():
        if tensor.dim() > 1:
            torch.nn.init.normal_(tensor, std=0.02)
        if tensor_name == "eh_proj.weight":
            tensor[:, :256] += torch.eye(256, device=device)
        tensor.data = tensor.data.to(torch.bfloat16)
    return model, head


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("name", WIDE)
def test_graphs_draft_as_eager_rounds(name: str, drafts: int) -> None:
    if not recurrences_of(CUDA).capturable:
        pytest.skip(f"recurrences by {recurrences_of(CUDA).name} functions stand in no graph")
    model, head = pair(name, CUDA)
    params = SamplingParams(48, return_drafts=True)
    options = {**SIZES, "page_size": 16, "num_speculative_tokens": drafts}
    eager = wrap(model, head, cuda_graphs=False, **options).generate(PROMPTS, params)
    loaded = wrap(model, head, cuda_graphs=True, **options)
    assert isinstance(loaded.engine.executor, GraphExecutor)
    graphed = loaded.generate(PROMPTS, params)
    assert agreement([c.token_ids for c in graphed], [c.token_ids for c in eager]) >= 0.9
    assert agreement(drafted(graphed), drafted(eager)) >= 0.9
    assert max(r.accepted for c in graphed for r in c.stats.rounds) >= 1
    assert free_everywhere(loaded)
