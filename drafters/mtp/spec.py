"""MtpSpec and MtpTarget: everything that decides the shape and arithmetic of a multi-token-prediction module."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from attention.hf.weights import dense_weight
from drafters.errors import HeadLoadError, HeadMismatchError
from drafters.mtp.convention import Feedback

_NORMS = ("input_layernorm", "norm")
"""Names of the first norm of a decoder layer; a layer with one mixer has only `norm`."""
_NORM_EPS = ("rms_norm_eps", "layer_norm_epsilon")


@dataclass(frozen=True)
class MtpSpec:
    """One module, as its checkpoint defines it.

    Attributes:
        hidden_first: the projection reads [hidden, embedding] (MiMo) instead of [embedding, hidden].
        final_norm: a norm lies between the block and the target's lm_head (Ernie has none).
        feedback: input of the next draft step, the final norm's output or the block's (the same without a norm).
        projection_bias: the projection has a bias. experts: the block's MLP is a mixture of experts.
        mixers: kinds of the blocks of a module that has one mixer per block (Nemotron-H): "full_attention", "moe" or
            "mlp". () for one block with attention and an MLP.
        attention: the attention kind of a single block, as in the target's layers: "full_attention" or
            "sliding_attention".
    """

    hidden_first: bool = False
    final_norm: bool = True
    feedback: Feedback = "post_norm"
    projection_bias: bool = False
    experts: bool = True
    mixers: tuple[str, ...] = ()
    attention: str = "full_attention"

    @property
    def num_blocks(self) -> int:
        """Decoder layers that one pass runs, one after the other."""
        return len(self.mixers) or 1


@dataclass(frozen=True)
class MtpTarget:
    """What a module takes from its target: the architecture of a decoder layer, and shared tensors.

    Attributes:
        config: the target's text configuration. num_layers: N.
        layer_class, norm_class: classes of the target's decoder layers and norms; norm_eps: epsilon of all its norms.
        rotary: the target's rotary embedding module; None where its layers take no rotary embedding.
        embedding, lm_head: [V, H] weights on the target's device (one tensor when tied).
    """

    config: PreTrainedConfig
    layer_class: type[nn.Module]
    norm_class: type[nn.Module]
    norm_eps: float
    rotary: nn.Module | None
    num_layers: int
    embedding: Tensor
    lm_head: Tensor

    def __post_init__(self) -> None:
        """Raises HeadMismatchError when the lm_head does not read the target's states."""
        if self.lm_head.shape[1] != self.embedding.shape[1]:
            raise HeadMismatchError(
                f"the target's lm_head reads width {self.lm_head.shape[1]}, its states have {self.embedding.shape[1]}"
            )


def mtp_target(model: PreTrainedModel) -> MtpTarget:
    """Parts of a loaded target that modules need.

    Raises:
        HeadMismatchError: its decoder is not built of `layers` with an `input_layernorm` or `norm`, a `rotary_emb`
            where these take rotary embeddings, and an lm_head.
    """
    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    layers = getattr(decoder, "layers", None)
    rotary = getattr(decoder, "rotary_emb", None)
    last = None if layers is None else layers[-1]
    norm = next((n for name in _NORMS if (n := getattr(last, name, None)) is not None), None)
    eps = next((e for name in _NORM_EPS if (e := getattr(config, name, None)) is not None), None)
    # A layer may pass cos and sin on to its attention among **kwargs.
    takers = [module for module in (last, getattr(last, "self_attn", None)) if module is not None]
    rotates = any("position_embeddings" in inspect.signature(module.forward).parameters for module in takers)
    if layers is None or norm is None or eps is None or (rotates and rotary is None) or head is None:
        raise HeadMismatchError(
            f"{type(model).__name__} lacks what multi-token-prediction modules are built from: decoder layers with "
            f"input_layernorm or norm, its epsilon in the configuration ({' or '.join(_NORM_EPS)}), a rotary_emb where "
            "the layers take position_embeddings, and an lm_head"
        )
    return MtpTarget(
        config=config,
        layer_class=type(layers[-1]),
        norm_class=type(norm),
        norm_eps=eps,
        rotary=rotary if rotates else None,
        num_layers=len(layers),
        embedding=_readable(model.get_input_embeddings(), "input embedding"),
        lm_head=_readable(head, "lm_head"),
    )


def _readable(module: Any, what: str) -> Tensor:
    """The weight of an embedding, of a quantised one a copy in floating point.

    Raises:
        HeadMismatchError: it is packed so that only its library can read it.
    """
    weight = dense_weight(module)
    if weight is None:
        raise HeadMismatchError(
            f"the target's {what} is quantised ({type(module).__name__}), and multi-token-prediction modules share its "
            "rows; take a target whose embeddings are not quantised"
        )
    return weight


_SERVED_ATTENTION = ("full_attention", "sliding_attention")
_AS_LAYER_0 = ("exaone_moe",)
"""Targets whose module is built as their layer 0, with its kind of attention.

Source: sgl-project/sglang 0.5.23, models/exaone_moe_mtp.py, exaone_moe.py (layer_types[layer_id], layer_id 0).
"""


def attention_of(config: PreTrainedConfig, module: int) -> tuple[str, str]:
    """The kind of attention of the block of module 0 … M-1, and its source in the target's text configuration.

    Raises:
        HeadLoadError: it is of a kind that a module cannot have.
    """
    named = getattr(config, "mtp_layer_types", None)
    kinds = getattr(config, "layer_types", None)
    if named:
        kind = named[min(module, len(named) - 1)]
        source = "config mtp_layer_types"
    elif kinds and config.model_type in _AS_LAYER_0:
        kind = kinds[0]
        source = f"config layer_types: a module of {config.model_type} is built as layer 0"
    else:
        kind = "full_attention"
        source = "default"
    if kind not in _SERVED_ATTENTION:
        raise HeadLoadError(
            f"the target's configuration says that module {module} has {kind!r} ({source}); modules with "
            f"{' or '.join(_SERVED_ATTENTION)} are supported"
        )
    return kind, source


def block_config(config: PreTrainedConfig, spec: MtpSpec) -> PreTrainedConfig:
    """A copy of the target's configuration from which its layer class builds layers 0 … as a module's blocks.

    Fields by which layer classes select, by layer index, dense or sparse MLPs, full, linear or sliding attention, and
    mixers are set for these layers; all others stay.

    Source: huggingface/transformers, configuration_utils.py (get_mtp_config) and the layer classes of deepseek_v3,
    glm4_moe, glm4_moe_lite, ernie4_5_moe, qwen3_next, qwen3_5, qwen3_5_moe and nemotron_h.
    """
    block = copy.deepcopy(config)
    experts = spec.experts
    changes = {
        "num_hidden_layers": spec.num_blocks,
        "layer_types": list(spec.mixers) or [spec.attention],
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
