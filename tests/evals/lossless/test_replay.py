"""The replay in higher precision."""

from __future__ import annotations

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from evals.lossless.replay import Replay


def test_a_mixture_of_experts_is_replayed_in_float64() -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    model = DeepseekV3ForCausalLM(config).eval()
    replay = Replay(model)
    assert replay.dtype == torch.float64
    ids = [3, 9, 27, 17]
    with torch.inference_mode():
        own = model(torch.tensor([ids])).logits[0, -1]
    assert (replay.logits(ids) - own).abs().max() < 1e-5
