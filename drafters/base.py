"""The interface of a draft head (`Head`), and protocols for features that only some heads have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from attention.spec import AttentionSpec
    from drafters.loops.base import Attend, BlockChain, DraftLoop, KeysAndValues, LoopSize

FINAL_NORM = -1
"""Aux layer of the target's state after its final norm (the input of lm_head). Other aux layers are numbers b >= 0: the
residual stream after b decoder layers (0 = embeddings)."""
Layers = tuple[int, ...]
"""Numbers of layers, ascending."""


@dataclass(frozen=True)
class TargetFacts:
    """Facts about the target that a head of any family needs.

    Attributes:
        hidden_size, vocab_size, num_layers: Ht, V (width of the logits) and N.
        embedding: [at least V, Ht] input embedding weight, on the target's device.
        lm_head: [at least V, Ht] output weight (the same tensor when tied).
        model_type: the `model_type` of its text configuration; "" if unknown.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    embedding: Tensor
    lm_head: Tensor
    model_type: str = ""


LazyFacts = Callable[[], TargetFacts]


@runtime_checkable
class Head(Protocol):
    """A draft head: an nn.Module with its checkpoint's parameter names. Holds no cache and no state between calls."""

    attention_specs: tuple[AttentionSpec, ...]
    """One per attention layer of the head."""
    aux_layers: Layers
    """The target states that it reads, concatenated in this order: aux layers, or FINAL_NORM."""
    hidden_size: int
    draft_vocab_size: int

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """[T, A·Ht] aux hidden states -> [T, H], what it reads of them (EAGLE-3: norms and `fc`; MTP: identity)."""

    def logits(self, x: Tensor) -> Tensor:
        """[R, H] outputs -> [R, Vd] draft logits."""

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids (any shape, int64) -> target-vocabulary ids."""

    def draft_loop(self, limits: LoopSize) -> DraftLoop[Any, Any]:
        """The loop that drafts with this head, for one engine with at most these sizes.

        `drafters.loops.chain.ChainLoop(self)` suits every head that is fed its own output. Rounds run from CUDA
        graphs only with a loop that has a fixed-shape form (`drafters.loops.base.GraphLoop`).
        """


@runtime_checkable
class ChainHead(Head, Protocol):
    """A head that reads its own output: every draft takes a pass."""

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass over T rows: token_ids [T] int64 (the token at position p+1), hidden [T, H], positions [T] (p).

        Returns the block output x [T, H], before the final norm.
        """

    def feedback(self, x: Tensor) -> Tensor:
        """[R, H] block outputs -> [R, H] hidden state of the next draft step (pre- or post-norm, as trained)."""


@runtime_checkable
class BlockHead(Head, Protocol):
    """A head that drafts a whole block in one pass over Q slots, the first of which holds the bonus token.

    Of the positions before the block it keeps keys and values alone, made from the target's states.

    Attributes:
        block_size: Q, the slots that it was trained with; every pass has so many.
        first_slot: the slot that gives draft 1: 0 where a slot predicts the token after it (*anchor-first*), 1 where it
            predicts its own (*fill-in*). So there are Q - first_slot drafts at most.
        mask_token_id: in the slots after the bonus token.
    """

    block_size: int
    first_slot: int
    mask_token_id: int

    @property
    def chain(self) -> BlockChain:
        """How drafts depend on the drafts before them."""

    def context(self, hidden: Tensor, positions: Tensor) -> KeysAndValues:
        """Keys and values [T, Hkv, D] of each layer at positions [T]; hidden: [T, H], `fuse`d states of the target."""

    def block(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass over whole blocks: token_ids, positions [R·Q] -> outputs [R·Q, H], which `logits` reads."""


@runtime_checkable
class RatesDrafts(BlockHead, Protocol):
    """A block head that can predict whether its drafts are accepted.

    Attributes:
        has_confidence: whether its checkpoint has the weights for that.
    """

    has_confidence: bool

    def confidence_logits(self, x: Tensor, previous: Tensor) -> Tensor:
        """Log odds [..., n] float32 of every draft's acceptance once those before it are accepted.

        Those of draft k depend on the drafts before k alone, so they may decide whether k is verified.

        Args:
            x: [..., n, H] outputs of the drafts' slots. previous: [..., n] int64 target ids of the tokens before each
                draft: the bonus token, then drafts.
        """

    def draft_loop(self, limits: LoopSize, min_confidence: float | None = None) -> DraftLoop[Any, Any]:
        """See `Head.draft_loop`; `Draft.kept` ends before the first draft of less confidence."""


@runtime_checkable
class DraftsOnSome(Protocol):
    """A head that reads the target's lm_head, and can draft on a subset of its tokens."""

    @property
    def draft_rows(self) -> Tensor | None:
        """[Vd, H] copies of these rows, in lm_head's dtype; None while it drafts on all."""

    def draft_on(self, target_ids: Tensor) -> None:
        """From now on draft on these tokens of the target, by a copy of their rows of its lm_head.

        target_ids: [Vd] int64, ascending. They are no part of the head's checkpoint.

        Raises:
            InvalidInputError: they are not strictly ascending, none, or outside the target's vocabulary.
        """

    def renew_draft_rows(self, lm_head: Tensor) -> None:
        """Copy these rows again, into the same memory: the target's lm_head has other values, or is another tensor."""


@runtime_checkable
class PicksDrafts(Protocol):
    """A head that knows how many drafts pay, where a user names no K."""

    def paying_drafts(self, model: PreTrainedModel) -> tuple[int, float]:
        """K for this target, and how many times the tokens a second without drafts it is expected to give."""


@runtime_checkable
class HasInputConvention(Protocol):
    """A head whose checkpoint does not record its input convention, but which can infer it from a text."""

    def check_convention(self, token_ids: Tensor, states: Tensor, num_drafts: int) -> None:
        """Refuse a head that plainly runs with the wrong convention.

        Args:
            token_ids: [T] int64, a text; states: [T, H] the target's states on it after its final norm.
            num_drafts: K, at least 1.

        Raises:
            HeadLoadError: another convention predicts the target's tokens far better; the message names the option.
        """


@dataclass(frozen=True)
class OtherReading:
    """A head's tensors under another reading of its files, which differs in one choice.

    Attributes:
        name: the difference, for messages. field: the name of the differing field in the head's report.
        cause: why the files were probably read otherwise.
        overrides: the `head_overrides` that choose this reading; with `in_config` keys of config.json.
    """

    name: str
    field: str
    cause: str
    overrides: Mapping[str, Any]
    head: Head
    in_config: bool = False


TrainedHead = TypeVar("TrainedHead", bound=Any)
"""A draft head that is an nn.Module, of whatever family."""
Save = Callable[[TrainedHead, Path], Path]
"""Writes a head into a folder, in its loader's layout; returns the folder."""


@dataclass(frozen=True)
class Recipe(Generic[TrainedHead]):
    """How a head of one family is trained for one target.

    Attributes:
        aux_layers: the target's states that it learns from, or FINAL_NORM alone.
        settings: the choices made for the head, by name.
        start: the head to train; it is given a function V -> [V] int64, how often the target wrote each token.
        finished: a trained head as an engine loads it. save: writes one.
        initial: the trained head to continue from, or None.
        objective: a `drafters.training.objective.Objective`; None for the training-time test.
    """

    aux_layers: Layers
    settings: Mapping[str, Any]
    start: Callable[[Callable[[int], Tensor]], TrainedHead]
    finished: Callable[[TrainedHead], Head]
    save: Save[TrainedHead]
    initial: TrainedHead | None = None
    objective: Callable[..., Any] | None = None
