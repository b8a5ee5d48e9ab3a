"""Rotary position embedding of draft heads: half-rotation, float32, parameters from the head's own configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafters.errors import HeadLoadError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
Scaling = tuple[tuple[str, float | bool], ...]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one head; kind: one of `ROPE_KINDS`; theta: base period.

    Attributes:
        max_positions: the head's `max_position_embeddings`; only scaled kinds read it, it is no limit on positions.
        scaling: the kind's further keys under their configuration names, e.g. (("factor", 8.0), ...).
        first_position: the position that the head's own code rotates position 0 with: 0, or 1 for heads of speculators.
            Only "dynamic" reads it: with all other kinds attention depends only on differences of positions.
    """

    theta: float = 10000.0
    kind: str = "default"
    max_positions: int = 2048
    scaling: Scaling = ()
    first_position: int = 0

    def __str__(self) -> str:
        scaling = "".join(f", {name} {value}" for name, value in self.scaling)
        return f"{self.kind}, theta {self.theta:g}{scaling}"

    def frequencies(self, head_dim: int) -> tuple[Tensor, float]:
        """Inverse frequencies [D/2] float32 on CPU and the factor on cos and sin; for "dynamic" those for short texts.

        Raises:
            HeadLoadError: unknown kind, keys of its scaling are missing, or heads too narrow for "dynamic".
        Source: transformers, modeling_rope_utils (called, so that heads and targets cannot drift apart).
        """
        if self.kind not in ROPE_KINDS:
            raise HeadLoadError(f"RoPE type {self.kind!r} of this head is not among {', '.join(ROPE_KINDS)}")
        if self.kind == "dynamic" and head_dim <= 2:
            raise HeadLoadError(f"RoPE type 'dynamic' needs heads wider than 2, this head has {head_dim}")
        with torch.device("cpu"):
            if self.kind == "default":
                return self.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim), 1.0
            return self._scaled_frequencies(head_dim)

    def _scaled_frequencies(self, head_dim: int) -> tuple[Tensor, float]:
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        parameters = {"rope_type": self.kind, "rope_theta": self.theta, **dict(self.scaling)}
        try:
            config = LlamaConfig(
                head_dim=head_dim, max_position_embeddings=self.max_positions, rope_parameters=parameters
            )
            frequencies, factor = ROPE_INIT_FUNCTIONS[self.kind](config, torch.device("cpu"))
        except KeyError as error:
            raise HeadLoadError(f"RoPE parameters {parameters} of the head are incomplete: {error}") from error
        return frequencies, float(factor)


class Rotary(nn.Module):
    """cos and sin of positions, in float32.

    With "dynamic" the base grows with the length of the text once that exceeds `max_positions`. A token is rotated with
    the base of the text that ends with it, so that a key does not depend on the pieces in which the text was read; a
    head that reads token by token does so anyway. (transformers rotates all tokens read at once with the base of the
    last of them.)

    Source: transformers, modeling_rope_utils (_compute_dynamic_ntk_parameters); SafeAILab/EAGLE, eagle/model/cnets.py
    (LlamaDynamicNTKScalingRotaryEmbedding).
    """

    frequencies: Tensor

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        super().__init__()
        frequencies, self.factor = spec.frequencies(head_dim)
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)
        self.spec = spec
        self.head_dim = head_dim

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """Follow the module's device but stay float32: half-precision frequencies would move far positions."""
        frequencies = self.frequencies
        super()._apply(fn, recurse)
        self.frequencies = frequencies.to(self.frequencies.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, 1, D/2] float32 (the middle axis runs over heads)."""
        if self.spec.kind == "dynamic":
            positions = positions + self.spec.first_position  # as the head's own code counts them
            longest = self.spec.max_positions
            factor = float(dict(self.spec.scaling)["factor"])
            lengths = (positions + 1).clamp_min(longest).float()
            growth = factor * lengths / longest - (factor - 1)  # of the base, to the power D / (D - 2); 1 up to longest
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=positions.device)
            angles = positions[:, None] * self.frequencies * growth[:, None] ** (-exponents / (self.head_dim - 2))
        else:
            angles = positions[:, None] * self.frequencies
        angles = angles[:, None]
        cos = angles.cos()
        sin = angles.sin()
        return (cos, sin) if self.factor == 1.0 else (cos * self.factor, sin * self.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D] by cos, sin [T, 1, D/2]: dimension i is paired with i + D/2. Computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
