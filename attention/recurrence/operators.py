"""The recurrences of hybrid models as opaque operators: torch.compile sees no graph breaks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from attention.errors import UnsupportedAttentionError
from attention.hf.custom_op import Channel
from attention.recurrence.runner import Recur, empty_output


class RecurrenceChannel(Channel[Recur]):
    """A channel of recurrences."""

    def opaque(self, call: int) -> OpaqueMixing:
        """The operators that replace call number `call` of a forward in compiled code."""
        return OpaqueMixing(self.number, call)


class OpaqueMixing:
    """One recurrent call as an operator: an `attention.recurrence.hf_calls.Mixing`."""

    def __init__(self, channel: int, call: int) -> None:
        self._place = channel, call

    def short_conv(self, *inputs: Any) -> torch.Tensor:
        return opaque_short_conv(*inputs, *self._place)

    def gated_delta(self, *inputs: Any) -> torch.Tensor:
        return opaque_gated_delta(*inputs, *self._place)

    def ssd_scan(self, *inputs: Any) -> torch.Tensor:
        return opaque_ssd_scan(*inputs, *self._place)

    def selective_scan(self, *inputs: Any) -> torch.Tensor:
        return opaque_selective_scan(*inputs, *self._place)


@torch.library.custom_op("specdec::short_conv", mutates_args=())
def opaque_short_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, channel: int, call: int
) -> torch.Tensor:
    """x [T, C] -> [T, C], see `Recur.short_conv`. Raises UnsupportedAttentionError outside its engine, as all do."""
    return _served(channel).short_conv(call, x, weight, bias, silu)


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
    return _served(channel).gated_delta(call, q, k, v, g, beta, scale, l2_normalize)


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
    return _served(channel).ssd_scan(call, x, dt, A, B, C, D)


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
    return _served(channel).selective_scan(call, x, dt, A, B, C, D)


def _served(channel: int) -> Recur:
    recur: Recur | None = Channel.serving(channel)
    if recur is None:
        raise UnsupportedAttentionError("a compiled recurrence was called outside SpeculativeModel")
    return recur


def _empty(name: str, *inputs: Any) -> torch.Tensor:
    return empty_output(name, inputs)


opaque_short_conv.register_fake(partial(_empty, "short_conv"))
opaque_gated_delta.register_fake(partial(_empty, "gated_delta"))
opaque_ssd_scan.register_fake(partial(_empty, "ssd_scan"))
opaque_selective_scan.register_fake(partial(_empty, "selective_scan"))
