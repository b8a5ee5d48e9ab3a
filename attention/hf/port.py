"""AttentionPort: connects a model's attention modules to attention of ours while a forward of ours runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

import torch

from attention.errors import UnsupportedAttentionError
from attention.hf.absorbed_mla import unexpanded
from attention.hf.custom_op import Channel, LayerAttend, opaque_attend
from attention.hf.gate import guard, unguard
from attention.hf.interface import ATTENTION_NAME, attention_configs, attention_implementation
from attention.hf.model_specific import dense_stand_ins, untuned
from attention.hf.patches import standing_in
from attention.hf.probe import AttentionCall


class AttentionPort:
    """Connects a model's attention modules to attention of ours while a forward of ours runs."""

    def __init__(self, root: torch.nn.Module, calls: tuple[AttentionCall, ...]) -> None:
        """root: the module whose forwards are the user's, and whose submodules made `calls`."""
        self._hooks = guard(root)
        self._attend: LayerAttend | None = None
        self._thread: int | None = None
        self._channel = Channel[LayerAttend]()
        self._configs = attention_configs(root)
        self._latent = [call.latent for call in calls]
        self._modules = [call.module for call in calls]
        self._dense = dense_stand_ins(root)
        self._tuned = [call.module for call in calls if call.attention_spec.temperature is not None]
        self._bind()

    @contextmanager
    def using(self, attend: LayerAttend) -> Iterator[None]:
        """Route the modules' attention through `attend` for the duration of one forward, on this thread.

        Waits for a forward that another thread runs through the model.
        """
        latent = [layer for layer in self._latent if layer is not None]
        with (
            attention_implementation(self._configs, ATTENTION_NAME),
            unexpanded(latent),
            untuned(self._tuned),
            standing_in(self._dense),
            self._channel.carrying(attend),
        ):
            try:
                self._bind()
                self._attend, self._thread = attend, get_ident()
                yield
            finally:
                self._attend = self._thread = None

    def _bind(self) -> None:
        """Point the modules at this port, unless they are: a model wrapped twice has two ports."""
        for index, module in enumerate(self._modules):
            if getattr(module, "_specdec_layer", (None,))[0] is not self:
                module._specdec_layer = (self, index)  # type: ignore[assignment]

    def release(self) -> None:
        """Undo what was done to the model: its modules are bound to this port no more, its forward is not guarded.

        Waits for a forward that runs on another thread. Idempotent.
        """
        unguard(self._configs, self._hooks)
        self._hooks = ()
        for module in self._modules:
            if getattr(module, "_specdec_layer", (None,))[0] is self:
                del module._specdec_layer

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickled or copied with a model, the handle on its modules is None: a copy is served by no engine."""
        return type(None), ()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """query [1, Hq, T, D], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] -> [1, T, Hq, value width of a head].

        Contiguous, as transformers' own attention functions return it: models call `view` on it.

        Raises:
            UnsupportedAttentionError: no forward of ours is running.
        """
        k, v = _by_token(key), _by_token(value)
        latent = self._latent[layer]
        if latent is None:
            return self._call(layer, _by_token(query), k, v, sinks)[None].contiguous()
        attended = self._call(layer, latent.absorb_query(query[0]), k, v, sinks)
        return latent.project_output(attended)[None].contiguous()

    def _call(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return opaque_attend(query, key, value, sinks, self._channel.number, layer)
        if self._attend is None:
            raise UnsupportedAttentionError(
                f"attention '{ATTENTION_NAME}' was called outside SpeculativeModel; set the model's attention with "
                "model.set_attn_implementation('sdpa')"
            )
        if self._thread != get_ident():
            raise UnsupportedAttentionError(
                "a part of the model was called on one thread while SpeculativeModel ran a round on another; call the "
                "model itself, which waits for the round"
            )
        return self._attend(layer, query, key, value, sinks)


def _by_token(states: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, D] -> [T, heads, D] whose last stride is 1, as kernels read it; a view wherever that is so."""
    rows = states[0].transpose(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
