"""Tiny random models with recurrent layers: every type that is served, and what transformers says of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from fakes import TINY, VOCAB, enlarge
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from attention.spec import AttentionSpec
from drafters.loops.base import Attend, LoopSize
from drafters.loops.chain import ChainLoop

_LINEAR = ["linear_attention", "full_attention"] * 2
_GDN: dict[str, Any] = {
    "layer_types": _LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "partial_rotary_factor": 0.5,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
_MLA: dict[str, Any] = {
    "layer_types": _LINEAR,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse"] * 2,
}
_NO_LEAST_STEP = 1e-6
"""transformers clamps Mamba2's step in a prefill and not in its one-token function, so with the default 0.001 its own
`generate` differs from its forward; we clamp always."""
_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
_SSM: dict[str, Any] = {"state_size": 6, "expand": 2, "time_step_rank": 4}

OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_GDN, **_MOE},
    "qwen3_5_text": {**_GDN},
    "qwen3_5_moe_text": {**_GDN, **_MOE},
    "olmo_hybrid": {**_GDN},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 6,
        "time_step_min": _NO_LEAST_STEP,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": _LINEAR,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_mem_blocks": 2,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_d_state": 6,
        "chunk_size": 8,
        "time_step_min": _NO_LEAST_STEP,
        "adapter_rank": 4,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 6,
        "mamba_dt_rank": 4,
    },
    "zamba": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "attention_head_dim": 16,
        "mamba_d_state": 6,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": {**_MLA, "linear_num_heads": 2, "linear_head_dim": 8},
    "bailing_hybrid": {**_MLA, "layer_group_size": 2, "head_dim": 8},
    "lfm2": {**_CONV},
    "lfm2_moe": {
        **_CONV,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
    },
    "lfm3": {**_CONV},
    "mamba": {**_SSM},
    "mamba2": {"state_size": 6, "expand": 2, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "falcon_mamba": {**_SSM},
}
"""Fields of a tiny configuration beside `TINY`, by type."""
TYPES = tuple(name for name in OPTIONS if name in AutoConfig.for_model.__globals__["CONFIG_MAPPING"])
"""Those of them that the installed transformers has."""
PURE = ("mamba", "mamba2", "falcon_mamba")
"""Types without attention."""


def tiny_config(name: str, **changes: Any) -> Any:
    """The configuration of a tiny model of a type."""
    options = {**TINY, **OPTIONS[name], **changes}
    kind = type(AutoConfig.for_model(name))
    if name == "mamba2" or name == "nemotron_h":
        options = {k: v for k, v in options.items() if k in OPTIONS[name] or k in changes or k not in _UNWANTED[name]}
    return kind(**options)


_UNWANTED = {"mamba2": ("num_attention_heads",), "nemotron_h": ("num_hidden_layers",)}


@functools.cache
def _model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation="eager").eval()
    enlarge(model.requires_grad_(False))
    model.generation_config = GenerationConfig()
    return model


def tiny_hybrid(name: str) -> PreTrainedModel:
    """A fresh random model of a type."""
    return copy.deepcopy(_model(name))


@functools.cache
def _greedy(name: str, prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = _model(name).generate(ids, max_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(ids))
    return tuple(out[0].tolist())


def greedy_text(name: str, prompt: list[int], new: int) -> list[int]:
    """Prompt and `new` tokens by transformers' own greedy `generate`, with its own cache."""
    return list(_greedy(name, tuple(prompt), new))


class RecallHead(torch.nn.Module):
    """A head that knows the texts it will be asked about, and is right with a probability by position and token.

    Satisfies `drafters.base.Head`. Its block output is one-hot: the token it drafts.
    """

    table: torch.Tensor
    """[position, token there] -> the next token."""

    def __init__(self, texts: Sequence[Sequence[int]], right: float, head_dim: int = 8) -> None:
        """texts: prompts and what follows them; right: the probability; head_dim: of its attention, which adds 0."""
        super().__init__()
        self.attention_specs = (AttentionSpec(1, 1, head_dim, head_dim, scale=1.0),)
        self.aux_layers, self.hidden_size, self.draft_vocab_size = (0, 1, 2), VOCAB, VOCAB
        self.register_buffer("table", torch.zeros(max(map(len, texts)) + 1, VOCAB, dtype=torch.long))
        for text in texts:
            for at, (token, following) in enumerate(pairwise(text)):
                knows = (at * 7919 + token * 104729) % 100 < 100 * right
                self.table[at, token] = following if knows else (following + 1) % VOCAB

    def fuse(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        return aux_hidden_states.new_zeros(aux_hidden_states.shape[0], self.hidden_size)

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        drafted = self.table[(positions + 1).clamp(max=len(self.table) - 1), token_ids]
        x = torch.nn.functional.one_hot(drafted, self.hidden_size).to(hidden.dtype)
        query = x[:, None, : self.attention_specs[0].head_dim_k].contiguous()
        return x + 0 * attend(0, query, query, query).flatten(1).sum(-1, keepdim=True)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def feedback(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids

    def draft_loop(self, limits: LoopSize) -> ChainLoop:
        return ChainLoop(self)
