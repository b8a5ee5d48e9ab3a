"""Vectorised forms of the rules that read a prefix: each changes the scores of N logits rows in place.

Scores are [N, V+1] float32: the last column is no token's, and places of a prefix without a token point to it. So do
tokens beyond V (embeddings may be larger than lm_head), which transformers leaves out as well. Each form launches a few
operators whatever N is, on any device, and never waits for it.

Source: huggingface/transformers, generation/logits_process.py: RepetitionPenaltyLogitsProcessor,
EncoderRepetitionPenaltyLogitsProcessor, NoRepeatNGramLogitsProcessor, EncoderNoRepeatNGramLogitsProcessor; OpenAI API
reference, "frequency and presence penalties".
"""

from __future__ import annotations

import torch

from specdec.logits.prefixes import TokenPrefixes


def penalise_tokens(scores: torch.Tensor, ids: torch.Tensor, there: torch.Tensor, penalty: torch.Tensor) -> None:
    """Divide the scores of these tokens by the penalty where positive, multiply them where negative; each once.

    Args:
        ids: [N, L] int64; there: [N, L] bool, which of them count. penalty: [N] float32.
    """
    at = _columns(scores, ids, there)
    own = scores.gather(1, at)
    scores.scatter_(1, at, torch.where(own < 0, own * penalty[:, None], own / penalty[:, None]))


def subtract_counts(
    scores: torch.Tensor, prefixes: TokenPrefixes, frequency: torch.Tensor, presence: torch.Tensor
) -> None:
    """Subtract `frequency` for each time that a token is among a row's new tokens, and `presence` once.

    Args:
        frequency, presence: [N] float32.
    """
    at = _columns(scores, prefixes.ids, prefixes.there & ~prefixes.prompt_mask())
    counts = torch.zeros_like(scores).scatter_add_(1, at, torch.ones_like(at, dtype=scores.dtype)).gather(1, at)
    scores.scatter_(1, at, scores.gather(1, at) - counts * frequency[:, None] - presence[:, None])


def ban_repeated_ngrams(scores: torch.Tensor, prefixes: TokenPrefixes, size: int, in_prompt: bool = False) -> None:
    """Give no probability to a token that would end an n-gram which the prefix has already.

    Args:
        size: n, at least 1. in_prompt: n-grams of the prompt alone.
    """
    known = prefixes.there
    if in_prompt:
        known = known & prefixes.prompt_mask()
    starts = prefixes.ids.shape[1] - size + 1
    if starts < 1:
        return
    last, same = prefixes.ids[:, size - 1 :], known[:, size - 1 :]
    if size > 1:
        tail = prefixes.tails(size - 1)
        same = same & (prefixes.lens >= size - 1)[:, None]
        for k in range(size - 1):
            same = same & (prefixes.ids[:, k : k + starts] == tail[:, k : k + 1])
    scores.scatter_(1, _columns(scores, last, same), float("-inf"))


def add_sequence_bias(
    scores: torch.Tensor, prefixes: TokenPrefixes, sequences: torch.Tensor, lens: torch.Tensor, bias: torch.Tensor
) -> None:
    """Add a bias to the last token of every sequence whose other tokens are the last ones of the prefix.

    Args:
        sequences: [S, P] int64, right-aligned, any value before a sequence's first token. lens: [S] int64 tokens of
            each, at least 1. bias: [S] float32.
    """
    most = sequences.shape[1]
    place = torch.arange(most - 1, device=scores.device)
    tail = prefixes.tails(most - 1)[:, None]  # [N, 1, P-1]
    same = (tail == sequences[None, :, :-1]) | (place < (most - lens)[:, None])[None]
    matches = same.all(2)  # [N, S]
    added = torch.where(matches, bias, 0.0).to(scores.dtype)
    scores += torch.zeros_like(scores).index_add_(1, sequences[:, -1], added)


def _columns(scores: torch.Tensor, ids: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Columns [N, L] of the scores for these tokens; the last column where a token is missing."""
    nobody = scores.shape[1] - 1
    return torch.where(there & (ids < nobody), ids, nobody)
