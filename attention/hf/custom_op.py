"""Attention, and the recurrences of hybrid models, as opaque operators: torch.compile sees no graph breaks.

The operator finds its attention through a numbered channel, whose content may change from call to call without making
the compiled code stale. That it writes the KV cache is invisible to the compiler: nothing else in a compiled model
touches the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

import torch

from attention.errors import UnsupportedAttentionError
from attention.recurrence.runner import Recur, empty_output

LayerAttend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(layer, query [T, Hq, Dk], key [T, Hkv, Dk], value [T, Hkv, Dv], sinks [Hq] or None) -> [T, Hq, Dv]."""

_numbers = count()
_content: dict[int, Any] = {}
Served = TypeVar("Served")


class Channel(Generic[Served]):
    """One place through which compiled code reaches attention (a `LayerAttend`) or recurrences (a `Recur`)."""

    def __init__(self) -> None:
        self.number = next(_numbers)

    @contextmanager
    def carrying(self, served: Served) -> Iterator[None]:
        """Serve the operators' calls on this channel by `served`, for a while."""
        _content[self.number] = served
        try:
            yield
        finally:
            del _content[self.number]


@torch.library.custom_op("specdec::attend", mutates_args=())
def opaque_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    channel: int,
    layer: int,
) -> torch.Tensor:
    """query [T, Hq, Dk], key [T, Hkv, Dk], value [T, Hkv, Dv], sinks [Hq] or None -> [T, Hq, Dv].

    Raises:
        UnsupportedAttentionError: nothing is carried on the channel: compiled code was called outside its engine.
    """
    attend: LayerAttend | None = _content.get(channel)
    if attend is None:
        raise UnsupportedAttentionError("compiled attention was called outside SpeculativeModel")
    return attend(layer, query, key, value, sinks).contiguous()


@opaque_attend.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, channel: int, layer: int
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


class RecurrenceChannel(Channel[Recur]):
    """A channel of recurrences."""

    def opaque(self, call: int) -> OpaqueMixing:
        """What stands for a call in compiled code."""
        return OpaqueMixing(self.number, call)


class OpaqueMixing:
    """One recurrent call as an operator: see `attention.hf.recurrent_calls.Mixing`."""

    def __init__(self, channel: int, call: int) -> None:
        self._place = channel, call

    def short_conv(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
        """See `Mixing`."""
        return opaque_short_conv(x, weight, bias, silu, *self._place)

    def gated_delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float,
        l2_normalize: bool,
    ) -> torch.Tensor:
        """See `Mixing`."""
        return opaque_gated_delta(q, k, v, g, beta, scale, l2_normalize, *self._place)

    def ssd_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `Mixing`."""
        return opaque_ssd_scan(x, dt, A, B, C, D, *self._place)

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `Mixing`."""
        return opaque_selective_scan(x, dt, A, B, C, D, *self._place)


def _recur(channel: int) -> Recur:
    recur: Recur | None = _content.get(channel)
    if recur is None:
        raise UnsupportedAttentionError("a compiled recurrence was called outside SpeculativeModel")
    return recur


@torch.library.custom_op("specdec::short_conv", mutates_args=())
def opaque_short_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, channel: int, call: int
) -> torch.Tensor:
    """x [T, C] -> [T, C], see `Recur.short_conv`. Raises UnsupportedAttentionError outside its engine, as all do."""
    return _recur(channel).short_conv(call, x, weight, bias, silu)


@torch.library.custom_op("specdec::gated_delta", mutates_args=())
def opaque_gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    l2_normalize: bool,
    channel: int,
    call: int,
) -> torch.Tensor:
    """v [T, Hv, Dv] -> [T, Hv, Dv], see `Recur.gated_delta`."""
    return _recur(channel).gated_delta(call, q, k, v, g, beta, scale, l2_normalize)


@torch.library.custom_op("specdec::ssd_scan", mutates_args=())
def opaque_ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    channel: int,
    call: int,
) -> torch.Tensor:
    """x [T, H, P] -> [T, H, P] float32, see `Recur.ssd_scan`."""
    return _recur(channel).ssd_scan(call, x, dt, A, B, C, D)


@torch.library.custom_op("specdec::selective_scan", mutates_args=())
def opaque_selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    channel: int,
    call: int,
) -> torch.Tensor:
    """x [T, C] -> [T, C] float32, see `Recur.selective_scan`."""
    return _recur(channel).selective_scan(call, x, dt, A, B, C, D)


def _empty(name: str, *inputs: Any) -> torch.Tensor:
    return empty_output(name, inputs)


opaque_short_conv.register_fake(partial(_empty, "short_conv"))
opaque_gated_delta.register_fake(partial(_empty, "gated_delta"))
opaque_ssd_scan.register_fake(partial(_empty, "ssd_scan"))
opaque_selective_scan.register_fake(partial(_empty, "selective_scan"))
