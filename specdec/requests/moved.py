"""A request between two engines: what it is, what it left behind where it was, and what it brings where it goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from specdec.requests.sampling import SamplingParams

Pages = tuple[tuple[int, ...], ...]
"""Pages of one request in each of an engine's pools: the target's groups, the first first, then the head's if any."""


@dataclass(frozen=True)
class MovedRequest:
    """A request whose prompt was read: all that decides its further tokens, but for keys, values and states.

    Attributes:
        prompt_token_ids, new_token_ids: committed tokens. The last new one is the bonus token: every token before it
            has its keys and values in the cache.
        params: as submitted. key: its randomness, which is the same wherever it runs.
        limit: most tokens, the prompt's and new ones together. num_drafts: K of the request.
        sample_index, eos_token_ids, variant: see `Request`.
        queue_s, prefill_s: seconds that it waited, and from there to the first token. Others: see `RequestStats`.
    """

    prompt_token_ids: tuple[int, ...]
    new_token_ids: tuple[int, ...]
    params: SamplingParams
    key: int
    limit: int
    num_drafts: int
    sample_index: int
    eos_token_ids: tuple[int, ...]
    variant: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    cached_tokens: int = 0

    @property
    def committed(self) -> np.ndarray:
        """[n] int32."""
        return np.array(self.prompt_token_ids + self.new_token_ids, np.int32)

    @property
    def computed(self) -> int:
        """Tokens with keys and values: all but the bonus token."""
        return len(self.prompt_token_ids) + len(self.new_token_ids) - 1


@dataclass(frozen=True)
class Departure:
    """A request that left its engine.

    Attributes:
        moved: the request. lease: under which its pages are held.
        pages: in each pool.
        tensors: on the host, what a round in its next engine starts from besides pages, by name: "drafts" [n] int64,
            "draft_probs" [n, Vd] float32 where they were drawn, "carried" of a draft loop that carries something from
            round to round, "state.0", … of recurrent layers.
    """

    moved: MovedRequest
    lease: str
    pages: Pages
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Arrival:
    """What a request that waits for a row has brought: pages, filled, and tensors (see `Departure`)."""

    pages: Pages
    tensors: Mapping[str, torch.Tensor]

    @property
    def num_drafts(self) -> int:
        """Drafts for its first verification."""
        return len(self.tensors["drafts"]) if "drafts" in self.tensors else 0
