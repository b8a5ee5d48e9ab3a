"""TokenPrefixes, and vectorised forms of the rules that read them: each changes the scores of N logits rows in place.

Scores are [N, V+1] float32: the last column is no token's, and places of a prefix without a token point to it. So do
tokens beyond V (embeddings may be larger than lm_head), which transformers leaves out as well. Each form launches a few
operators whatever N is, on any device, and never waits for it.

Source: huggingface/transformers, generation/logits_process.py: RepetitionPenaltyLogitsProcessor,
EncoderRepetitionPenaltyLogitsProcessor, NoRepeatNGramLogitsProcessor, EncoderNoRepeatNGramLogitsProcessor; OpenAI API
reference, "frequency and presence penalties".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOBODY = -1
"""Padding id: the prefix has no token there."""


@dataclass(frozen=True)
class TokenPrefixes:
    """Tokens before each of N logits rows: a request's committed ones, then the drafts that the row follows.

    Attributes:
        ids: [N, L] int64, from the first token on; NOBODY after the last.
        lens: [N] int64 tokens of each prefix. prompt_lens: [N] int64 tokens of the prompt.
    """

    ids: Tensor
    lens: Tensor
    prompt_lens: Tensor

    @classmethod
    def of(
        cls,
        committed: Tensor,
        lens: Tensor,
        prompt_lens: Tensor,
        owner: Tensor,
        followed: Tensor,
        there: Tensor,
    ) -> TokenPrefixes:
        """Join committed tokens and drafts.

        Args:
            committed: [m, L'] int64 tokens of each request, with the last committed one (the bonus token) or without.
            lens: [m] int64 committed tokens, bonus token included. prompt_lens: [m] int64.
            owner: [N] int64, which request each logits row is of.
            followed: [N, n+1] int64: the bonus token, then drafts; there: [N, n+1] bool, those that the row follows.

        Example: committed [5, 6, 7], bonus token 8, drafts 1 and 2; the row after draft 1 has 5, 6, 7, 8, 1.
        """
        width = committed.shape[1] + followed.shape[1]
        column = torch.arange(width, device=committed.device).expand(len(owner), width)
        first = lens[owner][:, None] - 1  # the bonus token's column
        own = committed[owner].gather(1, column.clamp(max=committed.shape[1] - 1))
        place = (column - first).clamp(0, followed.shape[1] - 1)
        after = torch.where(there, followed, NOBODY).gather(1, place)
        is_after = column >= first
        total = lens[owner] - 1 + there.sum(1)
        ids = torch.where(is_after, after, own)
        return cls(torch.where(column < total[:, None], ids, NOBODY), total, prompt_lens[owner])

    @property
    def there(self) -> Tensor:
        """[N, L] bool."""
        return self.ids != NOBODY

    def rows(self, index: Tensor) -> TokenPrefixes:
        """The prefixes of some logits rows [n]."""
        return TokenPrefixes(self.ids[index], self.lens[index], self.prompt_lens[index])

    def prompt_mask(self) -> Tensor:
        """[N, L] bool: tokens of the prompt."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.prompt_lens[:, None]

    def tails(self, count: int) -> Tensor:
        """[N, count] int64: the last tokens, NOBODY before the first."""
        place = self.lens[:, None] - count + torch.arange(count, device=self.ids.device)
        return torch.where(place >= 0, self.ids.gather(1, place.clamp(min=0)), NOBODY)


def penalise_tokens(scores: Tensor, ids: Tensor, there: Tensor, penalty: Tensor) -> None:
    """Divide the scores of these tokens by the penalty where positive, multiply them where negative; each once.

    Args:
        ids: [N, L] int64; there: [N, L] bool, which of them count. penalty: [N] float32.
    """
    at = _columns(scores, ids, there)
    own = scores.gather(1, at)
    scores.scatter_(1, at, torch.where(own < 0, own * penalty[:, None], own / penalty[:, None]))


def subtract_counts(scores: Tensor, prefixes: TokenPrefixes, frequency: Tensor, presence: Tensor) -> None:
    """Subtract `frequency` for each time that a token is among a row's new tokens, and `presence` once.

    Args:
        frequency, presence: [N] float32.
    """
    at = _columns(scores, prefixes.ids, prefixes.there & ~prefixes.prompt_mask())
    counts = torch.zeros_like(scores).scatter_add_(1, at, torch.ones_like(at, dtype=scores.dtype)).gather(1, at)
    scores.scatter_(1, at, scores.gather(1, at) - counts * frequency[:, None] - presence[:, None])


def ban_repeated_ngrams(scores: Tensor, prefixes: TokenPrefixes, size: int, in_prompt: bool = False) -> None:
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
    last = prefixes.ids[:, size - 1 :]
    same = known[:, size - 1 :]
    if size > 1:
        tail = prefixes.tails(size - 1)
        same = same & (prefixes.lens >= size - 1)[:, None]
        for k in range(size - 1):
            same = same & (prefixes.ids[:, k : k + starts] == tail[:, k : k + 1])
    scores.scatter_(1, _columns(scores, last, same), float("-inf"))


def add_sequence_bias(scores: Tensor, prefixes: TokenPrefixes, sequences: Tensor, lens: Tensor, bias: Tensor) -> None:
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


def _columns(scores: Tensor, ids: Tensor, there: Tensor) -> Tensor:
    """Columns [N, L] of the scores for these tokens; the last column where a token is missing."""
    nobody = scores.shape[1] - 1
    return torch.where(there & (ids < nobody), ids, nobody)
