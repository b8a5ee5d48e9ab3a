"""An EAGLE-3 head that is right every other time, on targets with recurrent layers.

What it was right about is replayed by the next verification, so its aux hidden states come from states that were rolled
back; a random head hardly ever is (tests/drafters/test_recurrent_targets.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import eagle3_head, wrap

from tests.drafters.test_recurrent_targets import through_engine


def knowing_head(model: Any) -> Any:
    """It says what follows the last token by the target's own embeddings, disturbed by the aux hidden states.

    Attention sees little but its own row, whose values are the token's embedding.
    """
    head: Any = eagle3_head(model)
    layer, decoder = head.midlayer, model.get_decoder()
    own, none = torch.eye(32), torch.zeros(32, 32)
    attention, norm = layer.self_attn, getattr(decoder, "norm", None) or decoder.norm_f
    attention.v_proj.weight.copy_(torch.cat([own, none], dim=1))  # two KV heads of 16
    attention.k_proj.weight.copy_(torch.cat([3 * own, none], dim=1))
    halves = [3 * own[:16], 3 * own[:16], 3 * own[16:], 3 * own[16:]]  # a KV head serves two of queries
    attention.q_proj.weight.copy_(torch.cat([torch.cat(halves), torch.zeros(64, 32)], dim=1))
    attention.o_proj.weight.copy_(torch.cat([own[:, :16], none[:, :16], own[:, 16:], none[:, :16]], dim=1))
    layer.mlp.down_proj.weight.mul_(0.05)
    layer.input_layernorm.weight.fill_(1)
    head.fc.weight.mul_(0.2)
    head.norm.weight.copy_(norm(torch.ones(1, 32))[0])
    head.lm_head.weight.copy_(model.lm_head.weight)
    return head


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next", pytest.param("qwen3_5", marks=pytest.mark.long)])
@torch.inference_mode()
@pytest.mark.cases(1)
def test_drafts_after_accepted_ones(name: str, drafts: int, tiny_case: Callable[..., Any]) -> None:
    model = tiny_case(name, context=0.02).model
    wrapped = wrap(
        model, knowing_head(model), num_speculative_tokens=drafts, kv_cache_tokens=120, max_num_batched_tokens=16
    )
    accepted = [r.accepted for c in through_engine(wrapped) for r in c.stats.rounds]
    assert 0 in accepted and max(accepted) >= min(drafts, 2) and sum(accepted) > 10
