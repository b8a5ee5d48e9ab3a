"""What rounds launch, launched once at the start, so that no kernel of it is compiled in the midst of serving."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specdec.acceptance.packed import PackedResult
from specdec.execution.sampled import SampledDrafts, decide_sampled
from specdec.ops.argmax import greedy_ids
from specdec.rounds.fields import DeviceSampling


@contextmanager
def kernels_compiled_together(device: torch.device) -> Iterator[None]:
    """See `attention.kernels.together.compiled_together`; elsewhere than on CUDA nothing is compiled."""
    if device.type != "cuda":
        yield
        return
    from attention.kernels.together import compiled_together

    with compiled_together():
        yield


def rehearse_decisions(
    logits: torch.Tensor, rows: int, most_drafts: int, sampling: DeviceSampling, drawn: SampledDrafts | None
) -> None:
    """Decide sampled rows as rounds of any shape do, which have no more drafts than the row with most of them has.

    Args:
        logits: [T, V] of any values, T >= 1; rows: J. sampling: of J rows or more, all greedy.
        drawn: where drafts were drawn; None where they are greedy.
    """
    new = logits.new_zeros
    proposal = None if drawn is None else drawn.proposal(torch.arange(rows, device=logits.device))
    for num_drafts in range(most_drafts + 1):
        index, counts = new(rows, num_drafts + 1, dtype=torch.int64), new(rows, dtype=torch.int64)
        result = PackedResult.zeros(rows, num_drafts, logits.device)
        decide_sampled(logits, greedy_ids(logits), index, counts, sampling.first(rows), result, proposal)
