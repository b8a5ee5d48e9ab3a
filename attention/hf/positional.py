"""What an attention module does by positions of its own, unseen by the attention interface: Llama 4's layers.

- Attention in chunks stands in the mask that transformers builds for a layer of type `chunked_attention`. We ask for no
  mask; the layer's type and the chunk size are in the configuration that the module holds.
- Temperature tuning scales the queries of layers without rotary embedding by positions that the module counts itself,
  from 0 in every forward without a cache of transformers'. Rows of a batch of ours begin anywhere, so during a forward
  of ours the module leaves its queries as they are, and `GroupRunner` scales them by the real positions.

Source: huggingface/transformers, models/llama4/modeling_llama4.py, Llama4TextAttention; masking_utils.py,
create_chunked_causal_mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from attention.hf.borrowed import borrowed
from attention.spec import TemperatureTuning

_TUNED = ("attn_temperature_tuning", "use_rope", "attn_scale", "floor_scale")


def chunk_size_of(module: nn.Module) -> int | None:
    """Positions per chunk of an attention module whose layer attends in chunks, or None."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types, chunk_size = (getattr(config, name, None) for name in ("layer_types", "attention_chunk_size"))
    if types is None or layer is None or chunk_size is None or types[layer] != "chunked_attention":
        return None
    return int(chunk_size)


def temperature_of(module: nn.Module) -> TemperatureTuning | None:
    """How an attention module scales its queries by positions that it counts itself, or None."""
    if not all(hasattr(module, name) for name in _TUNED) or not module.attn_temperature_tuning or module.use_rope:
        return None
    return TemperatureTuning(float(module.attn_scale), float(module.floor_scale))  # type: ignore[arg-type]


@contextmanager
def untuned(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let modules with temperature tuning leave their queries as they are, for the duration of one forward."""
    with borrowed((module, "attn_temperature_tuning", False) for module in modules):
        yield
