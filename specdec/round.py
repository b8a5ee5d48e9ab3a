"""All numpy arrays of one round: the draft loop's and the next verification's, and the one transfer that sends them.

Pure functions of the schedule, the row table and the block tables; nothing here touches the device but `send_round`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from attention.batch import HostBatch, flat_pages
from attention.checking import checking
from attention.metadata import CommonAttentionMetadata, batch_arrays, from_staged
from attention.staging import Bucket, Staged, StagingArena
from drafters.chain import FirstPass
from drafters.inputs import DraftSteps, KeptRows, draft_steps, kept_rows, rows_batch, shifted_token_ids, step_batch
from specdec.rows import RowTable
from specdec.sampling import SamplingArrays, SamplingTensors
from specdec.scheduler import Schedule
from specdec.uniforms import Role, uniforms


@dataclass(frozen=True)
class Verified:
    """The last target batch after its commit, as the draft loop needs it.

    Attributes:
        query_start_loc: [B+1] of that batch; rows: [B] RowTable rows.
        num_drafts, num_accepted: [B].
    """

    query_start_loc: np.ndarray
    rows: np.ndarray
    num_drafts: np.ndarray
    num_accepted: np.ndarray


@dataclass(frozen=True)
class StepArrays:
    """Host arrays of the draft steps after the first pass.

    Attributes:
        committed_lens: [R] of the drafting rows. num_drafts: [R] n_i. num_steps: steps made, at least max n_i - 1.
        sources: [R] int64 rows of the last verification. block_table: [R, P] of the head's pages.
    """

    committed_lens: np.ndarray
    num_drafts: np.ndarray
    num_steps: int
    sources: np.ndarray
    block_table: np.ndarray
    page_size: int

    @cached_property
    def steps(self) -> DraftSteps:
        """Positions, lengths and slots of every step."""
        return draft_steps(self.committed_lens, self.num_drafts, self.block_table, self.page_size, self.num_steps)

    @cached_property
    def batches(self) -> tuple[HostBatch, ...]:
        """The attention of every step."""
        return tuple(step_batch(self.steps, j, self.block_table, self.page_size) for j in range(self.num_steps))


@dataclass(frozen=True)
class DraftArrays:
    """Host arrays of one draft loop: first pass over the kept rows, then the steps of the R drafting rows.

    rows: [B'] RowTable rows of the first pass.
    """

    kept: KeptRows
    token_ids: np.ndarray
    first: HostBatch
    steps: StepArrays
    rows: np.ndarray

    @property
    def num_drafting(self) -> int:
        """R."""
        return len(self.steps.sources)


@dataclass(frozen=True)
class TargetInputs:
    """What one target forward and its verdict read.

    Attributes:
        batch: its attention. token_ids: [T] int64, 0 where a draft comes.
        draft_places: [sum n] int64 rows of token_ids that take a draft.
        draft_sources: [sum n] int64 flat indices of those drafts in [R, n].
        judged_rows: [R'] int64 token rows whose logits are wanted; logit_index: [J, n+1] int64 into them.
        num_drafts: [J].
    """

    batch: HostBatch
    token_ids: np.ndarray
    draft_places: np.ndarray
    draft_sources: np.ndarray
    judged_rows: np.ndarray
    logit_index: np.ndarray
    num_drafts: np.ndarray


@dataclass(frozen=True)
class TargetArrays:
    """Who is in the next verification, and what each row reads: committed tokens, then drafts.

    Attributes:
        start: [B] first position. num_new: [B] committed tokens. drafts: [B] n_i, some in the first num_drafting rows.
        tokens: [B, W] int32 the committed tokens, from column 0 on.
        judged: [J] batch rows whose token is decided (all but unfinished prompts); the R drafting rows come first.
        block_table, head_table: [B, P] the rows' pages of the target's group and of the head's (None without a head).
    """

    start: np.ndarray
    num_new: np.ndarray
    drafts: np.ndarray
    num_drafting: int
    tokens: np.ndarray
    judged: np.ndarray
    block_table: np.ndarray
    head_table: np.ndarray | None
    page_size: int

    @cached_property
    def lens(self) -> np.ndarray:
        """[B] tokens of each row."""
        return self.num_new + self.drafts

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.lens.sum())

    @property
    def only_roots(self) -> bool:
        """Whether every row reads one committed token and is judged."""
        return len(self.judged) == len(self.start) and bool((self.num_new == 1).all())

    @cached_property
    def query_start_loc(self) -> np.ndarray:
        """[B+1]."""
        return np.concatenate([[0], np.cumsum(self.lens)])

    @cached_property
    def num_drafts(self) -> np.ndarray:
        """[J] drafts of the judged rows."""
        return self.drafts[self.judged]

    @cached_property
    def max_drafts(self) -> int:
        """n, the most drafts of a row."""
        return int(self.drafts.max(initial=0))

    @cached_property
    def inputs(self) -> TargetInputs:
        """The ragged layout, row after row."""
        lens, starts = self.lens, self.query_start_loc
        owner = np.repeat(np.arange(len(lens)), lens)
        drafted = np.arange(starts[-1]) - starts[owner] >= self.num_new[owner]
        token_ids = np.zeros(starts[-1], np.int64)
        token_ids[~drafted] = self.tokens[np.arange(self.tokens.shape[1]) < self.num_new[:, None]]
        judged_rows, logit_index = self._judged_rows()
        width = np.arange(1, self.max_drafts + 1)
        return TargetInputs(
            batch=rows_batch(starts, self.start, self.block_table, self.page_size),
            token_ids=token_ids,
            draft_places=np.flatnonzero(drafted),
            draft_sources=np.flatnonzero(width <= self.drafts[: self.num_drafting, None]),
            judged_rows=judged_rows,
            logit_index=logit_index,
            num_drafts=self.num_drafts,
        )

    def _judged_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """judged_rows and logit_index, see TargetInputs."""
        counts = self.num_drafts + 1
        ends = np.cumsum(counts)
        roots = self.query_start_loc[self.judged] + self.num_new[self.judged] - 1
        within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        logit_index = (ends - counts)[:, None] + np.minimum(np.arange(self.max_drafts + 1), self.num_drafts[:, None])
        return (np.repeat(roots, counts) + within).astype(np.int64), logit_index.astype(np.int64)


@dataclass(frozen=True)
class SamplingRound:
    """Host arrays of a round with sampled rows: parameters [J], uniforms of drafts, acceptance and resampling."""

    arrays: SamplingArrays
    draft_uniform: np.ndarray
    accept_uniform: np.ndarray
    next_uniform: np.ndarray


def draft_arrays(
    verified: Verified, schedule: Schedule, table: RowTable, block_table: np.ndarray, page_size: int
) -> DraftArrays | None:
    """The draft loop after a verification; None when no row has anything for the head to read.

    The first pass takes the drafting rows, in the order of the schedule, then the prompts not read to their end.
    block_table: [R, P] of the head's pages, by RowTable row.
    """
    drafting = schedule.rows[: schedule.num_drafting]
    alive = (table.previous[verified.rows] >= 0) & (table.drafts[verified.rows] > 0)
    unfinished = alive & table.reading(verified.rows)
    order = np.concatenate([table.previous[drafting], np.flatnonzero(unfinished)])
    if not len(order):
        return None
    kept = kept_rows(verified.query_start_loc, verified.num_drafts, verified.num_accepted, order)
    rows = verified.rows[order]
    lens = np.diff(kept.query_start_loc)
    first = rows_batch(kept.query_start_loc, table.computed[rows] - lens, block_table[rows], page_size)
    token_ids = shifted_token_ids(table.tokens, np.repeat(rows, lens), first.positions)
    return DraftArrays(kept, token_ids, first, step_arrays(schedule, table, block_table, page_size), rows)


def step_arrays(schedule: Schedule, table: RowTable, block_table: np.ndarray, page_size: int) -> StepArrays:
    """The draft steps of the drafting rows. block_table: [R, P] of the head's pages, by RowTable row."""
    drafting = schedule.rows[: schedule.num_drafting]
    num_drafts = schedule.num_drafts[: len(drafting)]
    num_steps = int(num_drafts.max(initial=1)) - 1
    return StepArrays(
        committed_lens=table.computed[drafting],
        num_drafts=num_drafts,
        num_steps=num_steps,
        sources=table.previous[drafting],
        block_table=block_table[drafting],
        page_size=page_size,
    )


def target_arrays(
    schedule: Schedule,
    table: RowTable,
    block_table: np.ndarray,
    page_size: int,
    head_table: np.ndarray | None = None,
) -> TargetArrays:
    """The next verification. block_table, head_table: [R, P] of the target's and the head's pages, by RowTable row."""
    rows, start = schedule.rows, table.computed[schedule.rows]
    width = np.arange(int(schedule.num_new.max(initial=0)))
    places = np.minimum(start[:, None] + width, table.tokens.shape[1] - 1)
    return TargetArrays(
        start=start,
        num_new=schedule.num_new,
        drafts=schedule.num_drafts,
        num_drafting=schedule.num_drafting,
        tokens=table.tokens[rows[:, None], places],
        judged=np.flatnonzero(start + schedule.num_new == table.length[rows]),
        block_table=block_table[rows],
        head_table=None if head_table is None else head_table[rows],
        page_size=page_size,
    )


def sampling_round(target: TargetArrays, schedule: Schedule, table: RowTable) -> SamplingRound | None:
    """Parameters and uniforms of the judged rows; None when all of them are greedy.

    The token that draft j+1 proposes stands at position root+1+j; so does the next token when j drafts were accepted.
    """
    rows = schedule.rows[target.judged]
    arrays = table.sampling(rows)
    if not arrays.any_sampled:
        return None
    keys = table.key[rows][:, None]
    positions = table.length[rows][:, None] + np.arange(target.max_drafts + 1)
    return SamplingRound(
        arrays=arrays,
        draft_uniform=uniforms(keys[: schedule.num_drafting], positions[: schedule.num_drafting, :-1], Role.DRAFT),
        accept_uniform=uniforms(keys, positions[:, :-1], Role.ACCEPT),
        next_uniform=uniforms(keys, positions, Role.RESAMPLE),
    )


@dataclass(frozen=True)
class DeviceSampling:
    """SamplingRound on the device."""

    tensors: SamplingTensors
    draft_uniform: torch.Tensor
    accept_uniform: torch.Tensor
    next_uniform: torch.Tensor


@dataclass(frozen=True)
class DeviceRound:
    """One round on the device: inputs of the draft loop and of the next target forward.

    Attributes:
        first, steps: the draft loop (None, () when nobody drafts and no prompt goes on).
        metadata, token_ids, draft_places, draft_sources, judged_rows, logit_index, num_drafts: see TargetInputs.
        sampling: None when all rows are greedy.
    """

    first: FirstPass | None
    steps: tuple[CommonAttentionMetadata, ...]
    metadata: CommonAttentionMetadata
    token_ids: torch.Tensor
    draft_places: torch.Tensor
    draft_sources: torch.Tensor
    judged_rows: torch.Tensor
    logit_index: torch.Tensor
    num_drafts: torch.Tensor
    sampling: DeviceSampling | None


_TARGET_FIELDS = ("token_ids", "draft_places", "draft_sources", "judged_rows", "logit_index", "num_drafts")


def send_round(
    draft: DraftArrays | None,
    target: TargetArrays,
    sampling: SamplingRound | None,
    arena: StagingArena,
    bucket: Bucket,
) -> DeviceRound:
    """Send everything in one host-to-device copy and wrap the views. `bucket` says where each array lies."""
    arrays = target_values(target.inputs)
    if draft is not None:
        arrays |= draft_values(draft)
    if sampling is not None:
        arrays |= _sampling_fields(sampling)
    staged = arena.send(bucket, arrays)
    device = target_views(target.inputs, staged)
    return replace(
        device,
        first=None if draft is None else first_pass_views(draft, staged),
        steps=() if draft is None else step_views(draft.steps, staged),
        sampling=None if sampling is None else _device_sampling(sampling, staged),
    )


def target_views(target: TargetInputs, staged: Staged) -> DeviceRound:
    """A verification's device side: greedy, without a draft loop."""
    views = {name: staged[f"target.{name}"] for name in _TARGET_FIELDS}
    return DeviceRound(None, (), from_staged("target", target.batch, staged), **views, sampling=None)


def target_values(target: TargetInputs) -> dict[str, np.ndarray]:
    """A verification's arrays under their arena names."""
    return batch_arrays("target", target.batch) | {f"target.{name}": getattr(target, name) for name in _TARGET_FIELDS}


def draft_values(draft: DraftArrays) -> dict[str, np.ndarray]:
    """A draft loop's arrays under their arena names."""
    arrays = batch_arrays("first", draft.first)
    arrays["first.token_ids"] = draft.token_ids
    arrays["first.token_indices"] = draft.kept.token_indices
    arrays["first.last_row"] = draft.kept.last_row[: draft.num_drafting]
    return arrays | step_values(draft.steps)


def step_values(draft: StepArrays) -> dict[str, np.ndarray]:
    """The steps' arrays under their arena names, all steps at once."""
    if not draft.num_steps:
        return {}
    steps, page_size = draft.steps, draft.page_size
    counts = (steps.seq_lens + (page_size - 1)) // page_size  # [K-1, R]
    indptr = np.zeros((len(counts), counts.shape[1] + 1), np.int32)
    np.cumsum(counts, axis=1, out=indptr[:, 1:])
    return {
        "step.query_start_loc": np.arange(counts.shape[1] + 1, dtype=np.int32),
        "step.block_table": draft.block_table,
        "step.page_indices": _step_pages(steps.active, draft.block_table, counts, int(indptr[:, -1].max())),
        "step.page_indptr": indptr,
        "step.last_page_len": (steps.seq_lens - 1) % page_size + 1,
        "step.seq_lens": steps.seq_lens,
        "step.slot_mapping": steps.slots,
        "step.positions": steps.positions,
    }


def _step_pages(active: np.ndarray, table: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
    """[K-1, width] int32: every step's pages, row after row; active, counts: [K-1, R]; table: [R, P]."""
    pages = np.zeros((len(counts), width), np.int32)
    before: bytes | None = None
    for step, own in enumerate(counts):
        now = own.tobytes() + active[step].tobytes()
        if now == before:  # nobody has entered a page since the step before
            pages[step] = pages[step - 1]
            continue
        flat = flat_pages(table if active[step].all() else np.where(active[step][:, None], table, 0), own)
        pages[step, : len(flat)] = flat
        before = now
    return pages


def first_pass_views(draft: DraftArrays, staged: Staged) -> FirstPass:
    """The first pass's device side."""
    return FirstPass(
        token_ids=staged["first.token_ids"],
        token_indices=staged["first.token_indices"],
        last_row=staged["first.last_row"],
        metadata=from_staged("first", draft.first, staged),
    )


def step_views(draft: StepArrays, staged: Staged) -> tuple[CommonAttentionMetadata, ...]:
    """Metadata of every draft step; what does not change from step to step is one view."""
    if not draft.batches:
        return ()
    names = ("seq_lens", "slot_mapping", "positions", "page_indices", "page_indptr", "last_page_len")
    per_step = zip(*(staged[f"step.{name}"].unbind(0) for name in names), strict=True)
    shared = (staged["step.query_start_loc"], staged["step.block_table"])
    return tuple(_step(host, staged, shared, views) for host, views in zip(draft.batches, per_step, strict=True))


def _step(
    host: HostBatch, staged: Staged, shared: tuple[torch.Tensor, torch.Tensor], views: tuple[torch.Tensor, ...]
) -> CommonAttentionMetadata:
    if checking():
        host.validate()
    seq_lens, slot_mapping, positions, page_indices, page_indptr, last_page_len = views
    return CommonAttentionMetadata(
        host=host,
        query_start_loc=shared[0],
        block_table=shared[1],
        seq_lens=seq_lens,
        slot_mapping=slot_mapping,
        positions=positions,
        page_indices=page_indices[: int(host.page_counts.sum())],
        page_indptr=page_indptr,
        last_page_len=last_page_len,
        staged=staged,
    )


def _sampling_fields(sampling: SamplingRound) -> dict[str, np.ndarray]:
    s = sampling.arrays
    arrays = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p}
    arrays |= {"draft_uniform": sampling.draft_uniform, "accept_uniform": sampling.accept_uniform}
    arrays["next_uniform"] = sampling.next_uniform
    return {f"sampling.{name}": array for name, array in arrays.items()}


def _device_sampling(sampling: SamplingRound, staged: Staged) -> DeviceSampling:
    names = ("temperature", "top_k", "top_p", "min_p")
    return DeviceSampling(
        tensors=SamplingTensors(sampling.arrays.filters, *(staged[f"sampling.{name}"] for name in names)),
        draft_uniform=staged["sampling.draft_uniform"],
        accept_uniform=staged["sampling.accept_uniform"],
        next_uniform=staged["sampling.next_uniform"],
    )
