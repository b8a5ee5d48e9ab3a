"""Unroll a head on its own outputs for several steps, as in drafting: EAGLE-3's training-time test.

Every row of a sequence is the last row of a prefix from which a chain of drafts starts. Step 0 runs all rows on the
target's true states. Step k runs all rows again, each one draft further: row p reads the token at p+1+k, has position
p+k, gets its own output of step k-1 as hidden state, and attends to the step-0 keys of rows 0 … p and to its own keys
of steps 1 … k. So the S chains of a sequence run in one batch without seeing each other.

    S = 4, row 1 at step 2 attends to: step 0 of rows 0 and 1 (positions 0, 1), step 1 of row 1 (position 2),
    step 2 of row 1 (position 3); its token is the one at 1+1+2 = 4, it predicts the one at 5.

Source: EAGLE-3, arXiv 2503.01840, section 3.2; SafeAILab/EAGLE eagle/traineagle3/cnets.py (attention with cached keys).
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from attention.errors import InvalidInputError
from attention.spec import AttentionSpec
from drafters.base import ChainHead
from drafters.loops.base import KeysAndValues


def shift_left(x: Tensor, by: int) -> Tensor:
    """x [B, S, ...] with row p taken from p + by; zeros (False) where that lies past the end."""
    shifted = torch.zeros_like(x)
    if by < x.shape[1]:
        shifted[:, : x.shape[1] - by] = x[:, by:]
    return shifted


class TttAttend:
    """Attention of the training-time test over B sequences of S rows; one object per batch.

    Remembers per layer the keys and values of all steps so far: each call is the next step of its layer.
    """

    def __init__(self, attention_specs: tuple[AttentionSpec, ...], batch_size: int, length: int) -> None:
        """Raises InvalidInputError for attention variants that no trained head has (window, softcap, sinks)."""
        if any(key.features for key in attention_specs):
            raise InvalidInputError("the training-time test has no windows, softcaps or sinks")
        self._attention_specs = attention_specs
        self._shape = (batch_size, length)
        self._past: dict[int, KeysAndValues] = defaultdict(list)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B·S, Hq, D], key and value [B·S, Hkv, D] of the layer's next step -> [B·S, Hq, D]."""
        plan = self._attention_specs[layer]
        past = self._past[layer]
        past.append((self._by_head(key), self._by_head(value)))
        grouped = self._by_head(query).unflatten(1, (plan.num_kv_heads, -1))  # [B, Hkv, G, S, D]
        out = _attend(grouped * plan.scale, past)
        return out.flatten(1, 2).transpose(1, 2).flatten(0, 1)

    def _by_head(self, x: Tensor) -> Tensor:
        """[B·S, heads, D] -> [B, heads, S, D]."""
        return x.unflatten(0, self._shape).transpose(1, 2)


def _attend(query: Tensor, past: KeysAndValues) -> Tensor:
    """Scaled query [B, Hkv, G, S, D]; past: (key, value) [B, Hkv, S, D] of steps 0 … k -> [B, Hkv, G, S, D]."""
    length = query.shape[-2]
    key, value = (x[:, :, None] for x in past[0])  # [B, Hkv, 1, S, D]
    future = query.new_ones(length, length, dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(-1, -2)).masked_fill(future, float("-inf"))  # [B, Hkv, G, S, S]
    own = [(query * k[:, :, None]).sum(-1, keepdim=True) for k, _ in past[1:]]  # each [B, Hkv, G, S, 1]
    weights = torch.cat((scores, *(s.to(scores.dtype) for s in own)), dim=-1).softmax(-1, dtype=torch.float32)
    weights = weights.to(value.dtype)
    out = weights[..., :length] @ value
    for step, (_, v) in enumerate(past[1:]):
        out = out + weights[..., length + step, None] * v[:, :, None]
    return out


def unroll(head: ChainHead, token_ids: Tensor, aux_hidden_states: Tensor, steps: int) -> list[Tensor]:
    """Run `steps` steps of the training-time test.

    Args:
        token_ids: [B, S] int64, right-padded sequences.
        aux_hidden_states: [B, S, A·Ht] true target states of the same positions.

    Returns:
        Block outputs of each step, [B·S, H]. Rows whose token lies past the end are meaningless.
    """
    batch_size, length = token_ids.shape
    attend = TttAttend(head.attention_specs, batch_size, length)
    positions = torch.arange(length, device=token_ids.device).repeat(batch_size)  # [B·S]
    hidden = head.fuse(aux_hidden_states.flatten(0, 1))
    outputs = []
    for step in range(steps):
        tokens = shift_left(token_ids, step + 1).flatten()
        outputs.append(head.forward(tokens, hidden, positions + step, attend))
        hidden = head.feedback(outputs[-1])
    return outputs


_MARGIN = 0.1
_SIGMAS = 4.0
"""A gain is clear from this much on, and from this many standard errors on."""


class Gain(NamedTuple):
    """By how much one way of running a head is better than another on the same places: mean and standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, differences: Tensor) -> Gain:
        """differences: [n], of each place; the error of fewer than two is infinite."""
        count = len(differences)
        error = float(differences.double().std()) / count**0.5 if count > 1 else float("inf")
        return cls(float(differences.double().mean()) if count else 0.0, error)

    @property
    def is_clear(self) -> bool:
        """Whether it is better beyond doubt."""
        return self.mean >= max(_MARGIN, _SIGMAS * self.error)
