"""Block-parallel heads on a GPU: rounds from CUDA graphs draft as eager ones, and as the torch reference does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafters.block.head import BlockParallelHead
from drafters.block.spec import BlockSpec
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.agreement import agreement, drafted
from tests.gpu.test_graph_rounds import CUDA, PROMPTS, VOCAB, Tokenizer, pair

SPEC: dict[str, Any] = {
    "hidden_size": 256,
    "target_hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "aux_layers": (2, 4, 5),
    "qk_norm": True,
    "num_layers": 3,
    "own_lm_head": True,
    "mask_token_id": 7,
}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": 16, "slots": "fill-in"},
    "dspark": {"block_size": 7, "slots": "anchor-first", "markov": "vanilla", "markov_rank": 32},
    "rnn": {"block_size": 7, "slots": "anchor-first", "markov": "rnn", "markov_rank": 32},
    "dflash2": {
        "block_size": 8,
        "slots": "fill-in",
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 32,
        "selector_top_k": 16,
    },
    "windows": {
        "block_size": 8,
        "slots": "fill-in",
        "window": 40,
        "windowed_layers": (0, 1),
        "causal_layers": (1,),
    },
}
PARAMS = SamplingParams(max_new_tokens=48, return_drafts=True)


def model(kind: str, graphs: bool, backend: str = "flashinfer", **options: Any) -> SpeculativeModel:
    target, _ = pair(torch.float16)
    torch.manual_seed(3)
    head = BlockParallelHead(BlockSpec(**SPEC, **KINDS[kind]), target.get_input_embeddings().weight)
    head.eval().requires_grad_(False)
    head.lm_head.weight.copy_(target.lm_head.weight)  # clear winners
    for name, parameter in head.named_parameters():
        if name.endswith("base_kernel"):
            parameter[:, 0] = 1
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512}
    return SpeculativeModel.from_pretrained(
        target,
        head.to(CUDA, torch.float16),
        backend=backend,
        tokenizer=Tokenizer(),
        cuda_graphs=graphs,
        **sizes,
        **options,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_give_the_eager_tokens_and_drafts(kind: str) -> None:
    eager = model(kind, False, "torch").generate(PROMPTS, PARAMS)
    for graphs in (False, True):
        with model(kind, graphs) as loaded:
            found = loaded.generate(PROMPTS, PARAMS)
            assert loaded.graphs.startswith("on" if graphs else "off")
        assert agreement([c.token_ids for c in found], [c.token_ids for c in eager]) >= 0.97
        assert agreement(drafted(found), drafted(eager)) >= 0.95


@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
@pytest.mark.parametrize("sampling", ["rejection", "keyed"])
def test_sampled_rows_from_graphs(sampling: str, kind: str) -> None:
    """The drafts of the eager rounds, with the same noise; greedy rows beside them."""
    params = [
        SamplingParams(max_new_tokens=32, temperature=t, seed=i, return_drafts=True)
        for i, t in enumerate((0.0, 0.7, 1.0, 0.0, 1.3))
    ]
    found = [model(kind, graphs, sampling=sampling).generate(PROMPTS, params) for graphs in (False, True)]
    assert agreement([c.token_ids for c in found[1]], [c.token_ids for c in found[0]]) >= 0.9
    assert agreement(drafted(found[1]), drafted(found[0])) >= 0.9
