"""Sampled rows on a GPU: their filters (top-k, top-p, min-p), draws of drafts, and acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention.staging import A, array


@dataclass(frozen=True)
class SamplingParameters(Generic[A]):
    """Sampling parameters of rows, [J] each and contiguous, in the order in which kernels take them.

    Attributes:
        temperature: 0 marks a greedy row. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    """

    temperature: A = array(np.float32, "rows")
    top_k: A = array(np.int32, "rows")
    top_p: A = array(np.float32, "rows")
    min_p: A = array(np.float32, "rows")

    @property
    def columns(self) -> tuple[A, A, A, A]:
        """All four."""
        return self.temperature, self.top_k, self.top_p, self.min_p


Parameters = SamplingParameters[Tensor]


@dataclass(frozen=True)
class Filtered:
    """The distributions that filters leave of rows of logits, as statistics that turn a logit into its probability.

    Undefined for greedy rows (temperature 0).

    Attributes:
        stats: [..., 4] float32, the last dimension contiguous: largest logit | lowest kept logit | first kept index
            among tokens of that logit | sum of exp((logit - largest) / temperature) over the kept tokens. Where min-p
            keeps less than that, it decides: p is zero below min_p times the largest.
    """

    stats: Tensor

    @classmethod
    def empty(cls, *shape: int, device: torch.device) -> Filtered:
        """Room for rows of this shape."""
        return cls(torch.empty(*shape, 4, dtype=torch.float32, device=device))

    def step(self, step: int) -> Filtered:
        """Column `step` of [R, K] rows: a view."""
        return Filtered(self.stats[:, step])

    def probs(self, logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
        """Probabilities [R, V] float32 of rows [R, V], each with its temperature > 0 and min_p [R], in torch."""
        peak, threshold, first, total = (s[:, None] for s in self.stats.unbind(-1))
        x = logits.float()
        weight = torch.where(x == peak, 1.0, ((x - peak) / temperature[:, None]).exp())
        index = torch.arange(x.shape[1], device=x.device)
        kept = (x > threshold) | ((x == threshold) & (index >= first))
        return torch.where(kept & (weight >= min_p[:, None]), weight, 0.0) / total


def filter_rows(
    logits: Tensor, peaks: Tensor, sampling: Parameters, out: Filtered, *, index: Tensor | None = None
) -> None:
    """Filter the rows with temperature > 0, as `target_probs` does; other rows of `out` stay.

    The result of a row has the same bits whatever else is in the batch: masses are float32, summed in a tree that
    depends on V alone. A boundary may differ from the reference's where the mass is within about 1e-6 of it.

    Args:
        logits: [T, V] bfloat16, float16 or float32, columns side by side.
        peaks: [T] int64 of any stride, the arg max of each row of `logits`.
        sampling: parameters of J rows, J a divisor of R; row r uses number r // (R / J).
        out: [R, 4], rows of any stride.
        index: [R] int64, contiguous, which row of `logits` each row is; None: T = R rows in order.
    """
    from specdec.ops.filters_kernel import launch_filters

    launch_filters(logits, peaks, sampling.columns, out.stats, index)


@dataclass(frozen=True)
class Proposal:
    """The distributions that sampled drafts were drawn from: q of every draft.

    Attributes:
        logits: [D, K, Vd], the last dimension contiguous. filtered: stats [D, K, 4] of their rows.
        inverse: [V] int32, the draft id of every token of the target's vocabulary, or -1.
        sources: [J] int64, the row of D that each verified row's drafts come from; -1: they were greedy (one-hot q).
    """

    logits: Tensor
    filtered: Filtered
    inverse: Tensor
    sources: Tensor


class DraftPlaces(NamedTuple):
    """Further tensors that the drawing kernels write in addition to `ids`.

    Attributes:
        logits: [R, Vd] of any row stride: a copy of the logits drawn from, with NaN replaced by -infinity.
        drafts: [R] int64 of any stride: the draft, in the target's vocabulary.
        target_ids: [Vd] int64, the target ids of all draft ids; None where they are the same.
        accepted: [R] int64, contiguous: a copy of num_accepted; None if not needed.
    """

    logits: Tensor
    drafts: Tensor
    target_ids: Tensor | None
    accepted: Tensor | None = None


def inverse_map(target_ids: Tensor, target_vocab_size: int) -> Tensor:
    """Target ids of all draft ids [Vd] -> `Proposal.inverse` [V] int32.

    >>> inverse_map(torch.tensor([1, 3]), 5).tolist()
    [-1, 0, -1, 1, -1]
    """
    inverse = target_ids.new_full((target_vocab_size,), -1, dtype=torch.int32)
    inverse[target_ids] = torch.arange(len(target_ids), dtype=torch.int32, device=target_ids.device)
    return inverse


def draw_drafts(
    logits: Tensor, ids: Tensor, sampling: Parameters, uniform: Tensor, step: int, out: Filtered, *,
    num_accepted: Tensor | None = None, places: DraftPlaces | None = None,
) -> None:  # fmt: skip
    """Replace the greedy draft ids of rows with temperature > 0 by draws from their q = `target_probs(logits)`.

    It draws as `draw` does with uniform[row, num_accepted[row] + step] (or the last column).

    Args:
        logits: [R, Vd] bfloat16, float16 or float32, columns side by side.
        ids: [R] int64 of any stride: the arg max of each row; replaced in place.
        sampling: parameters of R rows.
        uniform: [R, columns] float32, columns side by side.
        out: stats [R, 4] of any row stride: describes q afterwards.
        num_accepted: [R] int64 of any stride; None: zeros. Read only for rows with temperature > 0.
        places: further outputs for these rows' draws.
    """
    from specdec.ops.draws_kernel import launch_drafts

    beside = (None,) * 4 if places is None else places
    launch_drafts(logits, ids, sampling.columns, uniform, step, out.stats, num_accepted, beside)


def draw_keyed(
    logits: Tensor, peaks: Tensor, sampling: Parameters, seeds: Tensor, *,
    index: Tensor | None = None, num_accepted: Tensor | None = None, step: int = 0, target_ids: Tensor | None = None,
    out: Tensor | None = None, into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The draws [R] int64 of rows by the noise of their positions, as the arg max of `perturbed`; greedy rows' arg max.

    Args:
        logits, peaks, sampling, index: as in `filter_rows`; a row has the same bits whatever else is in the batch.
        seeds: [J, columns] int64, columns side by side. Row i of the R / J of parameters j has seeds[j, i + step], or
            with num_accepted [J] int64, contiguous, seeds[j, i + step + num_accepted[j]]; or the last column.
        target_ids: [V] int64, the tokens whose noise it is. out: [R] int64 of any stride, gets the draws as these.
        into: [R] int64, contiguous, what is returned; `peaks` may be it.
    """
    from specdec.ops.greedy_kernel import launch_greedy

    filtered = Filtered.empty(len(logits if index is None else index), device=logits.device)
    filter_rows(logits, peaks, sampling, filtered, index=index)
    noise = (index, sampling.temperature, sampling.min_p, filtered.stats, seeds, num_accepted)
    return launch_greedy(logits, target_ids, out, noise, step, into)


def accept_drafts(
    logits: Tensor, index: Tensor, filtered: Filtered, sampling: Parameters, num_drafts: Tensor,
    accept_uniform: Tensor, next_uniform: Tensor, packed: Tensor, proposal: Proposal | None = None,
) -> None:  # fmt: skip
    """Decide the rows with temperature > 0 as `accept_sampled` does and rewrite them as `PackedResult.pack` would.

    Probabilities are summed exactly, in units of 2**-52, so that a row's result does not depend on the batch.

    Args:
        logits: [T, V] bfloat16, float16 or float32, columns side by side.
        index: [J, n+1] int64, contiguous: the row of logits after each token of a verification.
        filtered: stats [J·(n+1), 4], contiguous: `filter_rows` of these rows.
        sampling: parameters of J rows.
        num_drafts: [J] int64. accept_uniform: [J, n]; next_uniform: [J, n+1] float32, columns side by side.
        packed: [J, 2n+2] int64, contiguous rows: a `PackedResult` with the drafts; changed in place.
        proposal: None when every draft was greedy.
    """
    from specdec.ops.draws_kernel import launch_acceptance

    rows = (index, filtered.stats, sampling.temperature, sampling.min_p, num_drafts)
    head = None
    if proposal is not None:
        head = (proposal.logits, proposal.filtered.stats, proposal.inverse, proposal.sources)
    launch_acceptance(logits, rows, accept_uniform, next_uniform, packed, head)
