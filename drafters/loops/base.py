"""DraftLoop: the protocol of all draft loops, with their inputs and results.

A draft loop is one kind of drafting after a verification: which rows the head reads again with the target's true aux
hidden states (the draft prefill), and which steps follow. A head offers its loop (`drafters.base.Head.draft_loop`);
an executor only sends the loop's arrays and runs it. Bucket sizes, token choice and the compiler are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata
from attention.runner import GroupRunner, PlannedBatch
from attention.staging import A, Field, Staged, array
from drafters.attend import Attend

Choose = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""(step j from 0, draft logits [R, Vd]) -> (draft ids [R] int64 on the draft vocabulary, probabilities q [R, Vd] or
None for a one-hot q). How to choose is the caller's business: acceptance must know q."""

Greedy = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""Arg max: (draft logits [R, Vd], target ids [Vd] int64 of all draft ids or None where they are the same, out [R] int64
of any stride, which gets the target ids) -> draft ids [R] int64."""

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function of tensors -> the same, compiled for any number of rows."""


@dataclass(frozen=True)
class Draft:
    """The drafts of one round, on the device.

    Attributes:
        token_ids: [R, n] int64 target-vocabulary ids, n = number of steps made.
        probs: [R, n, Vd] draft distributions; None when every draft is greedy (one-hot q), or q is kept elsewhere.
    """

    token_ids: torch.Tensor
    probs: torch.Tensor | None

    @classmethod
    def of(cls, token_ids: Sequence[torch.Tensor], probs: Sequence[torch.Tensor | None]) -> Draft:
        """Join the steps' ids [R] and probabilities [R, Vd]."""
        sampled = [p for p in probs if p is not None]
        return cls(torch.stack(list(token_ids), 1), torch.stack(sampled, 1) if sampled else None)


def paged_attend(runner: GroupRunner, planned: PlannedBatch, first_layer: int = 0) -> Attend:
    """The head's attention over its paged cache for one planned batch; its layer 0 is the group's `first_layer`."""

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return runner.attend(planned, first_layer + layer, query, key, value)

    return attend


def passes_attend(runner: GroupRunner, planned: Sequence[PlannedBatch]) -> Attend:
    """The same for a draft prefill of several passes, by the layers of the group: pass m has layer m.

    A single pass serves every layer.
    """

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return runner.attend(planned[layer % len(planned)], layer, query, key, value)

    return attend


@dataclass(frozen=True)
class DraftingRows:
    """The R rows that draft, after the draft prefill: all that the steps after it need.

    Attributes:
        committed_lens: [R] seq', positions that hold true states. num_drafts: [R] n_i.
        block_table: [R, P] of the head's pages.
    """

    committed_lens: np.ndarray
    num_drafts: np.ndarray
    block_table: np.ndarray
    page_size: int

    @property
    def num_steps(self) -> int:
        """Steps after the draft prefill: max n_i - 1, at least 0."""
        return int(self.num_drafts.max(initial=1)) - 1


@dataclass(frozen=True)
class DraftInput:
    """Inputs of a draft loop: the last verification after its commit, and the rows that the head reads of it.

    Attributes:
        query_start_loc: [B+1] int of the verification; num_drafts, num_accepted: [B].
        order: [B'] its rows that the head reads, the R drafting rows first, then prompts not read to their end.
        request_rows: [B'] int64, their rows in `tokens`: fixed while a request runs.
        committed_lens: [B'] the target's KV lengths after the commit (seq').
        tokens: [N, L] int32 committed tokens by position; the bonus token is at seq'.
        num_drafts_next: [R] n_i, drafts to make for the drafting rows, at least 1.
        block_table: [B', P] int32 of the head's pages.
        begins: [B'] the first position of each that the head reads; earlier places of its pages do not change. None if
            all begin at 0.
    """

    query_start_loc: np.ndarray
    num_drafts: np.ndarray
    num_accepted: np.ndarray
    order: np.ndarray
    request_rows: np.ndarray
    committed_lens: np.ndarray
    tokens: np.ndarray
    num_drafts_next: np.ndarray
    block_table: np.ndarray
    page_size: int
    begins: np.ndarray | None = None

    @property
    def drafting(self) -> DraftingRows:
        """The first R rows."""
        count = len(self.num_drafts_next)
        return DraftingRows(self.committed_lens[:count], self.num_drafts_next, self.block_table[:count], self.page_size)


@dataclass(frozen=True)
class LoopSize:
    """Sizes of a draft loop's arrays: of one round, or the largest there can be. Also of a verification's.

    Attributes:
        rows: B' rows of the draft prefill, or of the verification. tokens: T' of its tokens. pages: P.
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
    """A loop whose pages may serve another request with the same first tokens, because it keeps nothing of the tokens
    that were read but the head's pages.

    num_following: how many tokens after a position its entry there depends on, at least 1.
    """

    num_following: int


@runtime_checkable
class CarriesVectors(Protocol):
    """A loop that keeps vectors of each request from round to round: they move with a request to another engine."""

    @property
    def carried_shape(self) -> tuple[int, ...]:
        """(n, H)."""

    def carried_by(self, request_row: int) -> torch.Tensor:
        """[n, H] a view of the vectors of the request in this row of the row table."""

    def carry(self, request_row: int, vectors: torch.Tensor) -> None:
        """Keep [n, H] for the request in this row."""


class LoopArrays(Protocol):
    """Host arrays of one draft loop; beyond this only the loop that made them looks inside."""

    @property
    def size(self) -> LoopSize:
        """Their sizes, for the choice of a bucket."""


L = TypeVar("L", bound=LoopArrays)
D = TypeVar("D")
Sent = TypeVar("Sent", contravariant=True)
Arrived = TypeVar("Arrived", covariant=True)


class LoopSection(Protocol[Sent, Arrived]):
    """The places of a draft loop's arrays in the round's arena."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """The places."""

    def sizes(self, size: LoopSize) -> dict[str, int]:
        """Sizes of the symbolic dimensions of `fields` for arrays of at most this size."""

    def values(self, arrays: Sent) -> dict[str, np.ndarray]:
        """The arrays to send, under the names of `fields`."""

    def of(self, arrays: Sent, staged: Staged) -> Arrived:
        """The device side."""


@runtime_checkable
class DraftLoop(Protocol[L, D]):
    """One kind of draft loop, for one engine.

    L is its host arrays, D the same on the device. An executor calls `arrays`, sends them by `section`, in a transfer
    that others share, and calls `run` once the target's forward is launched.
    """

    name: str
    """Its name in messages, in the plural."""
    num_modules: int
    """M modules that take turns, 1 for a loop of one head. A request with fewer than M committed states has none for
    the later modules: it gets at most as many drafts as it has states (`drafters.loops.module_arrays`)."""

    @property
    def section(self) -> LoopSection[L, D]:
        """Where its arrays are in the round's arena."""

    def arrays(self, draft: DraftInput) -> L:
        """All numpy arrays of a round."""

    def run(self, inputs: D, runner: GroupRunner, aux: torch.Tensor, choose: Choose) -> Draft:
        """Launch the loop.

        Args:
            runner: the head's cache group. aux: [T, A·Ht] aux hidden states of the verification, by its token rows.
            choose: picks the draft tokens from logits.
        """


@dataclass(frozen=True)
class StaticShape:
    """Rounds of one fixed shape: `rows` rows of query_len = K+1 tokens each, over pages of page_size tokens.

    page_entries: most entries that the rows' page lists have together, the padding's included.
    """

    rows: int
    query_len: int
    page_size: int
    page_entries: int

    @property
    def num_steps(self) -> int:
        """Draft steps after the draft prefill, K-1."""
        return max(self.query_len - 2, 0)


@dataclass(frozen=True)
class CarriedRows(Generic[A]):
    """How a draft prefill of M > 1 modules finds the vectors that each request's last one left.

    request_rows: [rows] int64, see `DraftInput`, -1 for an added row; sources: [T] int64, the row before each
    token row, as an index into [rows vectors of the requests, T outputs of the module before].
    """

    request_rows: A = array(np.int64, "requests")
    sources: A = array(np.int64, "tokens")


@dataclass(frozen=True)
class StaticPrefill:
    """Inputs of the static draft prefill right after a verification, all on the device.

    token_ids: [T] int64, the verification's own tokens, at p the one for p+1; last_row: [rows] int64, token rows of the
    last accepted ones. carried: None for a loop of one head, which keeps nothing of a request.
    """

    token_ids: torch.Tensor
    last_row: torch.Tensor
    carried: CarriedRows[torch.Tensor] | None = None


@dataclass(frozen=True)
class Chosen:
    """Greedy choices of a static pass, and their logits; at the same addresses in every replay.

    ids: [R] int64 on the draft vocabulary; logits: [R, Vd].
    """

    ids: torch.Tensor
    logits: torch.Tensor


class StaticSteps(Protocol):
    """The steps' host arrays of one fixed number of rows, written into buffers that graphs read."""

    def send(self, rows: DraftingRows) -> tuple[Sequence[HostBatch], Staged]:
        """Lay out and send all steps of at most so many rows: the attention of each."""

    def views(self, batches: Sequence[HostBatch], staged: Staged) -> tuple[CommonAttentionMetadata, ...]:
        """Each step's attention at the addresses that do not change."""


class StaticLoop(Protocol):
    """The static form of a draft loop: passes of fixed shape over buffers of its own, for CUDA graphs.

    Drafts are chosen greedily; the executor draws those of sampled rows again, from the logits in `Chosen`.

    drafts: [R, K] int64 target-vocabulary ids, by row of the last verification; R at least the most rows there can be.
    """

    drafts: torch.Tensor

    def steps(self, shape: StaticShape) -> StaticSteps:
        """The host arrays of the steps for so many rows."""

    def prefill(
        self, inputs: StaticPrefill, positions: Sequence[torch.Tensor], attend: Attend, compiled: bool = True
    ) -> Chosen:
        """The draft prefill over a verification's token rows: writes draft 1, and the inputs of the steps.

        Args:
            positions: [T] int64 of each of the loop's M passes; those of pass m are m smaller.
            attend: over the head's paged cache, by the layers of its group; see `passes_attend`.
        """

    def step_width(self, index: int) -> int:
        """Tokens of a row in step `index` (from 0)."""

    def step(
        self, index: int, rows: int, planned: PlannedBatch, before: torch.Tensor | None
    ) -> tuple[torch.Tensor, Chosen]:
        """Step `index` (from 0) of the first `rows` >= 2 rows: writes draft index+2, reads draft index+1.

        Args:
            before: the first result of the step before, always at the same address; None for step 0.
        """


@runtime_checkable
class GraphLoop(DraftLoop[L, D], Protocol[L, D]):
    """A loop that CUDA graphs can hold. Capturing it is the executor's business."""

    def static_form(
        self, runner: GroupRunner, aux: torch.Tensor, limits: LoopSize, greedy: Greedy, compiler: Compile
    ) -> StaticLoop:
        """The loop's static form.

        Args:
            aux: [T, A·Ht] the target's buffer of aux hidden states, always the same memory.
            limits: rows and drafts at most. compiler: for the passes of heads that can be compiled.
        """
