"""EAGLE heads by hand: one token after the other in numpy, float64, with a cache that is a list. No code of `drafters`.

What a head is, a test tells it in plain arguments; nothing is read from a configuration. So a configuration that is
read wrongly shows, and so does every step of a round that goes wrong: the prefill over accepted tokens, feedback,
positions, what is thrown away after a verification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Array = np.ndarray
Angles = Callable[[int], Array]
"""Position -> [D/2] angles."""


def plain_angles(dim: int, theta: float = 10000.0) -> Angles:
    """Rotary embedding without scaling."""
    return lambda position: position * theta ** -(np.arange(0, dim, 2) / dim)


def dynamic_angles(dim: int, theta: float, factor: float, longest: int, first: int = 0) -> Angles:
    """NTK scaling by the length of the text so far; `first`: what the head's own code calls position 0."""

    def angles(position: int) -> Array:
        own = position + first
        length = max(own + 1, longest)
        base = theta * (factor * length / longest - (factor - 1)) ** (dim / (dim - 2))
        return own * base ** -(np.arange(0, dim, 2) / dim)

    return angles


def linear_angles(dim: int, theta: float, factor: float) -> Angles:
    """Positions divided by a factor."""
    return lambda position: position / factor * theta ** -(np.arange(0, dim, 2) / dim)


def yarn_angles(dim: int, theta: float, factor: float, original: int) -> Angles:
    """YaRN with its default beta_fast 32, beta_slow 1 (arXiv 2309.00071); its factor on cos and sin: `yarn_scale`."""
    plain = theta ** -(np.arange(0, dim, 2) / dim)

    def turning(rotations: float) -> float:
        return dim * np.log(original / (rotations * 2 * np.pi)) / (2 * np.log(theta))

    low, high = max(np.floor(turning(32)), 0), min(np.ceil(turning(1)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return lambda position: position * (plain / factor * ramp + plain * (1 - ramp))


def llama3_angles(dim: int, theta: float, factor: float, low: float, high: float, original: int) -> Angles:
    """Llama 3.1's: long waves are stretched, short ones are not, those between in proportion."""
    plain = theta ** -(np.arange(0, dim, 2) / dim)
    waves = original * plain / (2 * np.pi)  # in the original length
    share = np.clip((waves - low) / (high - low), 0, 1)
    return lambda position: position * (share * plain + (1 - share) * plain / factor)


def yarn_scale(factor: float) -> float:
    """YaRN's factor on cos and sin."""
    return float(0.1 * np.log(factor) + 1)


@dataclass
class ByHand:
    """One head.

    Attributes:
        weights: by their names in the file, without wrappers' prefixes.
        first: prefix of the first layer. layers: how many.
        embedding: [V, H]; output: [Vd, H], what turns states into logits. ids: [Vd] target ids of draft ids.
        taps: boundaries whose states are concatenated, or "final" for the state after the target's final norm.
        generation: 3 for EAGLE-3, 1 for EAGLE-1 and 2.
        fusion: norms before `fc`.
        normed_residual, feed_normed: the residual of the first layer, and what is fed back.
        windows: by layer, positions that a query sees.
        scale: factor on cos and sin.
    """

    weights: dict[str, Array]
    heads: int
    kv_heads: int
    dim: int
    eps: float
    angles: Angles
    embedding: Array
    output: Array
    taps: tuple[int, ...] | Literal["final"]
    first: str = "midlayer."
    layers: int = 1
    ids: Array | None = None
    generation: Literal[1, 3] = 3
    fusion: Literal["none", "whole", "each", "both"] = "none"
    normed_residual: bool = False
    feed_normed: bool = False
    windows: dict[int, int] = field(default_factory=dict)
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.cache: list[list[tuple[Array, Array]]] = [[] for _ in range(self.layers)]

    def draft(self, tokens: Sequence[int], states: Array, count: int) -> tuple[list[int], list[Array]]:
        """Read what was committed since the last call, draft, and forget what drafting wrote.

        Args:
            tokens: the tokens at the positions after those of `states`. states: [n, A·Ht] of the n new positions.

        Returns:
            Drafts as the target's ids, and the logits [Vd] that each was chosen from.
        """
        for token, state in zip(tokens, states, strict=True):
            x = self._read(token, self._fuse(state))
        committed = len(self.cache[0])
        drafts: list[int] = []
        logits: list[Array] = []
        for step in range(count):
            logits.append(self._logits(x))
            chosen = int(logits[-1].argmax())
            drafts.append(chosen if self.ids is None else int(self.ids[chosen]))
            if step + 1 < count:
                x = self._read(drafts[-1], self._norm("norm", x) if self.feed_normed else x)
        for layer in self.cache:
            del layer[committed:]
        return drafts, logits

    def _norm(self, name: str, x: Array) -> Array:
        return x / np.sqrt((x * x).mean() + self.eps) * self.weights[name + ".weight"]

    def _linear(self, name: str, x: Array) -> Array:
        return self.weights[name + ".weight"] @ x + self.weights.get(name + ".bias", 0.0)

    def _fuse(self, state: Array) -> Array:
        if self.taps == "final":
            return state
        if self.fusion in ("whole", "both"):
            state = self._norm("input_norm", state)
        if self.fusion in ("each", "both"):
            old = "aux_norm_low.weight" in self.weights
            names = [f"aux_norm_{name}" if old else f"fc_norm.{i}" for i, name in enumerate(("low", "mid", "high"))]
            chunks = np.split(state, len(self.taps))
            state = np.concatenate([self._norm(name, chunk) for name, chunk in zip(names, chunks, strict=True)])
        return self._linear("fc", state)

    def _read(self, token: int, hidden: Array) -> Array:
        """One token with the hidden state of the position before it."""
        embedded = self.embedding[token]
        if self.generation == 1:
            x = self._linear("fc", np.concatenate([embedded, hidden]))
            return self._plain_layers(x, range(self.layers))
        normed = self._norm(self.first + "hidden_norm", hidden)
        y = np.concatenate([self._norm(self.first + "input_layernorm", embedded), normed])
        x = (normed if self.normed_residual else hidden) + self._attend(self.first, 0, y)
        x = x + self._mlp(self.first, self._norm(self.first + "post_attention_layernorm", x))
        return self._plain_layers(x, range(1, self.layers))

    def _plain_layers(self, x: Array, layers: range) -> Array:
        for layer in layers:
            prefix = f"layers.{layer}."
            has_norm = prefix + "input_layernorm.weight" in self.weights
            x = x + self._attend(prefix, layer, self._norm(prefix + "input_layernorm", x) if has_norm else x)
            x = x + self._mlp(prefix, self._norm(prefix + "post_attention_layernorm", x))
        return x

    def _attend(self, prefix: str, layer: int, y: Array) -> Array:
        position = len(self.cache[layer])
        query = self._rotated(prefix + "self_attn.q", y, self.heads, position)
        key = self._rotated(prefix + "self_attn.k", y, self.kv_heads, position)
        value = self._linear(prefix + "self_attn.v_proj", y).reshape(self.kv_heads, self.dim)
        self.cache[layer].append((key, value))
        seen = self.cache[layer][max(0, position + 1 - self.windows.get(layer, position + 1)) :]
        out = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            scores = np.array([query[head] @ key[group] for key, _ in seen]) / np.sqrt(self.dim)
            shares = np.exp(scores - scores.max())
            shares /= shares.sum()
            out.append(sum(share * value[group] for share, (_, value) in zip(shares, seen, strict=True)))
        return self._linear(prefix + "self_attn.o_proj", np.concatenate(out))

    def _rotated(self, name: str, y: Array, count: int, position: int) -> Array:
        x = self._linear(name + "_proj", y).reshape(count, self.dim)
        if name + "_norm.weight" in self.weights:
            x = np.stack([self._norm(name + "_norm", head) for head in x])
        angles = self.angles(position)
        cos, sin = np.cos(angles) * self.scale, np.sin(angles) * self.scale
        first, second = x[:, : self.dim // 2], x[:, self.dim // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)

    def _mlp(self, prefix: str, x: Array) -> Array:
        gate = self._linear(prefix + "mlp.gate_proj", x)
        inner = gate / (1 + np.exp(-gate)) * self._linear(prefix + "mlp.up_proj", x)
        return self._linear(prefix + "mlp.down_proj", inner)

    def _logits(self, x: Array) -> Array:
        return self.output @ (x if self.generation == 1 else self._norm("norm", x))
