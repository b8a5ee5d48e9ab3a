"""Sampled rows of rounds that run from graphs: all rows are decided greedily, then sampled rows once more.

Kernels that meet a greedy row return at once, so greedy and sampled rows share a batch; rounds without sampled rows do
not launch them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.base import Head
from drafters.checkpoints.tensor_files import StateDict
from drafters.loops.base import Chosen, FixedLoop
from drafters.loops.head_passes import target_ids_of
from specdec.acceptance.judge import accept_equal
from specdec.acceptance.packed import PackedResult
from specdec.ops.draws import (
    DraftPlaces,
    Filtered,
    Proposal,
    accept_drafts,
    draw_drafts,
    draw_keyed,
    filter_rows,
    inverse_map,
)
from specdec.rounds.transfer import DeviceSampling


class SampledDrafts:
    """The drafts of sampled rows, drawn from the head's own distribution, and that distribution, for the acceptance.

    By row of the last verification, like `FixedLoop.drafts`.
    """

    def __init__(self, head: Head, loop: FixedLoop, sampling: DeviceSampling, vocab_size: int) -> None:
        """sampling: parameters of the round that the drafts follow, in fixed places; vocab_size: V of the target."""
        self._target_ids = target_ids_of(head, loop.drafts.device)
        self._drafts = loop.drafts
        self._sampling = sampling
        device = loop.drafts.device
        self._accepted = torch.zeros(len(loop.drafts), dtype=torch.int64, device=device)
        self._filtered = Filtered.empty(*loop.drafts.shape, device=device)
        self._inverse = inverse_map(head.to_target_ids(torch.arange(head.draft_vocab_size, device=device)), vocab_size)
        self._logits: Tensor | None = None

    def choose(self, step: int, chosen: Chosen | None, num_accepted: Tensor | None = None) -> None:
        """Draw draft step+1 of the sampled rows in place of the greedy draft; without choices only keep num_accepted.

        The kernels that draw also write everything that is kept: a separate launch would cost as much as theirs.

        num_accepted: with draft 1, [R] int64 of any stride, on the device: accepted drafts of the last verification.
            Rows of `chosen` that are not among these are greedy.
        """
        if chosen is None or self._sampling.seed is not None:
            if num_accepted is not None:
                self._accepted[: len(num_accepted)] = num_accepted
            if chosen is not None:
                self._choose_keyed(step, chosen)
            return
        if chosen.slots > 1:
            self._choose_all(chosen)
            return
        rows = len(chosen.ids)
        sampling = self._sampling.first(rows)
        logits = self._kept(chosen.logits)[:rows, step]
        kept = None if num_accepted is None else self._accepted
        draw_drafts(
            chosen.logits,
            chosen.ids,
            sampling.tensors,
            sampling.ahead_uniform,
            step,
            Filtered(self._filtered.stats[:rows, step]),
            num_accepted=self._accepted if num_accepted is None else num_accepted,
            places=DraftPlaces(logits, self._drafts[:rows, step], self._target_ids, kept),
        )

    def _choose_all(self, chosen: Chosen) -> None:
        """Draw all drafts of each row, which do not depend on each other, as rows of one launch."""
        rows, slots = len(chosen.ids) // chosen.slots, torch.arange(chosen.slots, device=chosen.ids.device)
        owner = torch.arange(rows, device=slots.device).repeat_interleave(chosen.slots, output_size=len(chosen.ids))
        uniform = self._sampling.ahead_uniform[:rows].index_select(0, owner)
        kept = self._kept(chosen.logits)[:rows].flatten(0, 1)
        drafts = self._drafts[:rows].view(-1)
        draw_drafts(
            chosen.logits,
            chosen.ids,
            self._sampling.tensors.rows(owner),
            uniform,
            0,
            Filtered(self._filtered.stats[:rows].flatten(0, 1)),
            num_accepted=(self._accepted[:rows, None] + slots).flatten(),
            places=DraftPlaces(kept, drafts, self._target_ids),
        )

    def _choose_keyed(self, step: int, chosen: Chosen) -> None:
        """By the noise of the drafts' positions: the acceptance then needs nothing of what they were drawn from."""
        rows = len(chosen.ids) // chosen.slots
        draw_keyed(
            chosen.logits,
            chosen.ids,
            self._sampling.tensors.first(rows),
            self._sampling.seed[:rows],
            num_accepted=self._accepted,
            step=step + 1,
            target_ids=self._target_ids,
            out=self._drafts[:rows, step] if chosen.slots == 1 else self._drafts[:rows].view(-1),
            into=chosen.ids,
        )

    @property
    def in_half_precision(self) -> bool:
        """Whether logits are kept in less than float32."""
        return self._logits is not None and self._logits.dtype != torch.float32

    def kept(self, place: int, count: int) -> StateDict:
        """Copies of the logits [count, Vd] and statistics [count, 4] from which a row's first drafts were drawn; none
        where they are keyed."""
        if self._logits is None:
            return {}
        stats = self._filtered.stats[place, :count]
        return {"draft_logits": self._logits[place, :count].clone(), "draft_stats": stats.clone()}

    def keep(self, place: int, tensors: StateDict, count: int, temperature: float) -> None:
        """Store what `kept` returns, of drafts made elsewhere; "draft_probs" become logits that no filter changes."""
        if self._sampling.seed is not None:
            return
        if "draft_probs" in tensors:
            q = tensors["draft_probs"][:count]
            logits = temperature * q.log()
            peak = q.amax(1)
            lowest = logits.masked_fill(q == 0, torch.inf).amin(1)
            first = (logits == lowest[:, None]).int().argmax(1)
            stats = torch.stack([temperature * peak.log(), lowest, first.float(), 1 / peak], 1)
        else:
            logits = tensors["draft_logits"][:count]
            stats = tensors["draft_stats"][:count]
        self._kept(logits)[place, :count] = logits
        self._filtered.stats[place, :count] = stats

    def proposal(self, sources: Tensor) -> Proposal | None:
        """Draft distributions of rows [J]; sources: [J] int64 their rows here. None before the first draft."""
        return None if self._logits is None else Proposal(self._logits, self._filtered, self._inverse, sources)

    def proposal_of(self, rows: int, sources: Tensor | None) -> Proposal | None:
        """The same of J rows; sources: [R] int64, the rows here of the first R; None where row i is row i."""
        places = torch.arange(rows, device=self._drafts.device)
        if sources is not None:
            places[: len(sources)] = sources
        return self.proposal(places)

    def _kept(self, logits: Tensor) -> Tensor:
        if self._logits is None:
            with torch.inference_mode(False):
                # Made at the first draft, because only then the head's dtype and Vd are known. A normal tensor: an
                # inference tensor could not be written while graphs are captured, under no_grad.
                self._logits = logits.new_zeros(*self._drafts.shape, logits.shape[1])
        return self._logits


def decide_sampled(
    logits: Tensor,
    greedy: Tensor,
    index: Tensor,
    num_drafts: Tensor,
    sampling: DeviceSampling,
    result: PackedResult,
    proposal: Proposal | None,
) -> None:
    """Decide the sampled rows of a verification that was decided greedily: `result` is changed in place.

    Args:
        logits: [T, V]; greedy: [T] int64 their arg max; index: [J, n+1] int64 into them.
        num_drafts: [J]. sampling: parameters of J rows, for n drafts or more. proposal: None if every draft was greedy.
    """
    rows = index.reshape(-1)
    if sampling.seed is not None:
        ids = draw_keyed(logits, greedy, sampling.tensors, sampling.seed, index=rows)
        accept_equal(ids, num_drafts, result)
        return
    filtered = Filtered.empty(len(rows), device=logits.device)
    filter_rows(logits, greedy, sampling.tensors, filtered, index=rows)
    accept_drafts(
        logits,
        index,
        filtered,
        sampling.tensors,
        num_drafts,
        sampling.accept_uniform,
        sampling.next_uniform,
        result.packed,
        proposal,
    )
