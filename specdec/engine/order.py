"""In which order the requests of one call get their rows."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def admission_order(lengths: Sequence[int], rows: int) -> list[int]:
    """First come, first served, but a request that would otherwise end last goes first in time.

    A batch that runs out of requests ends with a few long ones, whose rounds read all weights for hardly any token. So
    before each place it is asked when the rows would be through with everything if they shared it evenly; where the
    longest request that is left would end no earlier than that, it is next, and else the one that came first. Requests
    of equal lengths stay as they came. Rows are not shared evenly, nor are all tokens of a request needed: an estimate.

    Args:
        lengths: the most new tokens of each request. rows: how many run at once.

    Returns:
        Indices of the requests.

    Source: a queue until zero laxity, as S. Cho, S.-K. Lee, A. Han and K.-J. Lin have earliest deadlines until zero
        laxity ("Efficient Real-Time Scheduling Algorithms for Multiprocessor Systems", IEICE Transactions on
        Communications, 2002). The common deadline is a lower bound, R. McNaughton's of tasks that can be interrupted
        ("Scheduling with Deadlines and Loss Functions", Management Science, 1959).

    >>> admission_order([1, 1, 1, 1, 4], 2)  # two rows: the last one would begin at 2 and end at 6, where 4 is enough
    [4, 0, 1, 2, 3]
    >>> admission_order([1, 1, 6, 9], 3)  # no row is through before 9, whoever begins when
    [3, 0, 1, 2]
    """
    came = range(len(lengths))
    if len(lengths) <= rows or min(lengths) == max(lengths):
        return list(came)
    end = max(sum(lengths) / rows, max(lengths))
    by_length = iter(sorted(came, key=lambda i: -lengths[i]))
    in_turn, longest = iter(came), next(by_length)
    ends, taken, order = [0.0] * rows, set[int](), list[int]()
    while len(order) < len(lengths):
        while longest in taken:
            longest = next(by_length)
        late = ends[0] + lengths[longest] >= end
        chosen = longest if late else next(i for i in in_turn if i not in taken)
        heapq.heapreplace(ends, ends[0] + lengths[chosen])
        taken.add(chosen)
        order.append(chosen)
    return order
