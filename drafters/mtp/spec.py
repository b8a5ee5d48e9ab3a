"""MtpSpec and MtpTarget: what decides the shape and the arithmetic of a multi-token-prediction module."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from drafters.errors import HeadMismatchError
from drafters.mtp.convention import Feedback


@dataclass(frozen=True)
class MtpSpec:
    """One module, as its checkpoint defines it.

    Attributes:
        hidden_first: the projection reads [hidden, embedding] (MiMo) instead of [embedding, hidden].
        final_norm: there is a norm between the block and the target's lm_head (Ernie has none).
        feedback: what the next draft step gets: the final norm's output or the block's. Without a norm they are one.
        projection_bias: the projection has a bias.
        experts: the block's MLP is a mixture of experts.
    """

    hidden_first: bool = False
    final_norm: bool = True
    feedback: Feedback = "post_norm"
    projection_bias: bool = False
    experts: bool = True


@dataclass(frozen=True)
class MtpTarget:
    """What a module takes from its target: the architecture of a decoder layer, and shared tensors.

    Attributes:
        config: the target's text configuration.
        layer_class, norm_class: of the target's decoder layers.
        rotary: the target's rotary embedding module.
        num_layers: N.
        embedding, lm_head: [V, H] weights on the target's device (one tensor when tied).
    """

    config: PreTrainedConfig
    layer_class: type[nn.Module]
    norm_class: type[nn.Module]
    rotary: nn.Module
    num_layers: int
    embedding: torch.Tensor
    lm_head: torch.Tensor

    def __post_init__(self) -> None:
        """Raises HeadMismatchError when the lm_head does not read the target's states."""
        if self.lm_head.shape[1] != self.embedding.shape[1]:
            raise HeadMismatchError(
                f"the target's lm_head reads width {self.lm_head.shape[1]}, its states have {self.embedding.shape[1]}"
            )


def mtp_target(model: PreTrainedModel) -> MtpTarget:
    """What modules need of a loaded target.

    Raises:
        HeadMismatchError: its decoder is not built of `layers` with an `input_layernorm`, `rotary_emb` and lm_head.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    layers = getattr(decoder, "layers", None)
    norm = getattr(layers[-1], "input_layernorm", None) if layers is not None else None
    rotary = getattr(decoder, "rotary_emb", None)
    if layers is None or norm is None or rotary is None or head is None:
        raise HeadMismatchError(
            f"{type(model).__name__} lacks what multi-token-prediction modules are built from: decoder layers with "
            "input_layernorm, a rotary_emb and an lm_head"
        )
    return MtpTarget(
        config=model.config.get_text_config(),
        layer_class=type(layers[-1]),
        norm_class=type(norm),
        rotary=rotary,
        num_layers=len(layers),
        embedding=model.get_input_embeddings().weight,  # type: ignore[arg-type]
        lm_head=head.weight,
    )


def block_config(config: PreTrainedConfig, experts: bool) -> PreTrainedConfig:
    """A copy of the target's configuration from which its layer class builds layer 0 as a full-attention MTP block.

    The fields by which layer classes tell dense from sparse and full from linear or sliding attention by the layer's
    index are set for the single layer; all others stay.

    Source: huggingface/transformers, configuration_utils.py (get_mtp_config) and the layer classes of deepseek_v3,
    glm4_moe, glm4_moe_lite, ernie4_5_moe, qwen3_next and qwen3_5_moe.
    """
    block = copy.deepcopy(config)
    changes = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if experts else "dense"],
        "first_k_dense_replace": 0 if experts else 1,
        "moe_layer_start_index": 0 if experts else 1,
        "moe_layer_interval": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [] if experts else [0],
    }
    for name, value in changes.items():
        if getattr(block, name, None) is not None:
            setattr(block, name, value)
    return block
