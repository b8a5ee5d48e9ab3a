"""Rows of tokens read through the paged cache and by the model's own eager forward, compared by the self-tests.

A row is read up to its bonus token, verified with drafts of which, if two or more, the last is wrong, and verified
again from the token after the accepted ones. The second verification shows whether rejected drafts have left a trace in
a state, and whether each accepted draft is replayed exactly once. Where storing states may be deferred, the first
verification defers it, the second does not, and a third follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.batch.host import HostBatch, rows_batch, starts_of
from attention.batch.metadata import BatchSection, single_batch_arena, stage
from attention.errors import named_error
from attention.hf.model_specific import reads_indices
from attention.hf.patches import attention_configs, attention_implementation
from specdec.errors import UNNAMED_ERRORS, CacheTooSmallError, SpecdecError, UnsupportedModelError
from specdec.values import Function
from specdec.wrapped.long_rope import RotaryPositions
from specdec.wrapped.target import Target

if TYPE_CHECKING:
    from attention.recurrence.index import StateIndex

VERIFY_LEN = 4
"""Tokens of a verification with three drafts."""
_ASKED = 6
"""Tokens of the text by which a model's positions are determined."""


@contextmanager
def errors_named(model: PreTrainedModel, tried: str) -> Iterator[None]:
    """Convert errors of the model's code into a specdec error that names the attempted operation.

    Raises:
        UnsupportedModelError: for errors that are no SpecdecError; out-of-memory errors are not converted.
    """
    try:
        yield
    except (SpecdecError, torch.OutOfMemoryError):
        raise
    except UNNAMED_ERRORS as error:
        raise UnsupportedModelError(f"{type(model).__name__} fails when {tried}: {named_error(error)}") from error


@dataclass(frozen=True)
class ReadPiece:
    """Tokens start … stop [B] of some of a test's B rows, which one forward reads.

    Attributes:
        rows: which rows are read, by number. right: end [B] of the right tokens, where the others up to `stop` are
            wrong drafts; default `stop`.
        replay, num_new: of a verification by a recurrent target, replay [B], see `StateIndex`. Without `replay` all
            tokens are committed, and nothing is replayed.
    """

    start: np.ndarray
    stop: np.ndarray
    rows: Sequence[int]
    right: np.ndarray | None = None
    replay: np.ndarray | None = None
    num_new: int = 1

    def right_tokens(self, of_rows: Sequence[Tensor]) -> list[Tensor]:
        """What the right tokens of each row read here have, of tensors [tokens, …] of all rows."""
        stop = self.stop if self.right is None else self.right
        return [of_rows[row][self.start[row] : stop[row]] for row in self.rows]

    def states(self) -> StateIndex:
        """The states of the rows, row i in slot i+1."""
        from attention.recurrence.index import StateIndex, slots_of_rows

        rows = np.array(self.rows)
        start = self.start[rows]
        lens = (self.stop - self.start)[rows]
        replay = 0 * start
        num_new = lens
        if self.replay is not None:
            replay = self.replay[rows]
            num_new = np.full_like(start, self.num_new)
        return StateIndex.of(slots_of_rows(rows), start, replay, num_new)


@dataclass(frozen=True)
class DummyRows:
    """Rows of random tokens, always the same: their ids, int64, and a block table [B, P] int32 in random order."""

    target: Target
    ids: list[Tensor]
    table: np.ndarray

    @classmethod
    def of(cls, target: Target, lens: np.ndarray) -> DummyRows:
        """Rows of these lengths [B].

        Raises:
            CacheTooSmallError: the cache cannot hold them.
        """
        page_size = target.runner.page_size
        num_pages = fewest_pages(target)
        width = -(-int(lens.max()) // page_size)
        needed = len(lens) * width
        device = target.hf_model.device
        if num_pages - 1 < needed:
            raise CacheTooSmallError(
                f"the KV cache has {num_pages - 1} pages of {page_size} tokens; at least {needed} are needed"
            )
        # On a CPU a page takes memory when it is first written, and so do its neighbours in a huge page of the system.
        among = needed if device.type == "cpu" else num_pages - 1
        pages = np.random.default_rng(0).permutation(np.arange(1, among + 1))[:needed]
        generator = torch.Generator().manual_seed(0)
        ids = [torch.randint(target.num_embeddings, (n,), generator=generator).to(device) for n in lens.tolist()]
        return cls(target, ids, pages.reshape(len(lens), width).astype(np.int32))

    def read_by_row(self, piece: ReadPiece, model: Function | None = None) -> list[Tensor]:
        """Logits [tokens, V] of each row of a piece, float32. model: a form of the target, default its own."""
        lens = (piece.stop - piece.start)[list(piece.rows)]
        everything = torch.arange(int(lens.sum()), device=self.target.hf_model.device)
        return list(self.read(piece, everything, model).split(lens.tolist()))

    def read(
        self,
        piece: ReadPiece,
        logits_indices: Tensor,
        model: Function | None = None,
        keep_aux: bool = False,
    ) -> Tensor:
        """Logits [R, V] of the tokens `logits_indices` [R] of a piece, float32. keep_aux: see `Target.forward`."""
        target = self.target
        rows = list(piece.rows)
        start = piece.start[rows]
        stop = piece.stop[rows]
        table = self.table[rows]
        query_start_loc = starts_of(stop - start).astype(np.int32)
        batch = rows_batch(query_start_loc, start, table, target.runner.page_size)
        section = BatchSection("batch")
        if target.states is not None:
            from attention.recurrence.runner import StateSection

            section = BatchSection("batch", extras=(StateSection,))
            batch = replace(batch, extras=(piece.states(),))
        sizes = (batch.num_reqs, batch.num_tokens, table.shape[1])
        arena, bucket = single_batch_arena(*sizes, target.hf_model.device, section)
        metadata = stage(batch, arena, bucket, section)
        further = len(target.runner.runners) - 1
        rotary = _rotary_positions(target, batch, [len(self.ids[row]) for row in rows])
        metadata = replace(metadata, other_groups=(metadata,) * further, extras=metadata.extras + rotary)
        planned = target.runner.plan(metadata)  # the same pages in each group
        # The ids of a piece's tokens [T], wrong drafts after the right ones.
        vocab = self.target.num_embeddings
        right = piece.right_tokens(self.ids)
        given = []
        for row, own in zip(piece.rows, right, strict=True):
            wrong = self.ids[row][piece.start[row] + len(own) : piece.stop[row]]
            given += [own, (wrong + 1) % vocab]
        return target.forward(torch.cat(given), planned, logits_indices, model, keep_aux).logits.float()


def fewest_pages(target: Target) -> int:
    """Pages of the smallest pool of the target's cache groups, the null page included."""
    return min(runner.group.num_pages for runner in target.runner.runners)


def _rotary_positions(target: Target, batch: HostBatch, lens: list[int]) -> tuple[object, ...]:
    """A longrope target's rotary positions; the model's own forward selects factors by the lengths of whole rows."""
    if target.long_rope is None:
        return ()
    long = np.array(lens) > target.long_rope.original
    encoded = target.long_rope.encoded(batch.positions, np.repeat(long, batch.query_lens))
    return (RotaryPositions(torch.from_numpy(encoded).to(target.hf_model.device)),)


def read_eager(model: PreTrainedModel, ids: list[Tensor]) -> list[Tensor]:
    """Logits [len, V] of each row by the model's own eager forward, one row at a time, float32.

    Raises:
        UnsupportedModelError: they contain NaN.
    """
    with attention_implementation(attention_configs(model), "eager"):
        logits = [model(input_ids=row[None], use_cache=False).logits[0].float() for row in ids]
    if any(row.isnan().any() for row in logits):
        broken = [name for name, weight in model.named_parameters() if weight.isnan().any()]
        where = f"its weights contain NaN ({', '.join(broken[:3])})" if broken else "its weights do not"
        raise UnsupportedModelError(
            f"the logits of {type(model).__name__} contain NaN in its own eager forward in {model.dtype}, before any "
            f"paged attention; {where}. Check the checkpoint, or load it in another dtype"
        )
    return logits


def relative_errors(ours: Tensor, right: Tensor) -> Tensor:
    """[T] float64: rms error of each token's logits [T, V] over their rms. Equal infinities are no error."""
    # where: inf - inf would be NaN for logits that both sides mask.
    off = torch.where(ours == right, 0.0, ours - right).double()
    size = torch.where(right.isfinite(), right, 0.0).double()
    return off.pow(2).mean(-1).sqrt() / size.pow(2).mean(-1).sqrt().clamp_min(torch.finfo(torch.float32).tiny)


@torch.no_grad()
def likely_cause(model: PreTrainedModel) -> str:
    """The probable cause of wrong results through the paged attention, in brackets; "" if unknown.

    The model's own eager forward shows which positions it gives a text, and whether it reads those passed to it.
    """
    indexed = next((type(module).__name__ for module in model.modules() if reads_indices(module)), None)
    if indexed is not None:
        return f" ({indexed} attends to keys that an indexer chooses, in another way than those that are served)"
    ids = torch.ones((1, _ASKED), dtype=torch.long, device=model.device)
    count = torch.arange(_ASKED)
    try:
        with attention_implementation(attention_configs(model), "eager"):
            plain, given, stretched = (
                model(input_ids=ids, use_cache=False, **positions).logits[0].float()
                for positions in ({}, *({"position_ids": p[None].to(model.device)} for p in (count, 3 * count)))
            )
    except UNNAMED_ERRORS:
        return ""
    if _differ(plain, plain[:1]) and not _differ(plain, stretched):
        return " (it counts positions itself, from 0 in every forward, and does not read position_ids)"
    if _differ(plain, given):
        return " (its own positions of a text do not count from 0, as the position_ids do that it is given)"
    return ""


def _differ(ours: Tensor, right: Tensor) -> bool:
    """Whether logits differ by more than rounding."""
    return not torch.allclose(ours, right.expand_as(ours), rtol=1e-3, atol=1e-4 * float(right.abs().max()))


def verifications(target: Target, prompts: np.ndarray) -> list[ReadPiece]:
    """Verifications of rows whose `prompts` [B] tokens were read: of a target without recurrent layers one of four
    tokens, else two or three, of which all but the last reject drafts.

    The latter have as many drafts as K allows, at most three, or two in each of three verifications, which so read
    seven tokens as well (at K=1 six instead of four); with two or more drafts, one is rejected.
    """
    if target.states is None:
        return [ReadPiece(prompts, prompts + VERIFY_LEN, range(len(prompts)))]
    rule = target.states.group.rule
    num_new, most = ((0, 1, 1), 2) if rule.defers else ((1, 1), 3)
    drafts = min(rule.num_drafts, most)
    accepted = min(drafts, max(drafts - 1, 1))
    pieces = []
    start = prompts
    replay = np.zeros_like(prompts)
    for number, new in enumerate(num_new, 1):
        stop = start + 1 + drafts
        next_start = start + 1 + accepted
        right = stop if number == len(num_new) else next_start
        pieces.append(ReadPiece(start, stop, range(len(prompts)), right, replay, new))
        start = next_start
        replay = accepted + (0 * replay if new else 1 + replay)
    return pieces
