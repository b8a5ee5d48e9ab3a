"""RoundExtra: the interface of a feature with arrays or row columns that only some engines' rounds have.

Recurrent states and positions of long rotary embeddings are extras (`specdec/extras/`). An extra may have columns of a
row, arrays that travel with a round's one copy, a change of the logits before they are decided, and may read a request
again from its start. The round itself names none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy import ndarray
from torch import Tensor

from attention.batch.host import BatchExtra
from attention.batch.metadata import MakeSection
from drafters.loops.base import Choose, Draft
from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import ExtraColumns
from specdec.rounds.transfer import DeviceRound
from specdec.values import IdSequence, Json, TokenIds

NEEDS_AN_EXTRA = ("grammar",)
"""Options of `SamplingParams` that the core has, and only an extra serves."""


@dataclass(frozen=True)
class Decision:
    """A decided verification on the device, as `RoundExtra.notes` reads it.

    Attributes:
        logits: [R', V] of the target, with the rows for `NeedsLogits` last. adjusted: [R', V] logits by which the round
            was decided, see `RoundExtra.adjust`.
        index: [J, n+1] int64 rows of these logits.
        tokens: [J, n+1] int64 accepted drafts and the next bonus token of each row, anything after it.
    """

    logits: Tensor
    adjusted: Tensor
    index: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class TokenContext:
    """How the tokens of a request are spelled: tokenizer, number of logits, ids that end the request."""

    tokenizer: Any
    vocab_size: int
    ends: TokenIds


@dataclass(frozen=True)
class EarlyDrafts:
    """The drafts of a round on their way to the host, since before its verification was launched.

    host: [R, n] int64, by drafting row. copied: recorded after the copy; None on a CPU, where nothing is copied.
    """

    host: Tensor
    copied: torch.cuda.Event | None

    def wait(self) -> ndarray:
        """The drafts; the launches after them go on meanwhile."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.host.numpy()


class RoundExtra:
    """One extra of an engine. It is stateless: state lies in its columns and device arrays. This class does nothing.

    Attributes:
        refuses_handoff: why a request cannot go on in another engine, in words; "" if everything needed there is moved
            or follows from its tokens.
        rewrites: whether it has a `rewrite`. reads_drafts: whether `rewrite` reads the drafts on the host.
        drafts: its name, if its columns give rows drafts (`RowTable.give`); else "".
        serves: the option of `NEEDS_AN_EXTRA` that it implements; else "".
    """

    refuses_handoff: ClassVar[str] = ""
    rewrites: ClassVar[bool] = False
    reads_drafts: ClassVar[bool] = False
    drafts: ClassVar[str] = ""
    serves: ClassVar[str] = ""

    @property
    def limits_drafts(self) -> bool:
        """Whether it has a `limit`."""
        return False

    @property
    def rereads(self) -> bool:
        """Whether rows may have to be read again from their start, see `reach`."""
        return False

    def facts(self) -> Json:
        """Its entries in `describe`, under "engine"."""
        return {}

    def columns(self, max_rows: int) -> ExtraColumns:
        """Its columns of an empty row table."""
        return ExtraColumns()

    def prepared(self, params: SamplingParams, context: TokenContext, prompt_ids: IdSequence) -> SamplingParams:
        """The parameters of one request, checked and made ready for its rounds. Raises InvalidInputError."""
        return params

    def section(self, fixed: bool) -> MakeSection | None:
        """Makes its section of arrays, which is sent with a verification's attention; None if it sends none.

        fixed: for rounds of one fixed shape, which are written in place and read by captured graphs.
        """
        return None

    def adjust(self, logits: Tensor, round_: DeviceRound) -> Tensor:
        """The logits [R', V] by which the verification is decided, from the target's, which stay as they are. Tokens
        of `round_` have the drafts in their places.

        It runs in every form of a round. Captured graphs replay its launches, so it must read values that change from
        the round's tensors, never from the host: see `rewrite`. `drafted_prefixes` gives the tokens before each row.
        """
        return logits

    def rewrite(self, logits: Tensor, round_: DeviceRound, own: BatchExtra, drafts: EarlyDrafts | None) -> Tensor:
        """As `adjust`, after it, of rounds for which the extra has arrays, and never captured: it may read these.

        The tail of a round, from these logits to the decision, is launched anew then where a graph has decided already.

        own: its arrays of the round, see `ExtraColumns.scheduled`. drafts: None where no row has any, or no extra of
        the round reads them. Returns [R', V] float32.
        """
        return logits

    def reads(self, own: BatchExtra) -> bool:
        """Whether a round with these arrays reads from the device before its decision, for example its drafts."""
        return False

    def limit(self, logits: Tensor, own: BatchExtra, target_ids: Tensor, vocab_size: int) -> Tensor:
        """The head's logits [R, Vd] of the first draft of each row that drafts, the first R of the decided rows, with
        -inf for drafts that `rewrite` would reject. Called only if all tokens before the draft have been read, so never
        for captured graphs.


        own: as for `rewrite`. target_ids: [Vd] int64 of the draft vocabulary, below vocab_size.
        """
        return logits

    def notes(self, own: BatchExtra, decision: Decision) -> tuple[Tensor, ...]:
        """Tensors to read with the result of a round: float32 on the device.

        The first, [J, n+1, W], is reported to requests with their tokens; columns get all, see `ExtraColumns.commit`.
        At most one extra of an engine has notes. Launched after each decision of rows for which it has arrays, also
        where the round itself runs from a graph.

        own: its arrays of the round, see `ExtraColumns.scheduled`.
        """
        return ()

    def variant(self, prompt_len: int, num_committed: int) -> int:
        """Bits that distinguish requests whose keys and values of the same tokens differ, so that they share no pages.

        Read whenever a request gets a row. Each extra uses separate bits.
        """
        return 0

    def reach(self, variant: int) -> int | None:
        """Positions that rounds of a row may reach before it is read again from its start; None for any."""
        return None


OfExtras = Sequence[BatchExtra | None]
"""What a batch has of each extra; None where it needs nothing of it."""
MakeExtras = Callable[[bool, bool], tuple[RoundExtra, ...]]
"""Makes extras at loading: whether one process decides, and whether only greedy requests may be given drafts."""


def no_extras(one_process: bool, greedy: bool) -> tuple[RoundExtra, ...]:
    """No extras: see `MakeExtras`."""
    return ()


@dataclass(frozen=True)
class DraftedPrefixes:
    """The tokens before each of the R' logits rows of a verification, on the device.

    Attributes:
        owner: [R'] int64, the logits row's decided row (0 … J-1); decided rows are the first rows of the batch.
        token_ids: [R', n+1] int64, the row's last committed token, then the drafts x_1 … x_i that the logits follow.
        there: [R', n+1] bool, which entries of token_ids exist: the first i+1.
    """

    owner: Tensor
    token_ids: Tensor
    there: Tensor


def drafted_prefixes(round_: DeviceRound) -> DraftedPrefixes:
    """See `DraftedPrefixes`; never waits for the device."""
    index = round_.logit_index
    rows = round_.logits_indices
    decided = torch.arange(len(index), device=rows.device)[:, None].expand_as(index)
    owner = torch.zeros_like(rows).scatter_(0, index.reshape(-1), decided.reshape(-1))
    bonus = rows[index[:, 0]][owner][:, None]
    columns = torch.arange(index.shape[1], device=rows.device)
    places = torch.minimum(bonus + columns, rows[:, None])
    return DraftedPrefixes(owner, round_.token_ids[places], bonus + columns <= rows[:, None])


def adjusted(extras: Sequence[RoundExtra], logits: Tensor, round_: DeviceRound) -> Tensor:
    """The logits [R', V] by which a verification is decided, see `RoundExtra.adjust`."""
    for extra in extras:
        logits = extra.adjust(logits, round_)
    return logits


def read_early(
    extras: Sequence[RoundExtra], arrays: OfExtras, in_order: Callable[[], Draft | None]
) -> EarlyDrafts | None:
    """Start reading the drafts if an extra needs them. To be called before the verification is launched.

    in_order: makes the drafts of the drafting rows, in their order; None if no row drafts.
    """
    # Not strict, here and below: a round in which no extra has arrays may have () in their place.
    wanted = any(own is not None and extra.reads_drafts for extra, own in zip(extras, arrays, strict=False))
    if not wanted or (draft := in_order()) is None or not draft.token_ids.numel():
        return None
    drafts = draft.token_ids
    if not drafts.is_cuda:
        return EarlyDrafts(drafts.clone(), None)
    host = torch.empty(drafts.shape, dtype=drafts.dtype, pin_memory=True)
    copied = torch.cuda.Event()
    host.copy_(drafts, non_blocking=True)
    copied.record()
    return EarlyDrafts(host, copied)


def rewritten(
    extras: Sequence[RoundExtra],
    arrays: OfExtras,
    logits: Tensor,
    round_: DeviceRound,
    drafts: EarlyDrafts | None = None,
) -> Tensor:
    """See `RoundExtra.rewrite`; the same tensor if no extra rewrites it. arrays: one entry for each extra."""
    for extra, own in zip(extras, arrays, strict=False):
        if own is not None and extra.rewrites:
            logits = extra.rewrite(logits, round_, own, drafts)
    return logits


def limited(
    extras: Sequence[RoundExtra],
    arrays: OfExtras,
    choose: Choose,
    target_ids: Tensor,
    vocab_size: int,
) -> Choose:
    """`choose`, with some first drafts ruled out by extras: see `RoundExtra.limit`."""
    each = [(e, own) for e, own in zip(extras, arrays, strict=False) if own is not None and e.limits_drafts]
    if not each:
        return choose

    def within(step: int, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        for extra, own in each if step == 0 else ():
            logits = extra.limit(logits, own, target_ids, vocab_size)
        return choose(step, logits)

    return within


def noted(extras: Sequence[RoundExtra], arrays: OfExtras, decision: Decision) -> tuple[Tensor, ...]:
    """See `RoundExtra.notes`. arrays: one entry for each extra."""
    for extra, own in zip(extras, arrays, strict=False):
        if own is not None and (notes := extra.notes(own, decision)):
            return notes
    return ()
