"""Plugs a backend into a transformers model's attention. The only file that touches Hugging Face attention.

The model runs unmodified: its attention interface calls one registered function, which finds its layer through a handle
bound to the attention module. No mask function is registered, so transformers builds no mask; therefore the function
raises when it is called outside a forward of ours instead of attending without a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from attention.errors import UnsupportedAttentionError
from attention.hf.custom_op import Channel, LayerAttend, opaque_attend
from attention.hf.gate import gate_of, guard
from attention.hf.mla import LatentAttention, latent_attention, unexpanded
from attention.spec import AttentionSpec

ATTENTION_NAME = "specdec"
_PROBE_NAME = "specdec_probe"

_KNOWN_ARGUMENTS = frozenset(
    [
        "dropout",
        "scaling",
        "sliding_window",
        "softcap",
        "s_aux",
        "is_causal",
        "position_ids",
        "use_cache",
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "deterministic",
        "num_items_in_batch",
    ]
)
"""Keyword arguments of the attention interface that need no action of ours, or that AttentionSpec carries."""


@dataclass(frozen=True)
class AttentionCall:
    """One attention module's call of the interface during the probe pass.

    Attributes:
        module: the attention module.
        attention_spec: what it needs of a kernel, in absorbed form where it has one.
        latent: its absorbed form, or None.
    """

    module: torch.nn.Module
    attention_spec: AttentionSpec
    latent: LatentAttention | None


class AttentionPort:
    """Connects a model's attention modules to attention of ours while a forward of ours runs."""

    def __init__(self, root: torch.nn.Module, calls: tuple[AttentionCall, ...]) -> None:
        AttentionInterface.register(ATTENTION_NAME, specdec_attention)
        guard(root)
        self._attend: LayerAttend | None = None
        self._thread: int | None = None
        self._channel = Channel()
        self._configs = attention_configs(root)
        self._latent = [call.latent for call in calls]
        self._modules = [call.module for call in calls]

    @contextmanager
    def using(self, attend: LayerAttend) -> Iterator[None]:
        """Route the modules' attention through `attend` for the duration of one forward, on this thread.

        Waits for a forward that another thread runs through the model.
        """
        latent = [layer for layer in self._latent if layer is not None]
        with (
            attention_implementation(self._configs, ATTENTION_NAME),
            unexpanded(latent),
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
    bound = getattr(module, "_specdec_layer", None)
    if bound is None:
        raise UnsupportedAttentionError(f"{type(module).__name__} is not bound to a paged cache")
    port, layer = bound
    return port.attend(layer, query, key, value, kwargs.get("s_aux")), None


@contextmanager
def attention_implementation(configs: tuple[Any, ...], name: str) -> Iterator[None]:
    """Set the attention implementation on a model's configs and put the old ones back after.

    Only for the duration of a forward: the user's own `model.generate` keeps the attention it had. Meanwhile the gate
    of the model (the first config is its own) is held.
    """
    with gate_of(configs[0] if configs else None).held():
        before = [config._attn_implementation_internal for config in configs]
        try:
            for config in configs:
                config._attn_implementation_internal = name
            yield
        finally:
            for config, old in zip(configs, before, strict=True):
                config._attn_implementation_internal = old


@dataclass(frozen=True)
class Probe:
    """What a probe pass found.

    Attributes:
        calls: the attention calls in layer order.
        vocab_size: V, width of the logits.
        selects_rows: whether the model's forward honours `logits_to_keep`, the logits indices. Where
            a forward has no such parameter, it disappears among **kwargs, and logits of all rows come back.
    """

    calls: tuple[AttentionCall, ...]
    vocab_size: int
    selects_rows: bool


def probe(model: PreTrainedModel, num_tokens: int = 4) -> Probe:
    """Run a few dummy tokens and record what each attention layer needs. No config parsing.

    Raises:
        UnsupportedAttentionError: as `recorded_calls`; or the number of logits is neither that of all tokens nor
            that of logits_to_keep.
    """
    ids = torch.zeros((1, num_tokens), dtype=torch.long, device=model.device)
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": torch.arange(num_tokens, device=model.device)[None]}
    if takes_selection := _takes(model.forward, "logits_to_keep"):
        # The middle rows: all rows, or the last ones only, would come back from a forward that does not honour it.
        inputs["logits_to_keep"] = torch.arange(1, num_tokens - 1, device=model.device)
    with torch.no_grad(), recorded_calls(model) as calls:
        logits = model(**inputs, use_cache=False).logits
    rows = int(logits.shape[1])
    if rows != num_tokens and not (takes_selection and rows == num_tokens - 2):
        raise UnsupportedAttentionError(
            f"{type(model).__name__} returns {rows} rows of logits for {num_tokens} tokens of which "
            f"{num_tokens - 2} were asked for by logits_to_keep"
        )
    return Probe(tuple(calls), int(logits.shape[-1]), rows != num_tokens)


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with a keyword argument of this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


@contextmanager
def recorded_calls(root: torch.nn.Module) -> Iterator[list[AttentionCall]]:
    """Record the attention calls of modules under `root` while it runs; attention returns zeros.

    Raises (from inside the run):
        UnsupportedAttentionError: an argument that would be ignored, a mask, or several calls of one module.
    """
    calls: list[AttentionCall] = []

    def record(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        _refuse_unknown(module, attention_mask, kwargs)
        _refuse_second(module, calls)
        attention_spec, latent = _attention_spec(query, key, value, kwargs), latent_attention(module)
        calls.append(
            AttentionCall(module, attention_spec if latent is None else latent.attention_spec(attention_spec), latent)
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    guard(root)
    AttentionInterface.register(_PROBE_NAME, record)
    with attention_implementation(attention_configs(root), _PROBE_NAME):
        yield calls


def attention_configs(root: torch.nn.Module) -> tuple[Any, ...]:
    """Every distinct config object that a submodule reads its attention implementation from."""
    configs: dict[int, Any] = {}
    for module in root.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    return tuple(configs.values())


def _refuse_unknown(module: torch.nn.Module, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _KNOWN_ARGUMENTS)
    if unknown:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, unknown to the paged attention"
        )
    if mask is not None:
        raise UnsupportedAttentionError(f"{type(module).__name__} builds its own attention mask")


def _refuse_second(module: torch.nn.Module, calls: list[AttentionCall]) -> None:
    if any(call.module is module for call in calls):
        raise UnsupportedAttentionError(f"{type(module).__name__} calls attention twice in one forward")


def _attention_spec(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> AttentionSpec:
    scaling = kwargs.get("scaling")
    return AttentionSpec(
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim_k=query.shape[-1],
        head_dim_v=value.shape[-1],
        scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        has_sinks=kwargs.get("s_aux") is not None,
    )
