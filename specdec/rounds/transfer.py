"""A round's arrays on their way to the device: the one transfer that sends them, and the views of what arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from attention.batch.host import HostBatch, flat_pages
from attention.batch.metadata import CommonAttentionMetadata, batch_arrays, from_staged
from attention.batch.staging import Bucket, Staged, StagingArena
from attention.checking import checking
from drafters.loops.chain.run import FirstPass
from specdec.requests.sampling import SamplingTensors
from specdec.rounds.verification import DraftArrays, SamplingRound, StepArrays, TargetArrays, TargetInputs


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
        sources: [R] int64 rows of the drafts, see TargetArrays; None where they are in order.
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
    sources: torch.Tensor | None
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
        steps=() if draft is None else step_views(draft.steps.batches, staged),
        sampling=None if sampling is None else _device_sampling(sampling, staged),
    )


def target_views(target: TargetInputs, staged: Staged) -> DeviceRound:
    """A verification's device side: greedy, without a draft loop."""
    views = {name: staged[f"target.{name}"] for name in _TARGET_FIELDS}
    sources = None if target.sources is None else staged["target.sources"]
    return DeviceRound(None, (), from_staged("target", target.batch, staged), **views, sources=sources, sampling=None)


def fixed_views(batch: HostBatch, staged: Staged, num_drafts: int) -> DeviceRound:
    """A verification's device side where the arena's fields have the very shape; num_drafts: places for drafts."""
    views = {name: staged[f"target.{name}"] for name in _TARGET_FIELDS}
    for name in ("draft_places", "draft_sources"):
        views[name] = views[name][:num_drafts]
    metadata = from_staged("target", batch, staged)
    return DeviceRound(None, (), metadata, **views, sources=staged["target.sources"], sampling=None)


def target_values(target: TargetInputs) -> dict[str, np.ndarray]:
    """A verification's arrays under their arena names."""
    arrays = batch_arrays("target", target.batch) | {f"target.{name}": getattr(target, name) for name in _TARGET_FIELDS}
    return arrays if target.sources is None else arrays | {"target.sources": target.sources}


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


def step_views(batches: Sequence[HostBatch], staged: Staged) -> tuple[CommonAttentionMetadata, ...]:
    """Metadata of every draft step; what does not change from step to step is one view."""
    if not batches:
        return ()
    names = ("seq_lens", "slot_mapping", "positions", "page_indices", "page_indptr", "last_page_len")
    per_step = zip(*(staged[f"step.{name}"].unbind(0) for name in names), strict=True)
    shared = (staged["step.query_start_loc"], staged.views.get("step.block_table"))
    return tuple(_step(host, staged, shared, views) for host, views in zip(batches, per_step, strict=True))


def _step(
    host: HostBatch, staged: Staged, shared: tuple[torch.Tensor, torch.Tensor | None], views: tuple[torch.Tensor, ...]
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
