"""Acceptance of drafts, greedy or by speculative sampling. Lossless, on the device, pure."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.requests.target_probs import draw


@dataclass(frozen=True)
class VerificationResult:
    """The outcome of one verification.

    Attributes:
        num_accepted: [B] int64, accepted drafts of each row, at most its n_i.
        next_token: [B] int64, the target's own token after them: the next bonus token.
    """

    num_accepted: Tensor
    next_token: Tensor


@dataclass(frozen=True)
class SampledInputs:
    """Inputs of sampled acceptance, without the drafts.

    target_probs: [B, K+1, V] p at the bonus token and after each draft (one-hot for greedy rows).
    draft_probs: [B, K, V] q on the target's vocabulary, or None when every draft was greedy (one-hot).
    accept_uniform: [B, K]; next_uniform: [B, K+1], one for every place that the next token may have.
    """

    target_probs: Tensor
    draft_probs: Tensor | None
    accept_uniform: Tensor
    next_uniform: Tensor


def accept_greedy(drafts: Tensor, num_drafts: Tensor, target_ids: Tensor) -> VerificationResult:
    """The longest prefix of drafts equal to the target's own argmax, then the target's token.

    Args:
        drafts: [B, K] int64; num_drafts: [B], drafts past it do not exist; target_ids: [B, K+1] argmax ids.
    """
    matches = drafts == target_ids[:, :-1]
    num_accepted = _leading(matches, num_drafts)
    return VerificationResult(num_accepted, target_ids.gather(1, num_accepted[:, None])[:, 0])


def accept_sampled(drafts: Tensor, num_drafts: Tensor, inputs: SampledInputs) -> VerificationResult:
    """Speculative sampling: accept draft x with probability min(1, p(x)/q(x)), else resample from norm(max(p - q, 0)).

    After the last draft (all accepted) the bonus token comes from p; also where the residual has no mass.
    drafts: [B, K] int64; num_drafts: [B].

    Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318), algorithm 2.
    """
    p = inputs.target_probs
    q = inputs.draft_probs
    p_draft = p[:, :-1].gather(2, drafts[:, :, None])[:, :, 0]  # [B, K]
    q_draft = torch.ones_like(p_draft) if q is None else q.gather(2, drafts[:, :, None])[:, :, 0]
    num_accepted = _leading(inputs.accept_uniform * q_draft < p_draft, num_drafts)
    rejected = num_accepted < num_drafts
    at = num_accepted[:, None, None]
    p_next = p.gather(1, at.expand(-1, 1, p.shape[2]))[:, 0]  # [B, V]
    residual = (p_next - _q_at(drafts, q, num_accepted, p_next)).clamp(min=0)
    # The residual can sum to 0 by rounding where p and q are nearly equal; then p itself is sampled.
    usable = rejected & (residual.sum(-1) > 0)
    uniform = inputs.next_uniform.gather(1, num_accepted[:, None])[:, 0]
    return VerificationResult(num_accepted, draw(torch.where(usable[:, None], residual, p_next), uniform))


def _leading(matches: Tensor, num_drafts: Tensor) -> Tensor:
    exists = torch.arange(matches.shape[1], device=matches.device) < num_drafts[:, None]
    return (matches & exists).long().cumprod(1).sum(1)


def _q_at(drafts: Tensor, q: Tensor | None, at: Tensor, like: Tensor) -> Tensor:
    """q of the first rejected draft [B, V]; rows without one get an arbitrary row (the caller masks them)."""
    if drafts.shape[1] == 0:
        return torch.zeros_like(like)
    column = at.clamp(max=drafts.shape[1] - 1)[:, None]
    if q is None:
        return torch.zeros_like(like).scatter_(1, drafts.gather(1, column), 1.0)
    return q.gather(1, column[:, :, None].expand(-1, 1, q.shape[2]))[:, 0]
