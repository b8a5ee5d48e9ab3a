"""What is sampled of a batch of a round benchmark, and what else its requests ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.synthetic import SAMPLED
from specdec.requests.sampling import SamplingParams
from specdec.requests.user_code import row_wise


def _favour_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor of a user's, as cheap as one may be."""
    scores[:, ::2] += 1.0
    return scores


ASKS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties": {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "logit_bias": dict.fromkeys(range(100), 1.0),
        "min_new_tokens": 32,
    },
    "logprobs": {"logprobs": 5},
    "processor": {"logits_processor": _favour_even},
    "batched-processor": {"logits_processor": row_wise(_favour_even, batched=True)},
    "one-processor": {"logits_processor": _favour_even},
}
"""What every row of a batch asks for, or its first one alone, by name."""


@dataclass(frozen=True)
class Kind:
    """Which rows of a batch are sampled: all but greedy_share of them, spread evenly, or none. asks: of ASKS."""

    sampled: bool = False
    greedy_share: float = 0.0
    asks: str = "nothing"

    def params(self, rows: int, new_tokens: int) -> list[SamplingParams]:
        """Of each row."""
        kinds: list[dict[str, Any]] = [SAMPLED if drawn else {} for drawn in self.sampled_rows(rows)]
        asking = 1 if self.asks.startswith("one-") else rows
        kinds = [kind | ASKS[self.asks] if row < asking else kind for row, kind in enumerate(kinds)]
        return [SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, **kind) for kind in kinds]

    @property
    def facts(self) -> dict[str, Any]:
        """For a line of results; empty for a greedy batch that asks for nothing."""
        found: dict[str, Any] = {"sampled": True, "greedy_share": self.greedy_share} if self.sampled else {}
        return found if self.asks == "nothing" else found | {"asks": self.asks}

    @classmethod
    def of(cls, line: dict[str, Any]) -> Kind:
        """The kind whose `facts` are in a line.

        >>> Kind.of({"rows": 4} | Kind(True, 0.5).facts)
        Kind(sampled=True, greedy_share=0.5, asks='nothing')
        """
        return cls(line.get("sampled", False), line.get("greedy_share", 0.0), line.get("asks", "nothing"))

    def sampled_rows(self, rows: int) -> list[bool]:
        """Of each row, whether it is sampled.

        >>> Kind(True, 0.5).sampled_rows(5)
        [True, False, True, False, True]
        """
        greedy = np.floor(np.arange(rows + 1) * self.greedy_share) if self.sampled else np.arange(rows + 1)
        return (np.diff(greedy) == 0).tolist()


def kinds_of(sampled: bool, greedy_shares: list[float], asks: list[str]) -> list[Kind]:
    """The batches to measure: greedy ones, or one of every share, where all greedy rows are a greedy batch; each with
    everything that is asked for.

    >>> [kind.facts for kind in kinds_of(True, [1, 0.5], ["nothing"])]
    [{}, {'sampled': True, 'greedy_share': 0.5}]
    """
    if not sampled:
        return [Kind(asks=each) for each in asks]
    return [Kind(share < 1, share if share < 1 else 0.0, each) for share in greedy_shares for each in asks]
