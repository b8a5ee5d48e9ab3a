"""The target distribution that sampling parameters describe, in torch, and draws from it."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.requests.sampling import SamplingTensors


def target_probs(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """The distribution a request samples from: temperature, then top-k, top-p, min-p.

    Order and tie rules are those of transformers' logits warpers (generation/logits_process.py): ties at the k-th logit
    are all kept; top-p keeps the token that crosses the mass; each filter renormalises before the next.

    Args:
        logits: [R, V]; sampling: one row of parameters a logits row; greedy rows (temperature 0) give a one-hot.

    Returns:
        [R, V] float32 probabilities.
    """
    probs = warped(logits, sampling).softmax(-1)
    one_hot = torch.zeros_like(probs).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where((sampling.temperature == 0)[:, None], one_hot, probs)


def warped(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """The logits [R, V] float32 whose softmax a sampled row's distribution is; a greedy row's are of no use."""
    # A greedy row has temperature 0: any divisor will do.
    scaled = logits.float() / torch.where(sampling.temperature == 0, 1.0, sampling.temperature)[:, None]
    if not sampling.filters:
        return scaled
    kept = _top_k_top_p(scaled, sampling.top_k, sampling.top_p)
    probs = kept.softmax(-1)
    drop = probs < sampling.min_p[:, None] * probs.amax(-1, keepdim=True)
    return kept.masked_fill(drop, float("-inf"))


def _top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """One sort serves both. Of equal logits at the boundary of top-p those with the lowest index go first."""
    vocab = logits.shape[-1]
    ordered, index = logits.sort(dim=-1, descending=False, stable=True)
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long()
    below = ordered < ordered.gather(1, (vocab - k)[:, None])
    mass = ordered.masked_fill(below, float("-inf")).softmax(-1).cumsum(-1)
    drop = mass <= (1 - top_p)[:, None]
    drop[:, -1] = False  # the most probable token remains, even if rounding puts its mass at 1
    drop &= (top_p < 1)[:, None]
    drop |= below
    return logits.masked_fill(torch.zeros_like(drop).scatter_(1, index, drop), float("-inf"))


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: the first index whose cumulative probability exceeds u·total.

    Args:
        probs: [R, V] non-negative weights, not all zero; uniform: [R] in [0, 1).

    Returns:
        [R] int64. Never an index of probability zero.
    """
    # double: float32 sums over a vocabulary of 100,000 would drop the smallest probabilities.
    cumulative = probs.double().cumsum(-1)
    target = uniform.double()[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # u·total may round to the total, which lies past the last token with a probability.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1)
    return torch.minimum(index, last)
