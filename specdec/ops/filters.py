"""Top-k, top-p and min-p of sampled rows on a GPU, without a sort.

Every filter keeps an upper set of the tokens in the order (logit, index), so what all three keep together is described
by the lowest logit that is kept and the first index that is kept among tokens of that logit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Parameters(Protocol):
    """Sampling parameters of J rows, [J] each and contiguous (`SamplingTensors`); temperature 0 marks a greedy row."""

    @property
    def temperature(self) -> torch.Tensor:
        """float32."""

    @property
    def top_k(self) -> torch.Tensor:
        """int32; 0: off."""

    @property
    def top_p(self) -> torch.Tensor:
        """float32; 1: off."""

    @property
    def min_p(self) -> torch.Tensor:
        """float32; 0: off."""


@dataclass(frozen=True)
class Filtered:
    """What the filters leave of rows of logits: enough to compute any token's probability from its logit.

    Undefined for greedy rows (temperature 0).

    Attributes:
        stats: [..., 4] float32, the last dimension contiguous: largest logit | lowest kept logit | first kept index
            among tokens of that logit | sum of exp((logit - largest) / temperature) over the kept tokens. Where min-p
            keeps less than that, it decides: p is zero below min_p times the largest.
    """

    stats: torch.Tensor

    @classmethod
    def empty(cls, *shape: int, device: torch.device) -> Filtered:
        """Room for rows of this shape."""
        return cls(torch.empty(*shape, 4, dtype=torch.float32, device=device))

    def step(self, step: int) -> Filtered:
        """Column `step` of [R, K] rows: a view."""
        return Filtered(self.stats[:, step])

    def probs(self, logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
        """Probabilities [R, V] float32 of rows [R, V], each with its temperature > 0 and min_p [R], in torch."""
        peak, threshold, first, total = (s[:, None] for s in self.stats.unbind(-1))
        x = logits.float()
        weight = torch.where(x == peak, 1.0, ((x - peak) / temperature[:, None]).exp())
        index = torch.arange(x.shape[1], device=x.device)
        kept = (x > threshold) | ((x == threshold) & (index >= first))
        return torch.where(kept & (weight >= min_p[:, None]), weight, 0.0) / total


def filter_rows(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    sampling: Parameters,
    out: Filtered,
    *,
    index: torch.Tensor | None = None,
) -> None:
    """What the filters leave of the rows with temperature > 0, as `target_probs` has it; other rows of `out` stay.

    The result of a row has the same bits whatever else is in the batch: masses are float32, summed in a tree that
    depends on V alone. A boundary may fall otherwise than in the reference where the mass is within about 1e-6 of it.

    Args:
        logits: [T, V] bfloat16, float16 or float32, columns side by side.
        peaks: [T] int64 of any stride, the arg max of each row of `logits`.
        sampling: of J rows, J a divisor of R: those of row r are number r // (R / J).
        out: [R, 4], rows of any stride.
        index: [R] int64, contiguous, which row of `logits` each row is; None: T = R rows in order.
    """
    from specdec.ops.filters_kernel import launch_filters

    parameters = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    launch_filters(logits, peaks, parameters, out.stats, index)
