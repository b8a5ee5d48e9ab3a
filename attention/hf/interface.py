"""The function that transformers' attention interface calls, and the configs that choose it.

The model runs unmodified: its attention interface calls one registered function, which finds its layer through a handle
bound to the attention module. No mask function is registered, so transformers builds no mask; therefore the port raises
when it is called outside a forward of ours instead of attending without a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

from attention.errors import UnsupportedAttentionError
from attention.hf.gate import gate_of
from attention.hf.patches import borrowed, settle

ATTENTION_NAME = "specdec"


def specdec_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function behind transformers' attention interface.

    Raises:
        UnsupportedAttentionError: the module was not bound by an AttentionPort.
    """
    port, layer = getattr(module, "_specdec_layer", (None, 0))
    if port is None:
        raise UnsupportedAttentionError(
            f"attention '{ATTENTION_NAME}' was called outside SpeculativeModel; set the model's attention with "
            f"model.set_attn_implementation('sdpa') ({type(module).__name__} is not bound to a paged cache)"
        )
    return port.attend(layer, query, key, value, kwargs.get("s_aux")), None


@contextmanager
def attention_implementation(configs: tuple[Any, ...], name: str) -> Iterator[None]:
    """Set the attention implementation on a model's configs and put the old ones back after.

    Only for the duration of a forward: the user's own `model.generate` keeps the attention it had. Meanwhile the gate
    of the model (the first config is its own) is held.
    """
    gate = gate_of(configs[0] if configs else None)
    outermost = gate.is_guarding and not gate.is_mine()
    with gate.held():
        if outermost:
            settle(configs)
        with borrowed((config, "_attn_implementation_internal", name) for config in configs):
            yield


def attention_configs(root: torch.nn.Module) -> tuple[Any, ...]:
    """Every distinct config object that a submodule reads its attention implementation from."""
    configs: dict[int, Any] = {}
    for module in root.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    return tuple(configs.values())


AttentionInterface.register(ATTENTION_NAME, specdec_attention)
