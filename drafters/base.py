"""What every draft head offers, and what a round of drafting gives back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from attention.spec import AttentionSpec

FINAL_NORM = -1
"""Tap id of the target's state after its final norm (what feeds lm_head). Other tap ids are boundaries b >= 0:
the residual stream after b decoder layers (0 = embeddings)."""


class Attend(Protocol):
    """Attention as a head sees it; whoever made the callable remembers K and V (paged cache, trainer, oracle)."""

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [T, Hq, Dk], key [T, Hkv, Dk] (both after RoPE), value [T, Hkv, Dv] -> [T, Hq, Dv].

        `layer` indexes the head's `attention_specs`; scale and window come from there.
        """


@runtime_checkable
class Head(Protocol):
    """A draft head: an nn.Module with its checkpoint's parameter names. Holds no cache and no state between calls."""

    attention_specs: tuple[AttentionSpec, ...]
    """One per attention layer of the head."""
    taps: tuple[int, ...]
    """The target states it wants, concatenated in this order: boundaries, or FINAL_NORM."""
    hidden_size: int
    draft_vocab_size: int

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        """[T, A·Ht] tapped target states -> [T, H] input of step 1 (EAGLE-3: norms and `fc`; MTP: identity)."""

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """One pass over T rows: token_ids [T] int64 (the token at position p+1), hidden [T, H], positions [T] (p).

        Returns the block output x [T, H], before the final norm.
        """

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] block outputs -> [R, Vd] draft logits."""

    def feedback(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] block outputs -> [R, H] hidden state of the next draft step (pre- or post-norm, as trained)."""

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft-vocabulary ids (any shape, int64) -> target-vocabulary ids."""
