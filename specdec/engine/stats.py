"""EngineStats: counters of an engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from specdec.errors import SpecdecWarning
from specdec.requests.request import FinishReason, Update
from specdec.requests.shown import tau_words
from specdec.user_warnings import warn_user
from specdec.values import ratio

LATELY = 10
"""Seconds over which the latest rate of tokens is counted."""
_JUDGED = 256
"""Drafts of a head after which it is judged, once: less than one in a hundred accepted is chance, not a head."""


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made.

    Attributes:
        rounds: launched verifications.
        host_to_device: copies to the device.
        device_to_host: copies from it.
        preemptions: requests that lost their row because pages ran out.
        prefix_query_tokens: prompt tokens of requests that looked into the prefix cache.
        prefix_hit_tokens: the part of them in pages that were found.
        cached_tokens: the part that was not computed again. A request that drafts recomputes its last found page into
            a private page.
        interrupted: requests that lost their row because a caller's interrupt, or a round that failed and was run once
            more, struck while they ran.
        requests: finished requests.
        new_tokens: new tokens of finished requests.
        verified: verifications of finished requests.
        emitted: tokens of these verifications.
        early_reads: reads from the device before a round's decision, for grammars, processors and min_confidence.
    """

    rounds: int = 0
    host_to_device: int = 0
    device_to_host: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    cached_tokens: int = 0
    interrupted: int = 0
    requests: int = 0
    new_tokens: int = 0
    verified: int = 0
    emitted: int = 0
    early_reads: int = 0

    def __repr__(self) -> str:
        served = f"{self.requests} requests, {self.new_tokens} tokens, {self.rounds} rounds of the batch"
        lost = f"{self.preemptions} preemptions, {self.interrupted} interrupted"
        return f"EngineStats({tau_words(self.tau)}, {served}, {lost})"

    @property
    def tau(self) -> float:
        """Acceptance length over finished requests; NaN without rounds."""
        return ratio(self.emitted, self.verified)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that were found in the prefix cache; NaN where none was looked for."""
        return ratio(self.prefix_hit_tokens, self.prefix_query_tokens)


class Counters:
    """Mutable counters behind `EngineStats`, with its names. Any thread may read `stats`, a snapshot.

    transfers: host-to-device copies of the executor, over its life, when the last round was counted. ends: requests
    that have ended, by finish reason, "failed", or "dropped" by their callers. seconds: sums of the finished ones'
    waiting, prefill and decoding. reported: new tokens of all requests so far. made, last: when this was made, and when
    the last round ended, in time.perf_counter seconds.

    Only the thread that runs a round counts. A snapshot taken meanwhile may have part of that round's counts; no count
    ever decreases.
    """

    def __init__(self, transfers: int = 0) -> None:
        """transfers: copies that the executor has made before, which are not counted."""
        self.ends = Counter[FinishReason | str]()
        self.seconds = (0.0, 0.0, 0.0)
        self.reported = 0
        self.made = time.perf_counter()
        self.last = self.made
        # (second, tokens) by second modulo the length; one more place than LATELY for the second that is not over yet.
        self._lately = [(-1, 0)] * (LATELY + 1)
        self.rounds = self.host_to_device = self.device_to_host = self.preemptions = 0
        self.transfers = transfers
        self.interrupted = self.early_reads = 0
        # Tuples, replaced by one assignment: a snapshot from another thread has consistent sums.
        self._prefix = (0, 0, 0)
        self._finished = (0, 0, 0, 0)
        self._drafted = self._accepted = 0

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        counts = self.rounds, self.host_to_device, self.device_to_host, self.preemptions
        return EngineStats(*counts, *self._prefix, self.interrupted, *self._finished, self.early_reads)

    def add_reported(self, updates: Sequence[Update], now: float) -> None:
        """New tokens of a round; now: in time.perf_counter seconds."""
        tokens = sum(len(update.token_ids) for update in updates)
        second = int(now)
        self.reported = self.reported + tokens
        self.last = now
        place = second % len(self._lately)
        then, before = self._lately[place]
        self._lately[place] = second, tokens + before * (then == second)

    def lately(self, now: float) -> int:
        """New tokens of the last LATELY whole seconds."""
        return sum(tokens for second, tokens in self._lately if int(now) - LATELY <= second < int(now))

    def add_finished(self, update: Update, dropped: bool, has_head: bool) -> None:
        """Record the last update of a request. Failed and abandoned requests count only in `ends`. Warns once where a
        head's drafts are not accepted."""
        completion = update.completion
        self.ends["dropped" if dropped else "failed" if completion is None else completion.finish_reason] += 1
        if dropped or completion is None:
            return
        queue, prefill, decode, own = *self.seconds, completion.stats
        self.seconds = queue + own.queue_s, prefill + own.prefill_s, decode + own.decode_s
        requests, tokens, verified, emitted = self._finished
        pooled = completion.pooled
        counts = requests + 1, tokens + len(completion.token_ids)
        self._finished = (*counts, verified + pooled.rounds, emitted + pooled.emitted)
        is_new = self._drafted < _JUDGED
        self._drafted = self._drafted + pooled.drafted
        self._accepted = self._accepted + pooled.accepted
        if has_head and is_new and self._drafted >= _JUDGED and 100 * self._accepted < self._drafted:
            with suppress(SpecdecWarning):  # as an error it would end a round in which nothing is wrong
                warn_user(
                    f"{self._accepted} of the head's first {self._drafted} drafts were accepted: it only costs time. "
                    "Likely causes: it was trained for another model of the same shape, or another fine-tune of it; "
                    "prompts are not in the chat template that it knows; a high temperature. `specdec inspect HEAD "
                    "--target T` looks for the cause; num_speculative_tokens=0 does without the head"
                )

    def add_prefix(self, prompt: int, found: int, taken: int) -> None:
        """A request that searched the prefix cache: tokens of its prompt, found tokens, tokens not computed again."""
        prompts, hits, cached = self._prefix
        self._prefix = prompts + prompt, hits + found, cached + taken
