"""In which order the requests of one call get their rows."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def admission_order(lengths: Sequence[int], rows: int) -> list[int]:
    """First come, first served, but for requests that would still run when all others are done: those go first in time.

    A batch that runs out of requests ends with a few long ones, whose rounds read all weights for hardly any token. So
    before each place it is asked when the rows would be through with everything if they shared it evenly; the longest
    request that is left is let in as soon as it would end later than that, and else the next one. Requests of equal
    lengths stay as they came.

    Args:
        lengths: the most new tokens of each request. rows: how many run at once.

    Returns:
        Indices of the requests.

    Source: scheduling by least laxity on identical machines; A. K. Mok, "Fundamental Design Problems of Distributed
        Systems for the Hard-Real-Time Environment", MIT 1983. The common deadline is the bound of McNaughton, 1959.

    >>> admission_order([1, 1, 1, 1, 4], 2)  # two rows: the last one would begin at 2 and end at 6, where 4 is enough
    [4, 0, 1, 2, 3]
    >>> admission_order([5, 1, 3, 1, 1, 1], 2)
    [0, 1, 2, 3, 4, 5]
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
