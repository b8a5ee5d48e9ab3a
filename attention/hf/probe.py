"""The probe: run a few dummy tokens through a model to record its attention layers' requirements. No config parsing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from attention.errors import UnsupportedAttentionError
from attention.hf.absorbed_mla import AbsorbedAttention, absorbed_attention
from attention.hf.gate import guarded
from attention.hf.mixing import RecurrentCall, modeling_files
from attention.hf.model_specific import INDEX_ARGUMENT, chunk_size_of, dense_stand_ins, reads_indices, temperature_of
from attention.hf.patches import attention_configs, attention_implementation
from attention.spec import AttentionSpec

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
"""Keyword arguments of the attention interface that need no action, or that AttentionSpec carries."""


@dataclass(frozen=True)
class AttentionCall:
    """One attention module's call of the interface during the probe pass.

    own_spec: the module's own requirements on a kernel. latent: the absorbed form, or None.
    """

    module: nn.Module
    own_spec: AttentionSpec
    latent: AbsorbedAttention | None

    @property
    def attention_spec(self) -> AttentionSpec:
        """Requirements on a kernel, in absorbed form where there is one."""
        return self.own_spec if self.latent is None else self.latent.attention_spec(self.own_spec)


Calls = tuple[AttentionCall, ...]


def expanded(calls: Calls) -> Calls:
    """The calls with keys and values of all heads in the cache instead of latents (MLA)."""
    return tuple(replace(call, latent=None) for call in calls)


@dataclass(frozen=True)
class Probe:
    """The result of a probe pass.

    Attributes:
        calls: the attention calls in layer order. recurrent_calls: the calls of recurrences, in the order of a forward.
        vocab_size: V, width of the logits.
        selects_rows: whether the model's forward honours `logits_to_keep`, the token rows whose logits are needed. A
            forward without this parameter swallows it in **kwargs and returns logits of all rows.
    """

    calls: Calls
    vocab_size: int
    selects_rows: bool
    recurrent_calls: tuple[RecurrentCall, ...]


def probe(model: PreTrainedModel, num_tokens: int = 4) -> Probe:
    """Run a few dummy tokens and record each attention layer's requirements. No config parsing.

    Raises:
        UnsupportedAttentionError: as `recorded_calls`; or the number of logits is neither that for all tokens nor that
            for the selected ones; or the model may have recurrent layers, and `attention.recurrence` is absent.
    """
    ids = torch.zeros((1, num_tokens), dtype=torch.long, device=model.device)
    inputs = {"input_ids": ids, "position_ids": torch.arange(num_tokens, device=model.device)[None]}
    parameters = inspect.signature(model.forward).parameters
    takes_more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if takes_selection := takes_more or "logits_to_keep" in parameters:
        inputs["logits_to_keep"] = torch.arange(1, num_tokens - 1, device=model.device)
    with torch.no_grad(), recorded_calls(model) as calls, _recorded_recurrences(model) as recurrent:
        logits = model(**inputs, use_cache=False).logits
    rows = int(logits.shape[1])
    if rows != num_tokens and not (takes_selection and rows == num_tokens - 2):
        raise UnsupportedAttentionError(
            f"{type(model).__name__} returns {rows} rows of logits for {num_tokens} tokens of which "
            f"{num_tokens - 2} were asked for by logits_to_keep"
        )
    return Probe(tuple(calls), int(logits.shape[-1]), rows != num_tokens, tuple(recurrent))


def _recorded_recurrences(model: PreTrainedModel) -> AbstractContextManager[list[RecurrentCall]]:
    """See `attention.recurrence.hf_port`, which is imported only for models that may have recurrent layers."""
    if not modeling_files(list(model.modules())):
        return nullcontext([])
    try:
        from attention.recurrence.hf_port import recorded_recurrences
    except ImportError as error:
        raise UnsupportedAttentionError(f"recurrent layers need attention.recurrence: {error}") from error
    return recorded_recurrences(model)


@contextmanager
def recorded_calls(root: nn.Module) -> Iterator[list[AttentionCall]]:
    """Record the calls of the attention modules under `root` while it runs; the calls return zeros.

    Raises (from inside the run):
        UnsupportedAttentionError: an argument that would be ignored, a mask, attention in both directions, or several
            calls of one module.
    """
    calls: list[AttentionCall] = []
    configs = attention_configs(root)
    dense = dense_stand_ins(root)
    with guarded(root), attention_implementation(configs, _PROBE_NAME, dense):
        _recordings[get_ident()] = calls
        try:
            yield calls
        finally:
            del _recordings[get_ident()]


_recordings: dict[int, list[AttentionCall]] = {}
"""The calls that each thread's probe has recorded so far. Here and not in a function registered for each probe:
transformers would keep that function, and with it the modules of the last model that was probed."""


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Note one attention call; zeros [1, T, Hq, Dv] instead of attention."""
    calls = _recordings.get(get_ident())
    if calls is None:
        raise UnsupportedAttentionError(f"attention '{_PROBE_NAME}' was called outside a probe")
    _refuse_unknown(module, attention_mask, kwargs)
    _refuse_second(module, calls)
    scaling = kwargs.get("scaling")
    attention_spec = AttentionSpec(
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim_k=query.shape[-1],
        head_dim_v=value.shape[-1],
        scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        has_sinks=kwargs.get("s_aux") is not None,
        chunk_size=chunk_size_of(module),
        temperature=temperature_of(module),
    )
    calls.append(AttentionCall(module, attention_spec, absorbed_attention(module)))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _refuse_unknown(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    known = _KNOWN_ARGUMENTS
    if reads_indices(module):  # set by the replaced forwards, see `attention.hf.model_specific`
        known = known | {INDEX_ARGUMENT}
        mask = None if mask is None or mask.numel() == 1 else mask
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in known)
    if unknown:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, unknown to the paged attention"
        )
    if mask is not None:
        raise UnsupportedAttentionError(f"{type(module).__name__} builds its own attention mask")
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} attends in both directions (is_causal=False): tokens of a prompt see later ones, "
            "and the paged attention is causal"
        )


def _refuse_second(module: nn.Module, calls: list[AttentionCall]) -> None:
    if not any(call.module is module for call in calls):
        return
    if calls[-1].module is module:
        raise UnsupportedAttentionError(f"{type(module).__name__} calls attention twice in one forward")
    raise UnsupportedAttentionError(
        f"the model repeats its layers: {type(module).__name__} runs again in the same forward, and the cache has one "
        "place for its keys"
    )


AttentionInterface.register(_PROBE_NAME, _record)
