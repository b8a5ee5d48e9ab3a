"""AttentionSpec: an attention layer's requirements on a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from attention.cached import cached_property
from attention.errors import InvalidInputError

if TYPE_CHECKING:  # the command line's list of options is read without it
    import numpy as np
    from torch import Tensor

_Positions = TypeVar("_Positions", int, "np.ndarray")


class Reach(NamedTuple):
    """How far back queries see: from the first multiple of `step` that is less than `tokens` positions before them.

    A sliding window of w positions is Reach(w), and chunks of c positions are Reach(c, c):

    >>> window, chunks = Reach(4), Reach(4, 4)
    >>> [(window.first_seen(p), chunks.first_seen(p)) for p in (3, 4, 7, 8)]
    [(0, 0), (1, 4), (4, 4), (5, 8)]
    """

    tokens: int
    step: int = 1

    def first_seen(self, positions: _Positions) -> _Positions:
        """The first position that queries at `positions` or later see; 0 or less where they see all before them."""
        first = positions - (self.tokens - self.step)
        return first if self.step == 1 else first // self.step * self.step

    def __str__(self) -> str:
        """The name in messages and names of groups."""
        return f"window {self.tokens}" if self.step == 1 else f"chunks of {self.tokens}"


Windows = Sequence[tuple[Reach, int]]
"""The reach of each windowed group, and the pages of its pool."""


@dataclass(frozen=True)
class TemperatureTuning:
    """A query at position p is multiplied by 1 + scale·log(1 + ⌊(p + 1) / floor⌋); scale 0 leaves it as it is.

    Source: Nakanishi 2025, arXiv 2501.19399, in the form of transformers' modeling_llama4.py.
    """

    scale: float
    floor: float


@dataclass(frozen=True)
class AttentionSpec:
    """An attention layer's requirements on a kernel; layers with equal specs share one plan.

    Attributes:
        num_q_heads, num_kv_heads: Hq and Hkv; Hq is a multiple of Hkv.
        head_dim_k, head_dim_v: width of a query/key head and of a value head.
        scale: factor on q·k before softcap and softmax.
        window: number of visible positions including its own, or None for all
            (Hugging Face's convention; FlashInfer's `window_left` is `window - 1`).
        softcap: logits become softcap·tanh(logits/softcap), or None.
        has_sinks: a learned logit per query head joins the softmax's denominator.
        value_in_key: a value is the first head_dim_v columns of its key (MLA, see attention/hf/absorbed_mla.py):
            the cache keeps keys only.
        chunk_size: positions per chunk of local attention, whose queries see only keys of the same chunk; or None. A
            backend's kernel never sees it: `GroupRunner` gives its builder virtual rows that are in one chunk each.
        temperature: the factor by position that `GroupRunner` multiplies queries with before a backend, or None.
        alibi: a slope for each query head, [Hq], or None. A logit gets slope·(key's position - query's position) after
            the softcap (Source: Press et al. 2021, arXiv 2108.12409). No transformers model passes it to its attention
            interface: it is for builders without an engine, on "flex" and "torch".
        causal: a query sees no position after its own. Otherwise it sees its row's whole context and all queries of
            its row in the batch; with a window those less than `window` positions from its own, on either side. The
            torch reference computes it and, within limits, FlashInfer's backend; the others refuse it (`check_causal`).

    Raises:
        InvalidInputError: not one finite slope for each query head, slopes with values inside keys, or slopes or chunks
            where queries see positions after their own.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_in_key: bool = False
    chunk_size: int | None = None
    temperature: TemperatureTuning | None = None
    alibi: tuple[float, ...] | None = None
    causal: bool = True

    @cached_property
    def group_size(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @cached_property
    def features(self) -> tuple[str, ...]:
        """What not every kernel has, by name: a window, a softcap, sinks."""
        each = {"window": self.window, "softcap": self.softcap, "sinks": self.has_sinks or None}
        return tuple(name for name, given in each.items() if given is not None)

    @property
    def reach(self) -> Reach | None:
        """How far back the layer sees; keys before that are never read again. None if it sees all. A window within
        chunks adds no limit."""
        if self.chunk_size is not None:
            return Reach(self.chunk_size, self.chunk_size)
        return None if self.window is None else Reach(self.window)

    def room(self, query: Tensor, out: Tensor | None) -> Tensor:
        """Where a layer's results [T, Hq, Dv] of a query go: out, or else new memory."""
        return query.new_empty(query.shape[0], self.num_q_heads, self.head_dim_v) if out is None else out

    def __post_init__(self) -> None:
        if not self.causal and (self.alibi is not None or self.chunk_size is not None):
            raise InvalidInputError("causal=False has no ALiBi slopes and no chunks: leave out alibi and chunk_size")
        if self.alibi is None:
            return
        if len(self.alibi) != self.num_q_heads or not all(map(isfinite, self.alibi)):
            raise InvalidInputError(
                f"alibi={self.alibi}: give one finite slope for each of the {self.num_q_heads} query heads, or None"
            )
        if self.value_in_key:
            raise InvalidInputError("alibi with value_in_key=True: MLA has no slopes; give None")
