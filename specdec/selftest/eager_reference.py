"""Rows of tokens read through the paged cache and by the model's own eager forward, compared by the self-tests.

A row is read up to its bonus token, verified with drafts of which, if two or more, the last is wrong, and verified
again from the token after the accepted ones. The second verification shows whether rejected drafts have left a trace in
a state, and whether each accepted draft is replayed exactly once. Where storing states may be deferred, the first
verification defers it, the second does not, and a third follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from attention.batch.host import HostBatch, rows_batch
from attention.batch.metadata import BatchSection, single_batch_arena, stage
from attention.hf.model_specific import reads_indices
from attention.hf.patches import attention_configs, attention_implementation
from specdec.errors import UNNAMED_ERRORS, CacheTooSmallError, SpecdecError, UnsupportedModelError
from specdec.wrapped.long_rope import RotaryPositions
from specdec.wrapped.target import Target

if TYPE_CHECKING:
    from attention.recurrence.index import StateIndex

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
        raise UnsupportedModelError(
            f"{type(model).__name__} fails when {tried}: {type(error).__name__}: {error}"
        ) from error


def scrambled_table(target: Target, lens: np.ndarray) -> np.ndarray:
    """A block table [B, P] int32 for rows of these lengths, its pages in random order.

    Raises:
        CacheTooSmallError: the cache cannot hold the rows.
    """
    page_size, num_pages = target.runner.page_size, fewest_pages(target)
    width = -(-int(lens.max()) // page_size)
    pages = np.random.default_rng(0).permutation(np.arange(1, num_pages))[: len(lens) * width]
    if len(pages) < len(lens) * width:
        raise CacheTooSmallError(
            f"the KV cache has {num_pages - 1} pages of {page_size} tokens; at least {len(lens) * width} are needed"
        )
    return pages.reshape(len(lens), width).astype(np.int32)


def fewest_pages(target: Target) -> int:
    """Pages of the smallest pool of the target's cache groups, the null page included."""
    return min(runner.group.num_pages for runner in target.runner.runners)


def dummy_ids(target: Target, lens: np.ndarray) -> list[torch.Tensor]:
    """Random token ids of rows of these lengths, int64, always the same."""
    generator = torch.Generator().manual_seed(0)
    vocab, device = target.num_embeddings, target.hf_model.device
    return [torch.randint(vocab, (n,), generator=generator).to(device) for n in lens.tolist()]


def read_paged(
    target: Target,
    ids: list[torch.Tensor],
    start: np.ndarray,
    stop: np.ndarray,
    table: np.ndarray,
    model: Callable[..., Any] | None = None,
    states: StateIndex | None = None,
) -> list[torch.Tensor]:
    """Logits [stop - start, V] of the tokens start … stop of each row, float32."""
    logits_indices = torch.arange(int((stop - start).sum()), device=target.hf_model.device)
    logits = read_logits(target, ids, start, stop, table, logits_indices, model, states)
    return list(logits.split((stop - start).tolist()))


def read_logits(
    target: Target,
    ids: list[torch.Tensor],
    start: np.ndarray,
    stop: np.ndarray,
    table: np.ndarray,
    logits_indices: torch.Tensor,
    model: Callable[..., Any] | None = None,
    states: StateIndex | None = None,
    keep_aux: bool = False,
) -> torch.Tensor:
    """As `read_paged`, but the logits [R, V] of token rows `logits_indices` [R] of the batch only, float32.

    states: a recurrent target's states; by default all tokens are committed, row i in slot i+1, with nothing to replay.
    keep_aux: see `Target.forward`.
    """
    query_start_loc = np.concatenate([[0], np.cumsum(stop - start)]).astype(np.int32)
    batch = rows_batch(query_start_loc, start, table, target.runner.page_size)
    section = BatchSection("batch")
    if target.states is not None:
        from attention.recurrence.runner import StateSection

        section = BatchSection("batch", extras=(StateSection,))
        batch = replace(batch, extras=(states or all_committed(np.arange(len(ids)), start, stop),))
    sizes = (batch.num_reqs, batch.num_tokens, table.shape[1])
    arena, bucket = single_batch_arena(*sizes, target.hf_model.device, section)
    metadata = stage(batch, arena, bucket, section)
    further = len(target.runner.runners) - 1
    rotary = _rotary_positions(target, batch, ids)
    metadata = replace(metadata, other_groups=(metadata,) * further, extras=(*metadata.extras, *rotary))
    planned = target.runner.plan(metadata)  # the same pages in each group
    flat = torch.cat([row[a:b] for row, a, b in zip(ids, start, stop, strict=True)])
    return target.forward(flat, planned, logits_indices, model, keep_aux).logits.float()


def _rotary_positions(target: Target, batch: HostBatch, ids: list[torch.Tensor]) -> tuple[object, ...]:
    """A longrope target's rotary positions; the model's own forward selects factors by the lengths of these `ids`."""
    if target.long_rope is None:
        return ()
    long = np.array([len(row) > target.long_rope.original for row in ids])
    encoded = target.long_rope.encoded(batch.positions, np.repeat(long, batch.query_lens))
    return (RotaryPositions(torch.from_numpy(encoded).to(target.hf_model.device)),)


def all_committed(rows: np.ndarray, start: np.ndarray, stop: np.ndarray) -> StateIndex:
    """The states of these rows when all tokens start … stop are committed, and all before were."""
    from attention.recurrence.index import StateIndex, slots_of_rows

    return StateIndex.of(slots_of_rows(rows), start, np.zeros_like(start), stop - start)


def read_eager(model: PreTrainedModel, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits [len, V] of each row by the model's own eager forward, one row at a time, float32.

    Raises:
        UnsupportedModelError: they contain NaN.
    """
    with attention_implementation(attention_configs(model), "eager"):
        logits = [model(input_ids=row[None], use_cache=False).logits[0].float() for row in ids]
    if any(bool(row.isnan().any()) for row in logits):
        raise UnsupportedModelError(_nan_message(model))
    return logits


def relative_errors(ours: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
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
    ids, count = torch.ones((1, _ASKED), dtype=torch.long, device=model.device), torch.arange(_ASKED)
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


def _differ(ours: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether logits differ by more than rounding."""
    return not torch.allclose(ours, right.expand_as(ours), rtol=1e-3, atol=1e-4 * float(right.abs().max()))


def _nan_message(model: PreTrainedModel) -> str:
    broken = [name for name, weight in model.named_parameters() if bool(weight.isnan().any())]
    where = f"its weights contain NaN ({', '.join(broken[:3])})" if broken else "its weights do not"
    return (
        f"the logits of {type(model).__name__} contain NaN in its own eager forward in {model.dtype}, before any paged "
        f"attention; {where}. Check the checkpoint, or load it in another dtype"
    )


_MOST_DRAFTS, _MOST_OF_THREE = 3, 2


@dataclass(frozen=True)
class Rollback:
    """How rows are verified after their prompts.

    drafts, accepted: for every verification but the last, which accepts all. num_new: for each, see `StateIndex`.
    """

    drafts: int
    accepted: int
    num_new: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens after a prompt that the verifications read."""
        return (len(self.num_new) - 1) * (1 + self.accepted) + 1 + self.drafts


def rollback_of(target: Target) -> Rollback:
    """As many drafts as K allows, at most three, or two in each of three verifications, which so read seven tokens as
    well (at K=1 six instead of four); with two or more drafts, one is rejected."""
    assert target.states is not None
    rule = target.states.group.rule
    num_new = (0, 1, 1) if rule.defers else (1, 1)
    drafts = min(rule.num_drafts, _MOST_DRAFTS if len(num_new) == 2 else _MOST_OF_THREE)
    return Rollback(drafts, min(drafts, max(drafts - 1, 1)), num_new)


def read_rollback(
    target: Target,
    ids: list[torch.Tensor],
    prompts: np.ndarray,
    table: np.ndarray,
    read: Callable[..., list[torch.Tensor]] = read_paged,
) -> list[tuple[np.ndarray, np.ndarray, list[torch.Tensor]]]:
    """Verify rows whose `prompts` [B] tokens were read. read: `read_paged`, or a wrapper that also records something.

    Returns:
        For each verification first and last position [B] of right tokens, and their logits [last - first, V] by row.
    """
    plan, rows, found = rollback_of(target), np.arange(len(ids)), []
    start, replay, accepted = prompts, np.zeros_like(prompts), plan.accepted
    for left, num_new in zip(reversed(range(len(plan.num_new))), plan.num_new, strict=True):
        end = start + 1 + plan.drafts
        right = start + 1 + accepted if left else end
        given = [row.clone() for row in ids]
        for row, bad, last in zip(given, right, end, strict=True):
            row[bad:last] = (row[bad:last] + 1) % target.num_embeddings
        logits = read(target, given, start, end, table, states=verifying(rows, start, replay, num_new))
        found.append((start, right, [x[:n] for x, n in zip(logits, right - start, strict=True)]))
        start, replay = start + 1 + accepted, accepted + (0 * replay if num_new else 1 + replay)
    return found


def verifying(rows: np.ndarray, start: np.ndarray, replay: np.ndarray, num_new: int = 1) -> StateIndex:
    """The states for verifications of these rows from their bonus tokens at `start` on; num_new: one per row."""
    from attention.recurrence.index import StateIndex, slots_of_rows

    return StateIndex.of(slots_of_rows(rows), start, replay, np.full_like(start, num_new))
