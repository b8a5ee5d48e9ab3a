"""BlockSpec: everything that decides the shape and the arithmetic of a block-parallel head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from attention.errors import InvalidInputError
from attention.spec import AttentionSpec
from drafters.base import Layers
from drafters.layer_spec import LayerSpec
from drafters.loops.block.markov import MARKOVS


@dataclass(frozen=True, kw_only=True)
class BlockSpec(LayerSpec):
    """One block-parallel head. All its layers are plain pre-norm layers.

    Attributes:
        block_size: Q. mask_token_id: in the slots after the bonus token.
        slots: "fill-in" where a slot predicts its own token, so that slot 0 gives none; "anchor-first" where it
            predicts the token after it.
        causal_layers: layers whose slots see no slot after their own; in all others a block sees all of itself.
        markov: the variant of the Markov head, None without one; markov_rank: r.
        confidence: input of the confidence head, which is read and not used; None without one.
        embedding_scale, logit_scale, logit_softcap: factors on embeddings and logits; logits become c·tanh(logits/c).
    """

    block_size: int
    mask_token_id: int
    slots: Literal["fill-in", "anchor-first"]
    causal_layers: Layers = ()
    markov: str | None = None
    markov_rank: int = 0
    confidence: Literal["outputs", "outputs and tokens"] | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        """Raises InvalidInputError for sizes or choices that contradict each other."""
        self.check_layers("a block-parallel")
        self.check_vocabulary()
        if not self.first_slot < self.block_size <= 256:
            raise InvalidInputError(
                f"block_size={self.block_size}: allowed are {self.first_slot + 1} … 256 slots ({self.slots})"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise InvalidInputError(
                f"mask_token_id={self.mask_token_id}: allowed are the embedding's rows, 0 … {self.vocab_size - 1}"
            )
        if self.markov not in (None, *MARKOVS) or bool(self.markov) != (self.markov_rank > 0):
            raise InvalidInputError(
                f"a Markov head {self.markov!r} of rank {self.markov_rank}: allowed are {', '.join(MARKOVS)} with a "
                "rank of 1 or more, and none of rank 0"
            )

    @property
    def first_slot(self) -> int:
        """The slot that gives draft 1."""
        return 1 if self.slots == "fill-in" else 0

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The requirements of each layer on a kernel."""
        specs = enumerate(super().attention_specs)
        return tuple(replace(spec, causal=layer in self.causal_layers) for layer, spec in specs)
