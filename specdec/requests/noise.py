"""Gumbel noise keyed by position: the draw of a token, the same whether it is the target's or a draft of it.

A token is argmax(log p + g) and a draft of it argmax(log q + g), with one noise vector g for each position of a
request. The draft is accepted where it is that token. So a request's tokens depend on no draft: only on p and on g.

Source: Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative decoding"
(arXiv 2408.07978), section 3. Probability of acceptance: sum over i of 1 / sum over j of max(p_j/p_i, q_j/q_i).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.requests.sampling import SamplingTensors
from specdec.requests.target_probs import warped

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def perturbed(logits: Tensor, sampling: SamplingTensors, seeds: Tensor, ids: Tensor | None = None) -> Tensor:
    """Scores [R, V] float32 whose arg max is a row's draw; of a greedy row its logits.

    Args:
        logits: [R, V]. sampling: a row of parameters for each; filters come before the noise. seeds: [R] int64.
        ids: [V] int64 in the target's vocabulary, where that is not 0 … V-1: so a draft has the noise of its token.
    """
    ids = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
    scores = warped(logits, sampling) + gumbel(seeds[:, None], ids)
    return torch.where((sampling.temperature == 0)[:, None], logits.float(), scores)


def gumbel(seeds: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, of int64 seeds and token ids that are broadcast.

    -log of an exponential variable E = -log(1 - w). The winner among many tokens has a small E; w keeps its exponent
    there (24 bits at 2^-18 as at 1/2), where a uniform with 24 bits would have 6 left.
    """
    w = (_shifted(_mixed(seeds + ids * _GOLDEN), 1).float() * 2.0**-63).clamp(min=2.0**-64)
    return -(-torch.log1p(-w)).log()


def _mixed(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, as `specdec.rounds.randomness` has it in numpy."""
    x = (x ^ _shifted(x, 30)) * _FACTORS[0]
    x = (x ^ _shifted(x, 27)) * _FACTORS[1]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits without the sign, which int64 would repeat."""
    return (x >> bits) & ((1 << 64 - bits) - 1)
