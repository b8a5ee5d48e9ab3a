"""What is sampled of a batch of a round benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from benchmarks.synthetic import SAMPLED
from specdec.requests.sampling import SamplingParams


@dataclass(frozen=True)
class Kind:
    """Which rows of a batch are sampled: all but greedy_share of them, spread evenly, or none."""

    sampled: bool = False
    greedy_share: float = 0.0

    def params(self, rows: int, new_tokens: int) -> list[SamplingParams]:
        """Of each row."""
        kinds = [SAMPLED if drawn else {} for drawn in self.sampled_rows(rows)]
        return [SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, **kind) for kind in kinds]  # type: ignore[arg-type]

    @property
    def facts(self) -> dict[str, Any]:
        """For a line of results; empty for a greedy batch."""
        return {"sampled": True, "greedy_share": self.greedy_share} if self.sampled else {}

    @classmethod
    def of(cls, line: dict[str, Any]) -> Kind:
        """The kind whose `facts` are in a line.

        >>> Kind.of({"rows": 4} | Kind(True, 0.5).facts)
        Kind(sampled=True, greedy_share=0.5)
        """
        return cls(line.get("sampled", False), line.get("greedy_share", 0.0))

    def sampled_rows(self, rows: int) -> list[bool]:
        """Of each row, whether it is sampled.

        >>> Kind(True, 0.5).sampled_rows(5)
        [True, False, True, False, True]
        """
        greedy = np.floor(np.arange(rows + 1) * self.greedy_share) if self.sampled else np.arange(rows + 1)
        return (np.diff(greedy) == 0).tolist()


def kinds_of(sampled: bool, greedy_shares: str) -> list[Kind]:
    """The batches to measure: greedy ones, or one of every share, where all greedy rows are a greedy batch.

    Raises:
        click.BadParameter: a share that is no number from 0 to 1.

    >>> kinds_of(True, "1,0.5")
    [Kind(sampled=False, greedy_share=0.0), Kind(sampled=True, greedy_share=0.5)]
    """
    if not sampled:
        return [Kind()]
    try:
        shares = [float(share) for share in greedy_shares.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share <= 1 for share in shares):
        raise click.BadParameter(f"--greedy-share takes numbers from 0 to 1 with commas between; given {greedy_shares}")
    return [Kind() if share == 1 else Kind(True, share) for share in shares]
