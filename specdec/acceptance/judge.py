"""Verification on the device: fill in drafts, decide their acceptance, and pack the result for the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafters.loops.base import Choose, Draft
from drafters.vocab import scatter
from specdec.acceptance.accept import SampledInputs, accept_greedy, accept_sampled
from specdec.acceptance.packed import PackedResult
from specdec.ops.greedy_rows import greedy_ids
from specdec.requests.noise import perturbed
from specdec.requests.target_probs import draw, target_probs
from specdec.rounds.transfer import DeviceRound, DeviceSampling

Drafted = Draft | None
"""The drafts of a round; None where there are none."""


@dataclass(frozen=True)
class DraftVocab:
    """The draft vocabulary's places in the target's vocabulary: target_ids [Vd] int64, size V."""

    target_ids: Tensor
    size: int

    def scatter(self, probs: Tensor) -> Tensor:
        """[..., Vd] -> [..., V], zero elsewhere."""
        return scatter(probs, self.target_ids, self.size)


def choose_greedy(step: int, logits: Tensor) -> tuple[Tensor, None]:
    """The most probable draft token; q is one-hot. Argmax on the draft vocabulary, before any mapping."""
    return greedy_ids(logits), None


def choose_sampled(sampling: DeviceSampling, num_rows: int) -> Choose:
    """Drafts drawn from q = the head's distribution under the row's own temperature and filters (any q is lossless)."""
    rows = torch.arange(num_rows, device=sampling.draft_uniform.device)
    tensors = sampling.tensors.rows(rows)
    uniforms = sampling.draft_uniform[:num_rows]

    def choose(step: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        q = target_probs(logits, tensors)  # [R, Vd]
        return draw(q, uniforms[:, step]), q

    return choose


def choose_keyed(sampling: DeviceSampling, num_rows: int, target_ids: Tensor) -> Choose:
    """Drafts by the noise of their tokens' positions: the token itself, wherever the head's distribution is the
    target's."""
    rows = torch.arange(num_rows, device=target_ids.device)
    tensors = sampling.tensors.rows(rows)
    seeds = sampling.seed[:num_rows]

    def choose(step: int, logits: Tensor) -> tuple[Tensor, None]:
        return greedy_ids(perturbed(logits, tensors, seeds[:, step], target_ids)), None

    return choose


def keyed_ids(logits: Tensor, index: Tensor, sampling: DeviceSampling) -> Tensor:
    """The tokens [J, n+1] that the noise of their positions decides. index: [J, n+1] rows of logits."""
    rows, width = index.shape
    owner = torch.arange(rows, device=logits.device).repeat_interleave(width)
    seeds = sampling.seed[:, :width].reshape(-1)
    return greedy_ids(perturbed(logits[index.reshape(-1)], sampling.tensors.rows(owner), seeds)).view(rows, width)


def in_order(draft: Drafted, round_: DeviceRound) -> Drafted:
    """Drafts whose row i belongs to row i of the round."""
    if draft is None or round_.sources is None:
        return draft
    width = round_.logit_index.shape[1] - 1
    return Draft(draft.token_ids.index_select(0, round_.sources)[:, :width].contiguous(), None)


def rows_of(draft: Draft, rows: np.ndarray, width: int) -> Draft:
    """The first `width` drafts of some rows, in their order."""
    probs = None if draft.probs is None else draft.probs[rows, :width]
    return Draft(draft.token_ids[rows, :width].contiguous(), probs)


def fill_drafts(round_: DeviceRound, draft: Drafted) -> Tensor:
    """Token ids [T] of the next target forward with the drafts in their places, on the device."""
    if draft is None or not draft.token_ids.numel():
        return round_.token_ids
    chosen = draft.token_ids.reshape(-1).index_select(0, round_.draft_sources)
    return round_.token_ids.index_copy_(0, round_.draft_places, chosen)


def filled_drafts(round_: DeviceRound, token_ids: Tensor, draft: Drafted) -> Draft:
    """All drafts [J, n] of a round in which the host gives some, from token ids with all drafts in their places.

    draft: the draft loop's drafts, in the order of the round; None if the host gives all.
    """
    filled = token_ids[round_.logits_indices[round_.logit_index[:, 1:]]]
    if draft is None or draft.probs is None:
        return Draft(filled, None)
    replaced = torch.ones_like(draft.token_ids, dtype=torch.bool)
    replaced.view(-1)[round_.draft_sources] = False
    return Draft(filled, draft.probs, replaced)


def judge(logits: Tensor, round_: DeviceRound, draft: Drafted, vocab: DraftVocab | None) -> PackedResult:
    """Decide which drafts are accepted, by logits [R', V] of the decided rows, and pack the result for the host."""
    sampling = round_.sampling
    index = round_.logit_index
    if sampling is None:
        return judge_greedy(greedy_ids(logits)[index], round_, draft)
    if sampling.seed is not None:
        return judge_greedy(keyed_ids(logits, index, sampling), round_, draft)
    drafts = _every_row(draft, round_)
    num_rows, width = index.shape
    owner = torch.arange(num_rows, device=logits.device).repeat_interleave(width)
    p = target_probs(logits[index.reshape(-1)], sampling.tensors.rows(owner)).view(num_rows, width, -1)  # [J, n+1, V]
    q = None
    if draft is not None and draft.probs is not None and vocab is not None:
        q = p.new_zeros(num_rows, width - 1, p.shape[2])
        own = q[: len(draft.probs)]
        own.copy_(vocab.scatter(draft.probs))
        if draft.replaced is not None:
            replaced = draft.replaced[:, :, None].to(q.dtype)
            # A draft given by the host was not drawn from the head's q: its q is one-hot.
            own.mul_(1 - replaced).scatter_add_(2, drafts[: len(own), :, None], replaced)
    inputs = SampledInputs(p, q, sampling.accept_uniform, sampling.next_uniform)
    result = accept_sampled(drafts, round_.num_drafts, inputs)
    return PackedResult.pack(result.num_accepted, result.next_token, drafts)


def judge_greedy(ids: Tensor, round_: DeviceRound, draft: Drafted) -> PackedResult:
    """Accept the drafts that are the tokens of their places, ids [J, n+1] int64: of greedy rows the arg max."""
    drafts = _every_row(draft, round_)
    result = accept_greedy(drafts, round_.num_drafts, ids)
    return PackedResult.pack(result.num_accepted, result.next_token, drafts)


def fill_from_loop(round_: DeviceRound, draft: Drafted) -> Tensor:
    """`fill_drafts` with drafts in the order of the round before, as a loop keeps them; on a GPU by one kernel."""
    if draft is None or not draft.token_ids.numel() or not _has_kernels(round_.token_ids):
        return fill_drafts(round_, in_order(draft, round_))
    from specdec.ops.greedy_kernel import launch_placing

    width = round_.logit_index.shape[1] - 1
    sources = _by_source(draft, round_)
    launch_placing(round_.token_ids, round_.draft_places, round_.draft_sources, width, *sources)
    return round_.token_ids


def judge_from_loop(greedy: Tensor, round_: DeviceRound, draft: Drafted) -> PackedResult:
    """`judge_greedy` with drafts in the order of the round before, as a loop keeps them; on a GPU by one kernel.

    greedy: [R'] int64, the arg max of the decided rows' logits.
    """
    if not _has_kernels(greedy):
        return judge_greedy(greedy[round_.logit_index], round_, in_order(draft, round_))
    from specdec.ops.greedy_kernel import launch_acceptance

    index = round_.logit_index
    result = PackedResult.empty(len(index), index.shape[1] - 1, greedy.device)
    out = (result.num_accepted, result.tokens, result.drafts)
    launch_acceptance(greedy, index, round_.num_drafts, *_by_source(draft, round_), out)
    return result


def accept_equal(ids: Tensor, num_drafts: Tensor, result: PackedResult) -> None:
    """Decide the drafts of a result anew, in place, by one kernel: by the target's own tokens ids [J·(n+1)] int64."""
    from specdec.ops.greedy_kernel import launch_acceptance

    places = torch.arange(len(ids), device=ids.device)
    out = (result.num_accepted, result.tokens, result.drafts)
    launch_acceptance(ids, places.view_as(result.tokens), num_drafts, result.drafts, places[: result.num_rows], out)


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda


def _by_source(draft: Drafted, round_: DeviceRound) -> tuple[Tensor, Tensor]:
    """Drafts [S, n or more] and the rows of them [R] that belong to the first R rows of the round."""
    if draft is None:
        return round_.logit_index, round_.num_drafts[:0]  # no row has drafts, so none are read
    if round_.sources is None:
        return draft.token_ids, torch.arange(len(draft.token_ids), device=draft.token_ids.device)
    return draft.token_ids, round_.sources


def _every_row(draft: Drafted, round_: DeviceRound) -> Tensor:
    """Drafts [J, n] int64; rows after those that draft have zeros."""
    places = round_.logit_index[:, 1:]
    if draft is not None and draft.token_ids.shape == places.shape:
        return draft.token_ids
    drafts = torch.zeros_like(places)
    if draft is not None and draft.token_ids.numel():
        drafts[: len(draft.token_ids)] = draft.token_ids
    return drafts
