"""A router's choice as one operator: the experts of a token, and their weights.

torch's own top-k of some hundred scores is a kernel and a sort, and softmax and normalising two kernels more: 13 µs a
layer at one token on an H200.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from attention.hf.custom_op import opaque_operator

MOST_EXPERTS = 1024
SUM, SOFTMAX = "sum", "softmax"
"""What the chosen ones' scores are divided by: their sum; or they are the logits of a softmax among them."""


def _empty(
    scores: torch.Tensor, chosen: int, softmax: bool, normalise: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (scores.shape[0], chosen)
    return scores.new_empty(shape, dtype=dtype), scores.new_empty(shape, dtype=torch.int64)


@opaque_operator(_empty)
def best_experts(
    scores: torch.Tensor, chosen: int, softmax: bool, normalise: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `chosen` largest of scores [T, E] -> their weights [T, k] of a dtype, and places [T, k] int64, largest first.

    Of equal scores the first is chosen, a NaN before all others. Everything is computed in float32.

    Args:
        softmax: of all scores, before they are chosen. normalise: "", `SUM` or `SOFTMAX`, of the chosen.
    """
    if scores.is_cuda:
        from specdec.ops.routing_kernel import launch_best_experts

        return launch_best_experts(scores, chosen, softmax, normalise, dtype)
    wide = scores.float()
    wide = wide.softmax(-1) if softmax else wide
    sorted_scores, places = torch.sort(wide, dim=-1, descending=True, stable=True)
    best = sorted_scores[:, :chosen]
    if normalise == SUM:
        best = best / best.sum(-1, keepdim=True)
    elif normalise == SOFTMAX:
        best = F.softmax(best, -1)
    return best.to(dtype), places[:, :chosen].contiguous()
