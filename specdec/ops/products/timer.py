"""How long matmuls of one shape take on a GPU when their weights come from memory, as in a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import torch

from specdec.ops.products.choice import Launch

_CACHES = 3
"""The weights of one turn are so many times as large as the L2 cache."""
_MOST_WEIGHTS = 32


class GpuTimer:
    """Launches read one weight after the other, so that none is still in the L2 cache when its turn comes again.

    A long read goes before each span, during which the host queues it, and nothing waits: so what is measured is the
    device's time even of launches that take the host a little longer than the device.
    """

    def __init__(self, weights: Sequence[torch.Tensor], tokens: int) -> None:
        """weights: of the model, all of one shape [O, I]; where they are too few, copies of the first."""
        first = weights[0]
        self._x = torch.randn(tokens, first.shape[1], device=first.device, dtype=first.dtype)
        size = first.numel() * first.element_size()
        least = _CACHES * torch.cuda.get_device_properties(first.device).L2_cache_size
        count = min(-(-least // size), _MOST_WEIGHTS)
        used = list(weights[:count])
        self._weights = cycle(used + [first.clone() for _ in range(count - len(used))])
        self._long = torch.zeros(least // 4, device=first.device)

    def __call__(self, launches: Sequence[Launch], calls: int, rounds: int) -> list[float]:
        """See `Timer`. Launches take turns in every round; the first call of each, which loads it, does not count.

        The least of the rounds counts: what else runs on the device can only lengthen them.
        """
        works = [self._runs(launch) for launch in launches]
        torch.cuda.synchronize(self._x.device)
        spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in launches]
        for _ in range(rounds):
            for launch, own, runs in zip(launches, spans, works, strict=True):
                if runs:
                    own.append(self._span(launch, calls))
        torch.cuda.synchronize(self._x.device)
        each = [[1e3 * start.elapsed_time(end) / calls for start, end in own] for own in spans]
        return [min(own, default=float("inf")) for own in each]

    def _runs(self, launch: Launch) -> bool:
        try:
            launch(self._x, next(self._weights))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # cuBLASLtError, an Exception: an algorithm that the library listed and refuses
            return False
        return True

    def _span(self, launch: Launch, calls: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._long.sum()
        start.record()
        for weight in islice(self._weights, calls):
            launch(self._x, weight)
        end.record()
        return start, end
