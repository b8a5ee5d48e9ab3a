"""Replacements for the functions by which transformers' recurrent layers mix tokens, and their custom operators.

A recurrent layer of transformers mixes tokens by functions of its modeling file, looked up by name; without a cache it
calls the functions below with one row of tokens, [1, T, …]. A replacement converts the call's arguments to those of a
`Mixing`, and its result to what the function would have returned. Steps that depend on one token alone (softplus,
clamp, the gate z) are computed here, in the order of transformers' operations.

Source: huggingface/transformers, models/{mamba,mamba2,qwen3_next,kimi_linear,lfm2,…}/modeling_*.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from attention.errors import UnsupportedAttentionError
from attention.hf.custom_op import Channel
from attention.recurrence.runner import Recur, empty_output

_STATE_ARGUMENTS = (
    *("initial_state", "initial_states", "seq_idx", "cu_seqlens", "cu_seq_lens_q"),
    *("output_final_state", "return_final_states", "return_last_state", "z"),
)
"""Keyword arguments through which a layer passes its own states or rows, or asks for states: None or False without a
transformers cache. The gate z of Mamba2's scan is not computed here."""


Mixing = Callable[..., Tensor]
"""Computes one recurrent call: (name of the recurrence, its inputs as for `Recur`) -> its output."""


def _conv(
    mixing: Mixing,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """hidden_states [1, C, T], weight [C, k] -> [1, C, T]."""
    _refuse_states(kwargs)
    silu = activation in ("silu", "swish")
    y = mixing("short_conv", hidden_states[0].transpose(0, 1), weight, bias, silu)
    if activation is not None and not silu:
        y = ACT2FN[activation](y)
    return y.transpose(0, 1)[None]


def _delta(
    mixing: Mixing, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    *, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query, key [1, T, Hk, Dk], value [1, T, Hv, Dv], g [1, T, Hv] or [1, T, Hv, Dk] -> [1, T, Hv, Dv], None."""
    _refuse_states(kwargs)
    inputs = (query[0], key[0], value[0], g[0].float(), beta[0].float(), query.shape[-1] ** -0.5)
    return mixing("gated_delta", *inputs, use_qk_l2norm_in_kernel)[None], None


def _ssd(
    mixing: Mixing, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    *, D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), **kwargs: Any,
) -> Tensor:  # fmt: skip
    """hidden_states [1, T, H, P], dt [1, T, H], A [H], B, C [1, T, G, N], D [H] -> [1, T, H, P]."""
    _refuse_states(kwargs)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
    return mixing("ssd_scan", hidden_states[0], dt[0].float(), A.float(), B[0], C[0], D)[None]


def _selective(
    mixing: Mixing, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    *, D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None,
    delta_softplus: bool = False, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """hidden_states, dt, z [1, C, T], A [C, N], B, C [1, N, T], D [C] -> [1, C, T]."""
    _refuse_states(kwargs)
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    x, step, b, c = (x[0].transpose(0, 1) for x in (hidden_states, dt.float(), B, C))
    y = mixing("selective_scan", x, step, A.float(), b, c, D).transpose(0, 1)[None]
    return y if z is None else y * F.silu(z)


def _refuse_states(given: dict[str, Any]) -> None:
    odd = sorted(name for name in _STATE_ARGUMENTS if given.get(name) is not None and given[name] is not False)
    if odd:
        raise UnsupportedAttentionError(f"a recurrent layer passes {', '.join(odd)} to its recurrence")


STAND_INS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _ssd,
    "mamba_selective_scan": _selective,
}
"""Replacements by the name of the function in a modeling file."""


class RecurrenceChannel(Channel[Recur]):
    """Connects compiled code to the `Recur` of the running forward."""

    def opaque(self, call: int) -> Mixing:
        """The custom operators for call number `call` of a forward; torch.compile needs no graph break for them."""
        return partial(_opaque, self.number, call)


_SCHEMAS = {
    "short_conv": "Tensor x, Tensor weight, Tensor? bias, bool silu",
    "gated_delta": "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, bool l2_normalize",
    "ssd_scan": "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D",
    "selective_scan": "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D",
}
"""The inputs of each recurrence, in the notation of torch's operator schemas."""


def _operator(name: str) -> Callable[..., Tensor]:
    """Register the operator `specdec::name`: inputs of the recurrence, number of the channel, number of the call."""

    def serve(*inputs: Any) -> Tensor:
        *given, channel, call = inputs
        recur: Recur = Channel.serving(channel, "a compiled recurrence")
        return recur(name, call, *given)

    schema = f"({_SCHEMAS[name]}, SymInt channel, SymInt call) -> Tensor"
    operator = torch.library.custom_op(f"specdec::{name}", serve, mutates_args=(), schema=schema)
    operator.register_fake(lambda *inputs: empty_output(name, inputs))
    return operator


_OPERATORS = {name: _operator(name) for name in _SCHEMAS}


def _opaque(channel: int, call: int, name: str, *inputs: Any) -> Tensor:
    return _OPERATORS[name](*inputs, channel, call)
