"""Tiny block-parallel heads, in memory and on disk in their exporters' formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from fakes import VOCAB, bigram_logits
from safetensors.torch import save_file

from drafters.base import FINAL_NORM
from drafters.block.head import BlockParallelHead
from drafters.block.spec import BlockSpec
from drafters.vocab import mask_of, offsets_of
from specdec.selftest.twin import enlarge

SIZES = {"hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2}
DFLASH: dict[str, Any] = {
    **SIZES,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "aux_layers": (1, 2, 3),
    "qk_norm": True,
    "num_layers": 2,
    "own_lm_head": False,
    "block_size": 6,
    "mask_token_id": 5,
    "slots": "fill-in",
}
DSPARK = {
    **DFLASH,
    "own_lm_head": True,
    "own_embed": True,
    "slots": "anchor-first",
    "markov": "vanilla",
    "markov_rank": VOCAB,
}
"""Spec fields as the two exporters have them."""
DFLASH2 = {**DFLASH, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 16}


def block_head(model: Any, fields: dict[str, Any], seed: int = 1, **changes: Any) -> BlockParallelHead:
    """A random head for a tiny target. One with an own embedding or lm_head has the target's, a little changed."""
    spec = BlockSpec(**{**fields, **changes})
    ids = torch.arange(spec.draft_vocab_size) * (spec.vocab_size // spec.draft_vocab_size)
    embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    head = BlockParallelHead(spec, embedding, lm_head[: spec.draft_vocab_size], offsets_of(ids))
    head.eval().requires_grad_(False)
    enlarge(head, seed)
    for own, theirs in (("embed_tokens", embedding), ("lm_head", lm_head[ids])):
        if hasattr(head, own):
            getattr(head, own).weight.mul_(0.1).add_(theirs.detach())
    if spec.markov and spec.markov_rank == spec.vocab_size:
        _guess_right(head, bigram_logits(model)[:, ids])
    if spec.confidence:
        head.confidence_head["proj"].bias.fill_(0.1)  # as torch draws it, two heads would differ
    if spec.selector_rank == spec.vocab_size:
        _select_right(head, bigram_logits(model))
    return head


def _select_right(head: BlockParallelHead, table: torch.Tensor) -> None:
    """The same by a selector, which reads a part of the outputs that is always positive."""
    head.embed_tokens.weight[:, 0] = 30
    for layer in head.layers:
        layer.self_attn.o_proj.weight[0], layer.mlp.down_proj.weight[0] = 0, 0
    selector = head.candidate_selector
    selector.hidden_projection.weight.mul_(0.05)[:, 0] = 0.2
    selector.predecessor_codebook.weight.copy_(torch.eye(head.spec.vocab_size))
    selector.successor_codebook.weight.copy_(2 * table.T)


def _guess_right(head: BlockParallelHead, table: torch.Tensor) -> None:
    """Let the Markov head say what the target says after a token alone, so that many drafts are accepted."""
    head.markov_head.markov_w1.weight.copy_(torch.eye(head.spec.vocab_size))
    head.markov_head.markov_w2.weight.copy_(2 * table.T)


SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Keys of DFlash2."""


def _class_of(spec: BlockSpec) -> str:
    if spec.selector_rank:
        return "DFlash2DraftModel"
    return "Qwen3DSparkModel" if spec.own_embed else "DFlashDraftModel"


def config_of(head: BlockParallelHead, num_target_layers: int = 4) -> dict[str, Any]:
    """config.json of a head, by its spec, as the exporter of such a head writes it."""
    spec, dspark = head.spec, _class_of(head.spec) == "Qwen3DSparkModel"
    kinds = ("sliding_attention" if i in spec.windowed_layers else "full_attention" for i in range(spec.num_layers))
    own = {
        "target_layer_ids": [num_target_layers - 1 if b == FINAL_NORM else b - 1 for b in spec.aux_layers],
        "mask_token_id": spec.mask_token_id,
    }
    if spec.selector_rank:
        own |= {key: getattr(spec, key) for key in SECOND}
    config = {
        "architectures": [_class_of(spec)],
        "model_type": "qwen3",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_target_layers": num_target_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": {"rope_theta": spec.rope.theta, "rope_type": "default"},
        "max_position_embeddings": spec.rope.max_positions,
        "attention_bias": spec.qkv_bias,
        "attention_dropout": 0.0,
        "layer_types": list(kinds),
        "sliding_window": spec.window,
        "use_sliding_window": spec.window is not None,
        "max_window_layers": spec.num_layers,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "transformers_version": "5.15.0",
        "block_size": spec.block_size,
    }
    if spec.windowed_layers:
        config["sliding_attention_causal"] = spec.causal_layers == spec.windowed_layers
    if spec.draft_vocab_size < spec.vocab_size:
        config["draft_vocab_size"] = spec.draft_vocab_size
    if not dspark:
        return config | {"dflash_config": own}
    return (
        config
        | own
        | {
            "num_anchors": 512,
            "markov_rank": spec.markov_rank,
            **({"markov_head_type": spec.markov} if spec.markov else {}),
            "enable_confidence_head": bool(spec.confidence),
            "confidence_head_with_markov": spec.confidence == "outputs and tokens",
        }
    )


def write_head(head: BlockParallelHead, folder: Path, **changes: Any) -> Path:
    """Write a head's folder. changes: keys of config.json; None leaves one out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (config_of(head) | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in head.state_dict().items()}
    tensors = {name.replace("codebook.weight", "codebook"): tensor for name, tensor in tensors.items()}  # as published
    if head.spec.draft_vocab_size < head.spec.vocab_size:
        d2t = offsets_of(head.target_ids)
        tensors |= {"d2t": d2t, "t2d": mask_of(d2t, head.spec.vocab_size)}
    save_file(tensors, folder / "model.safetensors")
    return folder
