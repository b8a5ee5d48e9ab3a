"""RequestStats, AcceptanceStats: the rounds of a request, and acceptance over rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdec.requests.shown import tau_words
from specdec.values import ratio


@dataclass(frozen=True)
class RoundRecord:
    """One verification of one request. Prefill is not recorded.

    Attributes:
        drafted: drafts verified (n_i of that round; 0 without speculation).
        accepted: how many of them the target accepted, before trimming at a stop.
        emitted: tokens committed in this round (accepted + 1, less those after a stop or the length limit).
    """

    drafted: int
    accepted: int
    emitted: int

    @property
    def trimmed(self) -> RoundRecord:
        """The round cut at the stop: drafts past it count neither as offered nor as accepted."""
        if self.emitted > self.accepted:
            return self
        return RoundRecord(self.emitted, self.emitted, self.emitted)


@dataclass(frozen=True)
class RequestStats:
    """Statistics of one finished request.

    Attributes:
        rounds: the verification rounds, in order. The token that the prompt pass gives belongs to no round.
        prompt_tokens: the prompt's length.
        new_tokens: 1 + sum(emitted), 0 when nothing was generated.
        queue_s: wall seconds of waiting.
        prefill_s: from admission to the first token.
        decode_s: from there to the end.
        preemptions: how often the request lost its pages and was recomputed.
        prefix_hit_tokens: prompt tokens in pages that the prefix cache had when the request was admitted.
        cached_tokens: those of them that were not read again; with drafts, the last page found is.
        not_drafted: why the request had no drafts although the model has a head, in words; "" where nothing stood
            against them.
    """

    rounds: tuple[RoundRecord, ...] = ()
    prompt_tokens: int = 0
    new_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    cached_tokens: int = 0
    not_drafted: str = ""

    def __repr__(self) -> str:
        tokens = f"{self.prompt_tokens} prompt tokens, {self.new_tokens} new"
        seconds = f"{self.queue_s:.2f} + {self.prefill_s:.2f} + {self.decode_s:.2f} s"
        return f"RequestStats({tau_words(pool(self.rounds).tau)}, {len(self.rounds)} rounds, {tokens}, {seconds})"


@dataclass(frozen=True)
class AcceptanceStats:
    """Acceptance pooled over rounds (and, through `pool`, over requests).

    Attributes:
        rounds: verification rounds.
        emitted: tokens committed in them.
        drafted: drafts verified.
        accepted: drafts accepted.
        reached: reached[j] = rounds in which drafts 1..j were accepted and draft j+1 existed (conditional denominator).
        offered: offered[j] = rounds that had a draft j+1 (unconditional denominator).
        accepted_at: accepted_at[j] = rounds in which draft j+1 was accepted.
    """

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: tuple[int, ...] = ()
    offered: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    def __repr__(self) -> str:
        counts = f"{self.rounds} rounds, {self.emitted} tokens, {self.accepted} of {self.drafted} drafts accepted"
        return f"AcceptanceStats({tau_words(self.tau)}, {counts})"

    @property
    def tau(self) -> float:
        """Acceptance length: tokens emitted per target pass; 1.0 without speculation, NaN without rounds."""
        return ratio(self.emitted, self.rounds)

    @property
    def conditional(self) -> tuple[float, ...]:
        """P(draft j+1 accepted | drafts 1..j accepted and draft j+1 existed), per position j."""
        return tuple(map(ratio, self.accepted_at, self.reached))

    @property
    def unconditional(self) -> tuple[float, ...]:
        """P(drafts 1..j+1 all accepted | draft j+1 existed), per position j."""
        return tuple(map(ratio, self.accepted_at, self.offered))


def pool(rounds: Iterable[RoundRecord]) -> AcceptanceStats:
    """Pool round records, trimmed at their stops, into acceptance statistics.

    >>> s = pool([RoundRecord(3, 1, 2), RoundRecord(3, 3, 4), RoundRecord(1, 1, 2)])
    >>> s.tau, s.accepted_at, s.reached, s.offered
    (2.6666666666666665, (3, 1, 1), (3, 2, 1), (3, 2, 2))
    """
    rounds = [r.trimmed for r in rounds]
    width = max((r.drafted for r in rounds), default=0)
    return AcceptanceStats(
        rounds=len(rounds),
        emitted=sum(r.emitted for r in rounds),
        drafted=sum(r.drafted for r in rounds),
        accepted=sum(r.accepted for r in rounds),
        reached=tuple(sum(r.drafted > j and r.accepted >= j for r in rounds) for j in range(width)),
        offered=tuple(sum(r.drafted > j for r in rounds) for j in range(width)),
        accepted_at=tuple(sum(r.accepted > j for r in rounds) for j in range(width)),
    )


def speedup(tokens: float, plain_s: float, round_s: float) -> float:
    """Predicted speed-up over the target alone, decode only, of rounds of `round_s` seconds that give `tokens` tokens a
    row on average, where the target alone takes `plain_s` for each token. NaN without a time.

    Source: Leviathan et al. 2023, section 3.3, with measured times in place of a constant cost ratio.

    >>> speedup(2.5, 0.010, 0.0125)
    2.0
    """
    return tokens * plain_s / round_s if round_s > 0 else math.nan


def pool_requests(stats: Sequence[RequestStats]) -> AcceptanceStats:
    """Pool the rounds of several requests."""
    return pool(r for s in stats for r in s.rounds)
