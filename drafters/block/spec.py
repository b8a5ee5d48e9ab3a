"""BlockSpec: everything that decides the shape and the arithmetic of a block-parallel head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from attention.errors import InvalidInputError
from attention.spec import AttentionSpec
from drafters.base import Layers
from drafters.layer_spec import LayerSpec
from drafters.loops.block.chains import MARKOVS


@dataclass(frozen=True, kw_only=True)
class BlockSpec(LayerSpec):
    """One block-parallel head. All its layers are plain pre-norm layers.

    Attributes:
        block_size: Q. mask_token_id: in the slots after the bonus token.
        slots: "fill-in" where a slot predicts its own token, so that slot 0 gives none; "anchor-first" where it
            predicts the token after it.
        causal_layers: layers whose slots see no slot after their own; in all others a block sees all of itself.
        markov: the variant of the Markov head, None without one; markov_rank: r.
        conv_kernel_size: slots that the convolutions around every sublayer read, the slot's own included; 0 without
            convolutions. conv_group_size: channels that share a correction.
        selector_rank: r of the selector, 0 without one; selector_top_k: ids of a slot that it selects from.
        confidence: input of the confidence head, see `BlockParallelHead.confidence_logits`; None without one.
        confidence_temperatures: of each slot, by which its confidence head's log odds are divided; () where all are 1.
        embedding_scale, logit_scale, logit_softcap: factors on embeddings and logits; logits become c·tanh(logits/c).
    """

    block_size: int
    mask_token_id: int
    slots: Literal["fill-in", "anchor-first"]
    causal_layers: Layers = ()
    markov: str | None = None
    markov_rank: int = 0
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    confidence: Literal["outputs", "outputs and tokens"] | None = None
    confidence_temperatures: tuple[float, ...] = ()
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
        self._check_refinements()

    def _check_refinements(self) -> None:
        reach, group, rank, top_k = self.conv_kernel_size, self.conv_group_size, self.selector_rank, self.selector_top_k
        if (reach or group) and not (1 <= reach <= self.block_size and group >= 1 and self.hidden_size % group == 0):
            raise InvalidInputError(
                f"convolutions over {reach} slots with groups of {group} channels: allowed are conv_kernel_size 1 … "
                f"{self.block_size} and a conv_group_size that divides the hidden size {self.hidden_size}"
            )
        if self.confidence == "outputs and tokens" and not self.markov:
            raise InvalidInputError(
                "a confidence head that reads tokens: it needs a Markov head, whose embeddings of tokens it reads; "
                "allowed without one is 'outputs'"
            )
        own = self.confidence_temperatures
        if own and not (
            self.confidence and len(own) == self.block_size and all(type(t) is float and t > 0 for t in own)
        ):
            raise InvalidInputError(
                f"confidence_temperatures={own}: allowed are {self.block_size} positive numbers (1.0, not 1), one a "
                "slot, of a confidence head; leave them out to take its scores as they are"
            )
        alone = not self.markov and self.draft_vocab_size == self.vocab_size
        if (rank or top_k) and not (1 <= rank <= self.vocab_size and 1 <= top_k <= self.vocab_size and alone):
            raise InvalidInputError(
                f"a selector of rank {rank} from {top_k} ids of a slot: allowed are 1 … {self.vocab_size} for both, "
                "in a head without a Markov head and without a reduced draft vocabulary"
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
