"""AttentionPort: connects a model's attention modules to specdec's attention during a specdec forward.

The model runs unmodified: its attention interface calls one registered function, which finds its layer through a handle
bound to the attention module. No mask function is registered, so transformers builds no mask; therefore the port raises
when it is called outside a specdec forward instead of attending without a mask.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from attention.errors import UnsupportedAttentionError
from attention.hf.absorbed_mla import unexpanded
from attention.hf.custom_op import Channel, LayerAttend, opaque_attend
from attention.hf.gate import guard, unguard
from attention.hf.model_specific import dense_stand_ins, untuned
from attention.hf.patches import Value, attention_configs, attention_implementation
from attention.hf.probe import Calls
from attention.hf.training_mode import evaluating, trainable_modules

ATTENTION_NAME = "specdec"
_BOUND = "_specdec_layer"
_OUTSIDE = (
    f"attention '{ATTENTION_NAME}' was called outside SpeculativeModel; set the model's attention with "
    "model.set_attn_implementation('sdpa')"
)


class AttentionPort:
    """Connects a model's attention modules to specdec's attention during a specdec forward."""

    def __init__(self, root: nn.Module, calls: Calls, borrowed: Iterable[Value] = ()) -> None:
        """root: the module that the user calls, and whose submodules made `calls`. borrowed: further attribute values
        for the duration of a specdec forward."""
        self._hooks = guard(root)
        self._trainable = trainable_modules(root)
        self._root = weakref.ref(root)  # the function that undoes this port must not keep the model alive
        self._thread: int | None = None
        self._channel = Channel[LayerAttend]()
        self._configs = attention_configs(root)
        self._latent = [call.latent for call in calls]
        self._modules = [call.module for call in calls]
        tuned = [call.module for call in calls if call.attention_spec.temperature is not None]
        latent = [layer for layer in self._latent if layer is not None]
        self._borrowed = (*unexpanded(latent), *untuned(tuned), *dense_stand_ins(root), *borrowed)
        self._bind()

    @contextmanager
    def using(self, attend: LayerAttend) -> Iterator[None]:
        """Route the modules' attention through `attend` for the duration of one forward, on this thread.

        Waits for a forward that another thread runs through the model.
        """
        root = self._root()
        mode = nullcontext() if root is None else evaluating(root, self._trainable)
        with attention_implementation(self._configs, ATTENTION_NAME, self._borrowed), mode:
            try:
                if any(getattr(module, _BOUND, (None,))[0] is not self for module in self._modules):
                    self._bind()  # a model wrapped twice has two ports
                self._channel.served = attend
                self._thread = get_ident()
                yield
            finally:
                self._channel.served = self._thread = None

    def _bind(self) -> None:
        """Point the modules at this port."""
        for index, module in enumerate(self._modules):
            setattr(module, _BOUND, (self, index))

    def release(self) -> None:
        """Undo the changes to the model: unbind its modules from this port and remove the guard of its forward.

        Waits for a forward that runs on another thread. Idempotent.
        """
        unguard(self._configs, self._hooks)
        self._hooks = ()
        for module in self._modules:
            if getattr(module, _BOUND, (None,))[0] is self:
                delattr(module, _BOUND)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickled or copied with a model, the handle on its modules is None: a copy is served by no engine."""
        return type(None), ()


def specdec_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function behind transformers' attention interface.

    query [1, Hq, T, D], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] -> [1, T, Hq, value width of a head], contiguous, as
    transformers' own attention functions return it: models call `view` on it.

    Raises:
        UnsupportedAttentionError: the module was not bound by an AttentionPort, or no specdec forward is running.
    """
    port, layer = getattr(module, _BOUND, (None, 0))
    if port is None:
        raise UnsupportedAttentionError(f"{_OUTSIDE} ({type(module).__name__} is not bound to a paged cache)")
    k = _by_token(key)
    v = _by_token(value)
    latent = port._latent[layer]
    sinks = kwargs.get("s_aux")
    q = _by_token(query) if latent is None else latent.absorb_query(query[0])
    if torch.compiler.is_compiling():
        attended = opaque_attend(q, k, v, sinks, port._channel.number, layer)
    else:
        serve = port._channel.served
        if serve is None:
            raise UnsupportedAttentionError(_OUTSIDE)
        if port._thread != get_ident():
            raise UnsupportedAttentionError(
                "a part of the model was called on one thread while SpeculativeModel ran a round on another; call "
                "the model itself, which waits for the round"
            )
        attended = serve(layer, q, k, v, sinks)
    return (attended if latent is None else latent.project_output(attended))[None].contiguous(), None


AttentionInterface.register(ATTENTION_NAME, specdec_attention)


def _by_token(states: Tensor) -> Tensor:
    """[1, heads, T, D] -> [T, heads, D] whose last stride is 1, as kernels read it; a view wherever that is so."""
    rows = states[0].transpose(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
