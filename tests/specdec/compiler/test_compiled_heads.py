"""Compiled code of heads that is kept on disk serves the next start on this machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from attention.hf.custom_op import Channel, opaque_attend
from drafters.block.head import BlockParallelHead
from drafters.block.spec import BlockSpec
from specdec.compiler.compiling import compiled, compiler_settings

SPEC: dict[str, Any] = {
    "hidden_size": 64,
    "target_hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 32,
    "vocab_size": 99,
    "draft_vocab_size": 99,
    "aux_layers": (1, 2),
    "qk_norm": True,
    "num_layers": 4,
    "own_lm_head": True,
    "mask_token_id": 7,
    "block_size": 8,
    "slots": "fill-in",
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 4,
}


@pytest.mark.thorough
def test_a_second_start_takes_the_code_of_the_first() -> None:
    """Its guards are evaluated with the sizes of a region's inputs: one on another size is a KeyError there.

    Convolutions that split tokens into blocks had one; both starts compile four layers, and run two sizes.
    """
    torch.manual_seed(0)
    head = BlockParallelHead(BlockSpec(**SPEC), torch.randn(99, 64)).eval().requires_grad_(False)
    channel = Channel[Any]()

    def block(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return head.block(token_ids, positions, lambda i, q, k, v: opaque_attend(q, k, v, None, channel.number, i))

    with fresh_cache(), torch.no_grad(), channel.carrying(lambda layer, query, *_: query * 1):
        for start in range(2):
            torch.compiler.reset()
            counters.clear()
            with compiler_settings(batch_invariant=False):
                own = compiled(block)
                for rows in (2, 3):
                    ids, positions = torch.randint(0, 99, (8 * rows,)), torch.arange(8 * rows)
                    assert torch.allclose(own(ids, positions), block(ids, positions), atol=1e-4)
            assert (counters["inductor"]["fxgraph_cache_hit"] > 0) == bool(start)
