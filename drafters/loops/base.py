"""DraftLoop: the protocol of all draft loops, with their inputs and results.

A draft loop makes the drafts of a round after a verification, in two parts: the draft prefill, in which the head reads
accepted tokens again with the target's true aux hidden states, and draft steps, in which it reads its own drafts. A
head provides its loop (`drafters.base.Head.draft_loop`); an executor sends the loop's arrays and runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata
from attention.runner import GroupRunner, PlannedBatch
from attention.staging import A, Arrays, Field, Sizes, Staged, array

Choose = Callable[[int, Tensor], tuple[Tensor, Tensor | None]]
"""Chooses draft tokens: (step j from 0, draft logits [R, Vd]) -> (draft ids [R] int64 on the draft vocabulary,
probabilities q [R, Vd], or None for a one-hot q)."""

KeysAndValues = list[tuple[Tensor, Tensor]]
"""Keys and values, of each layer or of each step."""
Stepped = tuple[Tensor, Tensor | None]
"""Logits or embeddings after a step of a block's chain, and the chain's next state."""
Passes = tuple[CommonAttentionMetadata, ...]
"""The metadata of several passes."""
Greedy = Callable[[Tensor, Tensor | None, Tensor], Tensor]
"""Arg max: (draft logits [R, Vd], target ids [Vd] int64 of all draft ids or None where they are the same, out [R] int64
of any stride, which gets the target ids) -> draft ids [R] int64."""

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function of tensors -> the same, compiled for any number of rows."""


class Attend(Protocol):
    """Attention as a head sees it; the callable's creator (paged cache, trainer, oracle) keeps K and V."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, Hq, Dk], key [T, Hkv, Dk] (both after RoPE), value [T, Hkv, Dv] -> [T, Hq, Dv].

        `layer` indexes the head's `attention_specs`; scale and window come from there.
        """


class BlockChain(Protocol):
    """How the draft of a block's slot depends on the drafts before it; `drafters.loops.block.chains` has them all."""

    def step(self, logits: Tensor, previous: Tensor, hidden: Tensor, state: Tensor | None) -> Stepped:
        """logits [R, Vd] and outputs hidden [R, H] of a slot, target ids previous [R] -> logits to choose from, state.

        previous: the drafts before, or the bonus token. state: None before the block's first draft.
        """


@dataclass(frozen=True)
class Draft:
    """The drafts of one round, on the device.

    Attributes:
        token_ids: [R, n] int64 target-vocabulary ids, n = number of steps made.
        probs: [R, n, Vd] draft distributions; None when every draft is greedy (one-hot q), or q is kept elsewhere.
        replaced: [R, n] bool, drafts that replaced the sampled ones that `probs` describes: their q is one-hot.
        kept: [R] int64, leading drafts of each row that are to be verified; None where all are.
    """

    token_ids: Tensor
    probs: Tensor | None
    replaced: Tensor | None = None
    kept: Tensor | None = None

    @classmethod
    def of(cls, token_ids: Sequence[Tensor], probs: Sequence[Tensor | None]) -> Draft:
        """Join the steps' ids [R] and probabilities [R, Vd]."""
        sampled = [p for p in probs if p is not None]
        return cls(torch.stack(list(token_ids), 1), torch.stack(sampled, 1) if sampled else None)


def from_layer(attend: Attend, first_layer: int) -> Attend:
    """The attention of a head whose layer 0 is layer `first_layer` of its cache group."""
    return lambda layer, query, key, value: attend(first_layer + layer, query, key, value)


@dataclass(frozen=True)
class PassesAttend:
    """Attention of a draft prefill in several passes: pass m has layer m of the group. One pass has all layers.

    An `Attend`, and `WritesCache`.
    """

    runner: GroupRunner
    planned: Sequence[PlannedBatch]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.runner.attend(self.planned[layer % len(self.planned)], layer, query, key, value)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if self.planned[0].plans is not None:  # a blank batch leaves the cache unchanged
            self.runner.write(layer, key, value, self.planned[0].metadata.slot_mapping)


@dataclass(frozen=True)
class DraftingRows:
    """The R rows that draft, as the draft steps need them.

    Attributes:
        committed_lens: [R] seq', positions that hold true states. num_drafts: [R] n_i.
        block_table: [R, P] of the head's pages.
    """

    committed_lens: ndarray
    num_drafts: ndarray
    block_table: ndarray
    page_size: int


@dataclass(frozen=True)
class DraftInput:
    """Inputs of a draft loop: the last verification after its commit, and which of its rows the head reads.

    Attributes:
        query_start_loc: [B+1] int of the verification; num_drafts, num_accepted: [B].
        order: [B'] rows of it that the head reads: the R drafting rows first, then unfinished prompts.
        request_rows: [B'] int64, their rows in `tokens`, fixed while a request runs.
        committed_lens: [B'] the target's KV lengths after the commit (seq').
        tokens: [N, L] int32 committed tokens by position; the bonus token is at seq'.
        num_drafts_next: [R] n_i, drafts to make for the drafting rows, at least 1.
        block_table: [B', P] int32 of the head's pages.
        begins: [B'] the first position that the head writes in each row's pages; None if 0 everywhere.
    """

    query_start_loc: ndarray
    num_drafts: ndarray
    num_accepted: ndarray
    order: ndarray
    request_rows: ndarray
    committed_lens: ndarray
    tokens: ndarray
    num_drafts_next: ndarray
    block_table: ndarray
    page_size: int
    begins: ndarray | None = None

    @property
    def drafting(self) -> DraftingRows:
        """The first R rows."""
        count = len(self.num_drafts_next)
        return DraftingRows(self.committed_lens[:count], self.num_drafts_next, self.block_table[:count], self.page_size)


@dataclass(frozen=True)
class LoopSize:
    """Sizes of the arrays of a draft loop, or of a verification: of one round, or the largest possible.

    Attributes:
        rows: B', of the draft prefill or the verification. tokens: T', of the same. pages: P, of a row.
        drafts: n, the most of a row.
    """

    rows: int = 0
    tokens: int = 0
    pages: int = 0
    drafts: int = 0

    @property
    def steps(self) -> int:
        """Steps after the draft prefill."""
        return max(self.drafts - 1, 0)


@runtime_checkable
class SharesPages(Protocol):
    """A loop whose cached pages another request with the same first tokens can use: it keeps no other state of them.

    num_following: how many tokens after a position the cache entry there depends on, at least 1.
    """

    num_following: int


@runtime_checkable
class CarriesVectors(Protocol):
    """A loop that keeps vectors of each request between rounds; they move with the request to another engine."""

    @property
    def carried_shape(self) -> tuple[int, ...]:
        """(n, H)."""

    def carried_by(self, request_row: int) -> Tensor:
        """[n, H], a view of the vectors of the request in this row of the row table."""

    def carry(self, request_row: int, vectors: Tensor) -> None:
        """Store vectors [n, H] for the request in this row."""


@runtime_checkable
class ReadsBonus(Protocol):
    """A loop whose draft prefill reads one token more of each row than the verification: the bonus token, in its place.

    It reads the token at p at position p, where the other loops read the target's state at p with the token at p+1.
    """

    reads_bonus: bool
    """True."""


@dataclass(frozen=True)
class PrefillPasses:
    """The passes of a draft prefill that is launched before its verification is read.

    Attributes:
        count: M; 0 where nothing drafts. bonus: tokens of each row beyond the verification's: 1 of a loop that
            `ReadsBonus`, else 0.
    """

    count: int = 0
    bonus: int = 0

    @classmethod
    def of(cls, loop: AnyLoop | None) -> PrefillPasses:
        """Those of a loop; none without one."""
        return cls() if loop is None else cls(loop.num_modules, int(isinstance(loop, ReadsBonus)))


class LoopArrays(Protocol):
    """Host arrays of a draft loop, opaque to all but the loop that made them."""

    @property
    def size(self) -> LoopSize:
        """Their sizes, which decide the bucket."""


L = TypeVar("L", bound=LoopArrays)
D = TypeVar("D")
Sent = TypeVar("Sent", contravariant=True)
Arrived = TypeVar("Arrived", covariant=True)


class LoopSection(Protocol[Sent, Arrived]):
    """Places a draft loop's arrays in the round's staging arena."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """Fields of the arena."""

    def sizes(self, size: LoopSize) -> Sizes:
        """Sizes of the symbolic dimensions of `fields` for arrays of at most this size."""

    def values(self, arrays: Sent) -> Arrays:
        """The arrays to send, by the names of `fields`."""

    def of(self, arrays: Sent, staged: Staged) -> Arrived:
        """The arrays on the device."""


@runtime_checkable
class DraftLoop(Protocol[L, D]):
    """A draft loop of one engine; L: its host arrays, D: the same on the device.

    An executor calls `arrays`, sends them by `section` in a shared transfer, and calls `run` after launching the
    target's forward.
    """

    name: str
    """Its name in messages, a plural."""
    num_modules: int
    """M modules that take turns, 1 for a loop of one head. A request with fewer than M committed states gets at most as
    many drafts as it has states (`drafters.loops.prefill`)."""

    @property
    def section(self) -> LoopSection[L, D]:
        """Places the arrays in the round's staging arena."""

    def arrays(self, draft: DraftInput) -> L:
        """All numpy arrays of a round."""

    def run(self, inputs: D, runner: GroupRunner, aux: Tensor, choose: Choose) -> Draft:
        """Launch the loop.

        Args:
            runner: attention of the head's cache group. aux: [T, A·Ht] aux hidden states of the verification's tokens.
        """


AnyLoop = DraftLoop[Any, Any]


@dataclass(frozen=True)
class FixedShape:
    """Rounds of one fixed shape: `rows` rows of query_len = K+1 tokens each, over pages of page_size tokens.

    page_entries: most entries that the rows' page lists have together, the padding's included.
    """

    rows: int
    query_len: int
    page_size: int
    page_entries: int


@dataclass(frozen=True)
class CarriedRows(Generic[A]):
    """Indices by which a draft prefill of M > 1 modules reads the vectors carried over from the previous round.

    request_rows: [rows] int64, see `DraftInput`, -1 for a padding row; sources: [T] int64, for each token row the index
    of the row before it in [rows carried vectors, T outputs of the previous module].
    """

    request_rows: A = array(np.int64, "requests")
    sources: A = array(np.int64, "tokens")


@dataclass(frozen=True)
class FixedPrefill:
    """Device inputs of the draft prefill of fixed shape right after a verification.

    token_ids: [T] int64, the verification's tokens shifted by one: at position p the token of p+1; of a loop that
    `ReadsBonus` one more in front of each row, the token at its first position. last_row: [rows] int64, the token row
    that draft 1 comes from: of each row's last accepted token, or of its bonus token. carried: None for a loop of one
    head.
    """

    token_ids: Tensor
    last_row: Tensor
    carried: CarriedRows[Tensor] | None = None


@dataclass(frozen=True)
class Chosen:
    """Greedy draft choices of a pass of fixed shape with their logits, at the same addresses in every replay.

    ids: [R·slots] int64 on the draft vocabulary; logits: [R·slots, Vd]. slots: drafts of a row that are chosen at once.
    """

    ids: Tensor
    logits: Tensor
    slots: int = 1


Draw = Callable[[int, Chosen], None]
"""Draws what sampled rows draft, in place of the greedy choices of draft j+1: (j from 0, choices). Or nothing.
Choices of several slots are those of all drafts, and j is 0."""


@runtime_checkable
class WritesCache(Protocol):
    """Attention of a draft prefill that also writes keys and values of tokens that are not attended."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """key [T, Hkv, D], value [T, Hkv, D] of the first pass's tokens."""


class FixedSteps(Protocol):
    """Host arrays of all draft steps for a fixed number of rows, written into the buffers that CUDA graphs read."""

    def send(self, rows: DraftingRows) -> tuple[Sequence[HostBatch], Staged]:
        """Write and send the arrays of all steps for at most that many rows; returns each step's batch."""

    def views(self, batches: Sequence[HostBatch], staged: Staged) -> Passes:
        """Attention metadata of each step, at fixed addresses."""


class FixedLoop(Protocol):
    """The fixed-shape form of a draft loop for CUDA graphs: passes of fixed shape over persistent buffers.

    Drafts are chosen greedily; for sampled rows the executor draws drafts from the logits in `Chosen`.

    Attributes:
        drafts: [R, K] int64 target-vocabulary ids, by row of the last verification; R at least the most rows possible.
        prefill_attends: whether the draft prefill attends; otherwise its one pass writes keys and values alone, and
            needs no plan.
    """

    drafts: Tensor
    prefill_attends: bool

    def num_steps(self, drafts: int) -> int:
        """Steps after the draft prefill for at most `drafts` drafts a row, at least 1."""

    def steps(self, shape: FixedShape) -> FixedSteps:
        """The host arrays of the draft steps for this shape."""

    def prefill(
        self, inputs: FixedPrefill, positions: Sequence[Tensor], attend: Attend, compiled: bool = True
    ) -> Chosen | None:
        """Run the draft prefill over a verification's token rows; writes draft 1 and the inputs of the steps.

        None: the steps make draft 1, too.

        Args:
            positions: [T] int64 for each of the loop's M passes, of the tokens that the pass reads or, for states of
                the target, of these states; pass m has positions m smaller than pass 0.
            attend: attention over the head's paged cache, by the layers of its group; see `PassesAttend`.
        """

    def step_width(self, index: int) -> int:
        """Tokens a row in step `index` (from 0)."""

    def step(self, index: int, rows: int, planned: PlannedBatch, before: Tensor | None, draw: Draw) -> Tensor:
        """Run step `index` (from 0) for the first `rows` >= 2 rows: reads draft index+1, writes draft index+2.

        Args:
            before: the result of the previous step, always at the same address; None for step 0.
            draw: called with the choices of each draft that the step makes.

        Returns:
            The step's outputs, which the next one reads.
        """


@runtime_checkable
class GraphLoop(DraftLoop[L, D], Protocol[L, D]):
    """A draft loop that can run from CUDA graphs, which the executor captures."""

    def fixed_form(
        self, runner: GroupRunner, aux: Tensor, limits: LoopSize, greedy: Greedy, compiler: Compile
    ) -> FixedLoop:
        """The loop's fixed-shape form.

        Args:
            aux: [T, A·Ht] the target's buffer of aux hidden states, always the same memory.
            limits: most rows and drafts. compiler: compiles the passes of heads that can be compiled.
        """
