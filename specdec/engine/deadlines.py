"""Deadlines: when requests with a time limit are to end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from math import inf

from specdec.requests.request import Request, Update


class Deadlines:
    """When requests with `SamplingParams.max_time` end.

    moments: (time.perf_counter seconds, request id), soonest first.
    """

    def __init__(self) -> None:
        self.moments: list[tuple[float, int]] = []
        self._of: dict[int, float] = {}

    def add(self, request: Request) -> None:
        """Note a request, or that its time of submission is another; nothing where it has no limit."""
        if request.params.max_time in (None, inf):
            return
        self.discard(request.id)
        self._of[request.id] = moment = request.times.submitted + request.params.max_time
        insort(self.moments, (moment, request.id))

    def discard(self, request_id: int) -> None:
        """Forget a request that has ended. Its place is searched for, however many wait."""
        moment = self._of.pop(request_id, None)
        if moment is not None:
            del self.moments[bisect_left(self.moments, (moment, request_id))]

    def updates(self, now: float, requests: Mapping[int, Request], others: Sequence[Update]) -> list[Update]:
        """End those of these requests, by id, whose time is over, waiting or running.

        They are named until they are gone: a round that is run again after an interrupt names them again. A request
        that leaves for another engine goes on there.

        There must be moments. others: updates of the same round; requests that they end are left out.
        """
        if self.moments[0][0] > now:
            return []
        due = bisect_right(self.moments, (now, self.moments[-1][1]))
        alive = [moment for moment in self.moments[:due] if moment[1] in requests]
        self.moments = [*alive, *self.moments[due:]]
        found = {update.request_id: update for update in others}
        over = [requests[i] for _, i in alive if not (i in found and found[i].last) and not requests[i].leaves]
        return [r.timed_out(now, found[r.id].progress if r.id in found else r.progress) for r in over]
