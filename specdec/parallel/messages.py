"""What rank 0 tells the other ranks, one way, and the few words that come back: plain dataclasses, pickled.

To the others each goes with the number of the model that it is for.

The connection is a socket pair between a process and its own child: nobody else can write to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Join:
    """Join the group, by a file that all ranks meet by. device: "cpu" or "cuda"."""

    rank: int
    size: int
    device: str
    rendezvous: str


@dataclass(frozen=True)
class Load:
    """Load a model. target, draft, options: see `SpeculativeModel.from_pretrained`.

    text_ids: token ids of the head's self-test.
    """

    target: str
    draft: str | None
    options: Any
    text_ids: Sequence[int]


@dataclass(frozen=True)
class Submit:
    """`Engine.submit` with these arguments."""

    token_ids: Sequence[int]
    params: Any
    sample_index: int
    eos_token_ids: Sequence[int] | None


@dataclass(frozen=True)
class Abort:
    """`Engine.abort` with these ids."""

    request_ids: Sequence[int]


@dataclass(frozen=True)
class Step:
    """`Engine.step`."""


@dataclass(frozen=True)
class Launching:
    """Rank 0 launches a round with this schedule digest, within a step."""

    digest: int


@dataclass(frozen=True)
class Forget:
    """`Engine.forget_prefixes`."""


@dataclass(frozen=True)
class Run:
    """Call a function ("module:name") with the model and these arguments, as rank 0 does."""

    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Close:
    """Close the model."""


@dataclass(frozen=True)
class Started:
    """Back to rank 0: the process runs, and everything could be imported."""


@dataclass(frozen=True)
class Done:
    """Back to rank 0: the model of this number is loaded."""

    number: int


@dataclass(frozen=True)
class Failed:
    """Back to rank 0: a load failed, or these are the last words of the rank. kind: the error's class."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
