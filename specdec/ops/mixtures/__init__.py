"""Mixtures of experts in rounds from graphs; `choice` tells which form serves a mixture."""

from __future__ import annotations

from typing import NamedTuple


class Gating(NamedTuple):
    """Layout of gate and up in a stack, and their activation, see `specdec.ops.mixtures.routed.routed_experts`."""

    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None


PLAIN = Gating()
