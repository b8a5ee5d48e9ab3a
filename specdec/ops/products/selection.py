"""Choosing the algorithms of a start's matmuls: read where they are known, timed where not, as long as time is left."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specdec.ops.linear import MOST_TOKENS, usual_product
from specdec.ops.products.choice import Algorithm, Choice, Launch, Timer, fastest
from specdec.ops.products.library import Library, library_of
from specdec.ops.products.shape import ProductShape
from specdec.ops.products.store import ChoiceStore
from specdec.ops.products.table import use
from specdec.ops.products.timer import GpuTimer

MOST_SECONDS = 4.0
"""Time for timing in one start. What it does not suffice for is left to the next start."""
log = logging.getLogger("specdec")
Use = Callable[[torch.device, ProductShape, Launch], None]


class Offer(Protocol):
    """What a library has for one shape, see `Matmul`."""

    def algorithms(self) -> list[Algorithm]: ...

    def supports(self, algorithm: Algorithm) -> bool: ...

    def launcher(self, algorithm: Algorithm) -> Launch: ...


class Offers(Protocol):
    """A library on a device, see `Library`."""

    version: int

    def matmul(self, shape: ProductShape) -> Any: ...


@dataclass(frozen=True)
class Wanted:
    """Weights [O, I] of one shape and dtype, and the numbers of tokens that they are multiplied with."""

    weights: Sequence[torch.Tensor]
    tokens: frozenset[int]

    def shapes(self) -> list[ProductShape]:
        """One for each number of tokens, the smallest first; none that the choice does not concern."""
        weight = self.weights[0]
        rows, width = weight.shape
        every = (ProductShape(weight.dtype, rows, width, tokens) for tokens in sorted(self.tokens))
        return [shape for shape in every if shape.tokens > MOST_TOKENS and shape.is_aligned]


@dataclass
class Tally:
    """What a start did: shapes in all, those read from disk, those timed, those with an algorithm of their own."""

    shapes: int = 0
    read: int = 0
    timed: int = 0
    chosen: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """
        >>> str(Tally(40, 30, 8, 25, 0.84))
        '25 of 40 shapes by measurement (30 from disk, 8 timed in 0.8 s, 2 left to the next start)'
        """
        left = self.shapes - self.read - self.timed
        rest = f", {left} left to the next start" if left else ""
        timed = f"{self.timed} timed in {self.seconds:.1f} s" if self.timed else "0 timed"
        return f"{self.chosen} of {self.shapes} shapes by measurement ({self.read} from disk, {timed}{rest})"


class Selection:
    """Chooses for one device.

    Attributes:
        tally: what was done.
    """

    def __init__(
        self,
        library: Offers,
        store: ChoiceStore,
        timer: Callable[[Sequence[torch.Tensor], int], Timer] = GpuTimer,
        use: Use = use,
        clock: Callable[[], float] = time.perf_counter,
        most_seconds: float = MOST_SECONDS,
    ) -> None:
        """timer: made of the weights and the number of tokens of one shape."""
        self.tally = Tally()
        self._library, self._store, self._timer, self._use = library, store, timer, use
        self._clock, self._most_seconds = clock, most_seconds

    def choose(self, wanted: Sequence[Wanted]) -> None:
        """Choose for every shape. Few tokens come first: most rounds have few, and timing those takes least time; of
        as many tokens the weights that take longest to read."""
        started, kept, new = self._clock(), self._store.read(), {}
        largest_first = sorted(wanted, key=_bytes_read, reverse=True)
        pairs = [(shape, each) for each in largest_first for shape in each.shapes()]
        for shape, each in sorted(pairs, key=lambda pair: pair[0].tokens):
            self.tally.shapes += 1
            offer: Offer = self._library.matmul(shape)
            choice = kept.get(str(shape))
            if choice is not None and (choice.algorithm is None or offer.supports(choice.algorithm)):
                self.tally.read += 1
            elif self._clock() - started < self._most_seconds and (choice := self._timed(each, shape, offer)):
                new[shape] = choice
                self.tally.timed += 1
            else:
                continue
            self._take(each.weights[0].device, shape, offer, choice)
        self.tally.seconds = self._clock() - started
        if new:
            self._store.add(new)

    def _timed(self, wanted: Wanted, shape: ProductShape, offer: Offer) -> Choice | None:
        """None where the memory left does not suffice for timing."""
        try:
            timer = self._timer(wanted.weights, shape.tokens)
            return fastest(offer.algorithms(), offer.launcher, usual_product, timer)
        except torch.OutOfMemoryError:
            return None

    def _take(self, device: torch.device, shape: ProductShape, offer: Offer, choice: Choice) -> None:
        if choice.algorithm is not None:
            self._use(device, shape, offer.launcher(choice.algorithm))
            self.tally.chosen += 1


def select_products(wanted: Sequence[Wanted]) -> str:
    """Choose the algorithms of matmuls on one GPU, and say what was done.

    Call it while nothing else runs on the device; weights of half precision on a GPU.
    """
    if not wanted:
        return "none to choose"
    device = wanted[0].weights[0].device
    library = library_of(device)
    if not isinstance(library, Library):
        return f"left to the library ({library})"
    facts = torch.cuda.get_device_properties(device)
    selection = Selection(library, ChoiceStore(f"{facts.name} {facts.multi_processor_count}", library.version))
    with torch.cuda.device(device):
        selection.choose([each for each in wanted if each.weights[0].device == device])
        torch.cuda.empty_cache()  # graphs have memory of their own, which could not use what timing took
    said = f"{selection.tally}, cuBLASLt {library.version}"
    log.info("matmul algorithms: %s", said)
    return said


def _bytes_read(wanted: Wanted) -> int:
    return sum(weight.numel() * weight.element_size() for weight in wanted.weights)
