"""TokenPrefixes: the tokens before each of N logits rows, on the device, as options of requests read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NOBODY = -1
"""Padding id: the prefix has no token there."""


@dataclass(frozen=True)
class TokenPrefixes:
    """Tokens before each of N logits rows: a request's committed ones, then the drafts that the row follows.

    Attributes:
        ids: [N, L] int64, from the first token on; NOBODY after the last.
        lens: [N] int64 tokens of each prefix. prompt_lens: [N] int64 tokens of the prompt.
    """

    ids: torch.Tensor
    lens: torch.Tensor
    prompt_lens: torch.Tensor

    @classmethod
    def of(
        cls,
        committed: torch.Tensor,
        lens: torch.Tensor,
        prompt_lens: torch.Tensor,
        owner: torch.Tensor,
        followed: torch.Tensor,
        there: torch.Tensor,
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
    def there(self) -> torch.Tensor:
        """[N, L] bool."""
        return self.ids != NOBODY

    def rows(self, index: torch.Tensor) -> TokenPrefixes:
        """The prefixes of some logits rows [n]."""
        return TokenPrefixes(self.ids[index], self.lens[index], self.prompt_lens[index])

    def prompt_mask(self) -> torch.Tensor:
        """[N, L] bool: tokens of the prompt."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.prompt_lens[:, None]

    def tails(self, count: int) -> torch.Tensor:
        """[N, count] int64: the last tokens, NOBODY before the first."""
        place = self.lens[:, None] - count + torch.arange(count, device=self.ids.device)
        return torch.where(place >= 0, self.ids.gather(1, place.clamp(min=0)), NOBODY)
