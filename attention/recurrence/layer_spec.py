"""Specifications of recurrent calls, as the probe found them, with the shapes and dtypes of their states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention.recurrence.index import FoldRule, conv_ring_size

Shape = tuple[tuple[int, ...], torch.dtype]
"""Dimensions and dtype of a tensor of one slot."""


@dataclass(frozen=True)
class ConvSpec:
    """A short causal convolution by channel: channels C, taps k."""

    channels: int
    width: int
    kind = "short convolution"

    def shapes(self, rule: FoldRule, dtype: torch.dtype) -> dict[str, Shape]:
        """The tensors of one slot by name."""
        return {"ring": ((conv_ring_size(self.width, rule.num_drafts), self.channels), dtype)}


@dataclass(frozen=True)
class DeltaSpec:
    """The gated delta rule: heads of queries and keys Hk (each serves Hv/Hk heads of values), widths Dk and Dv.

    vector_gate: a gate for each of a head's Dk key channels (KDA), else one for each head.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    vector_gate: bool

    @property
    def kind(self) -> str:
        """Name of the recurrence, for people."""
        return "gated delta rule, a gate per channel" if self.vector_gate else "gated delta rule"

    def shapes(self, rule: FoldRule, dtype: torch.dtype) -> dict[str, Shape]:
        """The tensors of one slot by name."""
        size, heads = rule.ring_size, self.num_v_heads
        gate = (size, heads, self.k_dim) if self.vector_gate else (size, heads)
        return {
            "state": ((heads, self.v_dim, self.k_dim), torch.float32),
            "k": ((size, self.num_k_heads, self.k_dim), dtype),
            "v": ((size, heads, self.v_dim), dtype),
            "g": (gate, torch.float32),
            "beta": ((size, heads), torch.float32),
        }


@dataclass(frozen=True)
class SsdSpec:
    """Mamba2's scan: heads H of width P, groups G that share B and C, N states."""

    num_heads: int
    head_dim: int
    num_groups: int
    num_states: int
    kind = "Mamba2 scan"

    def shapes(self, rule: FoldRule, dtype: torch.dtype) -> dict[str, Shape]:
        """The tensors of one slot by name."""
        size = rule.ring_size
        return {
            "state": ((self.num_heads, self.head_dim, self.num_states), torch.float32),
            "x": ((size, self.num_heads, self.head_dim), dtype),
            "B": ((size, self.num_groups, self.num_states), dtype),
            "dt": ((size, self.num_heads), torch.float32),
        }


@dataclass(frozen=True)
class ScanSpec:
    """Mamba1's selective scan: channels C with N states each."""

    channels: int
    num_states: int
    kind = "Mamba1 scan"

    def shapes(self, rule: FoldRule, dtype: torch.dtype) -> dict[str, Shape]:
        """The tensors of one slot by name."""
        size = rule.ring_size
        return {
            "state": ((self.channels, self.num_states), torch.float32),
            "x": ((size, self.channels), dtype),
            "B": ((size, self.num_states), dtype),
            "dt": ((size, self.channels), torch.float32),
        }


RecurrenceSpec = ConvSpec | DeltaSpec | SsdSpec | ScanSpec


def moved_shape(spec: RecurrenceSpec) -> tuple[int, ...]:
    """Shape of the tensor that a row takes to another engine: its state, or a convolution's last inputs."""
    if isinstance(spec, ConvSpec):
        return spec.width - 1, spec.channels
    return spec.shapes(FoldRule.every_launch(0), torch.float32)["state"][0]


def fold_rule(specs: Sequence[RecurrenceSpec], num_drafts: int) -> FoldRule:
    """When a model with these calls stores its states.

    Storing is deferred if all states belong to a gated delta rule with one gate per head, whose kernel reads up to
    `MOST_INPUTS` tokens at the cost of one token; other kernels replay token by token.
    """
    chunked = [isinstance(spec, DeltaSpec) and not spec.vector_gate for spec in specs if not isinstance(spec, ConvSpec)]
    return FoldRule.deferred(num_drafts) if chunked and all(chunked) else FoldRule.every_launch(num_drafts)


def bytes_per_row(specs: Sequence[RecurrenceSpec], num_drafts: int, dtype: torch.dtype) -> int:
    """Bytes of one slot over all layers.

    Qwen3-Next-80B (36 layers of 16/32 heads of 128, a convolution of 8,192 channels), K=3, bfloat16:

    >>> layer = [ConvSpec(8192, 4), DeltaSpec(16, 32, 128, 128, False)]
    >>> round(36 * bytes_per_row(layer, 3, torch.bfloat16) / 2**20, 1)
    82.8
    """
    rule = fold_rule(specs, num_drafts)
    shapes = (shape for spec in specs for shape in spec.shapes(rule, dtype).values())
    return sum(math.prod(dims) * kind.itemsize for dims, kind in shapes)
