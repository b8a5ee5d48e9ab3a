"""Attention features outside transformers' attention interface: Llama 4's chunks and temperature, DeepSeek's indexer.

Llama 4: transformers implements chunked attention by its mask, which specdec does not build; layer type and chunk size
come from the module's configuration. Temperature tuning scales queries by positions that the module counts from 0
itself, so during a specdec forward the module's scaling is off, and `GroupRunner` scales by the real positions.

DeepSeek-V3.2, GLM-5, …: an indexer chooses for each query the `index_topk` keys that it attends to. A row with at most
that many tokens attends to all of them, so only such rows are served, as dense attention. A stand-in for the indexer
returns an index of no keys; the attention module, which slices its mask, is given a mask of a single zero that is never
read.

Source: huggingface/transformers, models/llama4/modeling_llama4.py (Llama4TextAttention), masking_utils.py
(create_chunked_causal_mask), models/deepseek_v32/modeling_deepseek_v32.py, models/glm_moe_dsa/modeling_glm_moe_dsa.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attention.hf.patches import Value
from attention.spec import TemperatureTuning

_TUNED = ("attn_temperature_tuning", "use_rope", "attn_scale", "floor_scale")


def chunk_size_of(module: nn.Module) -> int | None:
    """Positions per chunk of an attention module whose layer attends in chunks, or None."""
    config = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    types, chunk_size = (getattr(config, name, None) for name in ("layer_types", "attention_chunk_size"))
    if types is None or layer is None or chunk_size is None or types[layer] != "chunked_attention":
        return None
    return int(chunk_size)


def temperature_of(module: nn.Module) -> TemperatureTuning | None:
    """How an attention module scales its queries by positions that it counts itself, or None."""
    if not all(hasattr(module, name) for name in _TUNED) or not module.attn_temperature_tuning or module.use_rope:
        return None
    return TemperatureTuning(float(module.attn_scale), float(module.floor_scale))  # type: ignore[arg-type]


def untuned(modules: Iterable[nn.Module]) -> tuple[Value, ...]:
    """Attributes that switch off the temperature scaling of these modules, to be `borrowed` for one forward."""
    return tuple((module, "attn_temperature_tuning", False) for module in modules)


def rotary_parameters(config: Any) -> list[dict[str, Any]]:
    """Parameters of a configuration's rotary embeddings, of all layers and of some types; [] where it has none."""
    own = getattr(config, "rope_parameters", None)
    return [own, *(each for each in own.values() if isinstance(each, dict))] if isinstance(own, dict) else []


def changing_rope(config: Any) -> dict[str, Any]:
    """Parameters of a rotary embedding that depends on a batch's longest row; {} where none does."""
    return next((own for own in rotary_parameters(config) if own.get("rope_type") in ("longrope", "dynamic")), {})


INDEX_ARGUMENT = "indices"
"""The argument by which a module with an indexer passes the chosen keys to its attention."""


def indexers(root: nn.Module) -> tuple[tuple[nn.Module, nn.Module], ...]:
    """The attention modules that have an indexer, each with its indexer."""
    found = ((module, getattr(module, "indexer", None)) for module in root.modules())
    return tuple((m, indexer) for m, indexer in found if isinstance(indexer, nn.Module) and _top_k(indexer))


def reads_indices(module: nn.Module) -> bool:
    """Whether an attention module attends by the choice of its indexer or of an earlier layer's."""
    return hasattr(module, "indexer")


def dense_up_to(root: nn.Module) -> int | None:
    """Tokens up to which all indexers of a model choose every key; None for a model without."""
    return min((_top_k(indexer) for _, indexer in indexers(root)), default=None)


def dense_stand_ins(root: nn.Module) -> tuple[Value, ...]:
    """Replacement forwards for indexers and modules with them, to be `borrowed` for a forward; () for none."""
    found = [((indexer, _no_keys), (module, _masked(module))) for module, indexer in indexers(root)]
    return tuple((module, "forward", function) for pair in found for module, function in pair)


def _top_k(indexer: nn.Module) -> int:
    return int(getattr(indexer, "index_topk", None) or 0)


def _no_keys(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replaces an indexer's forward: [1, T, 0] int32."""
    return hidden_states.new_zeros((*hidden_states.shape[:2], 0), dtype=torch.int32)


def _masked(module: nn.Module) -> Any:
    """Replaces the forward of an attention module: the same, with a mask that can be sliced."""
    forward = type(module).forward

    def masked(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        weight: Tensor = next(module.parameters())
        return forward(module, *args, attention_mask=weight.new_zeros(1, 1, 1, 1), **kwargs)

    return masked
