"""The replay in higher precision."""

from __future__ import annotations

import numpy as np
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from evals.lossless.distribution import NodesAt
from evals.lossless.evidence import Node, Sampling
from evals.lossless.greedy import Replay
from tests.fakes import tiny_llama

PROMPT, TEXTS = (3, 9, 27), [(5,), (5, 8, 2), (7, 1, 1), (7, 6)]


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


def test_texts_replayed_once_have_the_logits_of_every_prefix() -> None:
    """Compared with a forward pass of each prefix alone; neighbours differ by far more than the tolerance."""
    model = tiny_llama(context=1.0)
    replay = Replay(model)
    replayed = list(replay.logits_after(PROMPT, TEXTS))
    assert [text for text, _ in replayed] == TEXTS
    for text, logits in replayed:
        separate = torch.stack([replay.logits([*PROMPT, *text[:length]]) for length in range(1, len(text) + 1)])
        torch.testing.assert_close(logits, separate, rtol=1e-9, atol=1e-9)
        with torch.inference_mode():
            own = model(torch.tensor([[*PROMPT, *text]])).logits[0]
        torch.testing.assert_close(logits.float(), own[len(PROMPT) :], rtol=1e-3, atol=1e-4)
        assert (logits - own[len(PROMPT) - 1 : -1]).abs().amax(-1).min() > 0.1


def test_every_node_has_the_logits_after_its_own_prefix() -> None:
    """Of prefixes that begin one another only the longest is replayed; a later call replays what is new."""
    replay, sampling = Replay(tiny_llama(context=1.0)), Sampling(top_k=5)
    nodes = NodesAt(replay, PROMPT, sampling)
    for prefixes in ([(5, 8, 2), (5,), (5, 8), (7, 1)], [(7,), (7, 1, 4), (5, 8)]):
        found = nodes(prefixes)
        for prefix in prefixes:
            alone = Node.of(replay.logits([*PROMPT, *prefix]), prefix[-1], sampling)
            assert found[prefix].ids.tolist() == alone.ids.tolist()
            np.testing.assert_allclose(found[prefix].scores, alone.scores, atol=1e-9)
