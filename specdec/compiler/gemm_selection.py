"""Choose the algorithms of a start's matmuls: read from disk where known, else timed as long as time is left."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import nn

from attention.backends.limits import HALF
from attention.hf.weights import is_plain_weight
from specdec.compiler.siblings import SiblingLinear
from specdec.ops.gemm_choice import Algorithm, Launch, ProductShape, TimedAlgorithm, Timer, fastest, use
from specdec.ops.gemm_library import Library, Matmul, library_of
from specdec.ops.linear import MOST_TOKENS, usual_product

_FORMAT = 1
_LOCK_SECONDS = 10


def cache_folder() -> Path:
    """The folder of files that specdec keeps between starts: specdec in $XDG_CACHE_HOME, or in ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: relative paths are invalid and ignored.
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "specdec"


class ChoiceStore:
    """The choices for one GPU and one version of the library.

    An unreadable file counts as missing, and a failed write is ignored: neither is an error.
    """

    def __init__(self, gpu: str, version: int, folder: Path | None = None) -> None:
        """gpu: its name and whatever else changes its timings."""
        self._gpu, self._version = gpu, version
        name = re.sub(r"[^A-Za-z0-9.-]+", "_", f"{gpu} cublaslt {version}")
        self.path = (cache_folder() / "products" if folder is None else folder) / f"{name}.json"

    def read(self) -> dict[str, TimedAlgorithm]:
        """Choices by the name of their shape, without damaged entries."""
        try:
            found = json.loads(self.path.read_text("utf-8"))
            same = (found["format"], found["gpu"], found["library"]) == (_FORMAT, self._gpu, self._version)
            choices = dict(found["choices"]) if same else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("ignoring %s, which is damaged (%s)", self.path, error)
            return {}
        return {name: choice for name, entry in choices.items() if (choice := _choice(entry)) is not None}

    def add(self, choices: dict[ProductShape, TimedAlgorithm]) -> bool:
        """Merge into the file's current content; returns whether that worked."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=_LOCK_SECONDS):
                both = self.read() | {str(shape): choice for shape, choice in choices.items()}
                entries = {name: _entry(choice) for name, choice in sorted(both.items())}
                content = {"format": _FORMAT, "gpu": self._gpu, "library": self._version, "choices": entries}
                # Written to a temporary file and renamed: `read` takes no lock and must never see half a file.
                new = self.path.with_suffix(f".{os.getpid()}.new")
                new.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
                os.replace(new, self.path)
        except (OSError, TimeoutError) as error:
            log.warning("choices of matmul algorithms are not kept: %s", error)
            return False
        return True


def _entry(choice: TimedAlgorithm) -> dict[str, Any]:
    times = {"us": round(choice.us, 2), "usual_us": round(choice.usual_us, 2)}
    if choice.algorithm is None:
        return {"algorithm": None, **times}
    return {"algorithm": choice.algorithm.data.hex(), "workspace": choice.algorithm.workspace, **times}


def _choice(entry: Any) -> TimedAlgorithm | None:
    try:
        times = float(entry["us"]), float(entry["usual_us"])
        if entry["algorithm"] is None:
            return TimedAlgorithm(None, *times)
        algorithm = Algorithm(bytes.fromhex(entry["algorithm"]), int(entry["workspace"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return TimedAlgorithm(algorithm, *times) if algorithm.workspace >= 0 else None


_CACHES = 3
"""Size of one turn's weights in L2 caches."""
_MOST_WEIGHTS = 32


class GpuTimer:
    """Launches read one weight after the other, so that none is still in the L2 cache when its turn comes again.

    A long read goes before each span, during which the host queues it, and nothing waits: so the measured time is the
    device's time even of launches that take the host a little longer than the device.
    """

    def __init__(self, weights: Sequence[torch.Tensor], tokens: int) -> None:
        """weights: the model's weights of one shape [O, I], extended by copies of the first if too few."""
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

        The fastest of the rounds counts, because other work on the device can only lengthen them.
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
        self._long.sum()  # the long read of the class's docstring; its result is not used
        start.record()
        for weight in islice(self._weights, calls):
            launch(self._x, weight)
        end.record()
        return start, end


MOST_SECONDS = 4.0
"""Time for timing in one start. Shapes that do not fit into it are left to the next start."""
log = logging.getLogger("specdec")
Use = Callable[[torch.device, ProductShape, Launch], None]


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
    """Counts of one start: all shapes, shapes read from disk, shapes timed, shapes with another than the default
    algorithm."""

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
    """Chooses for one device. tally: counts of the choices."""

    def __init__(
        self,
        library: Library,
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
        largest_first = sorted(wanted, key=lambda each: sum(weight.nbytes for weight in each.weights), reverse=True)
        pairs = [(shape, each) for each in largest_first for shape in each.shapes()]
        for shape, each in sorted(pairs, key=lambda pair: pair[0].tokens):
            self.tally.shapes += 1
            offer = self._library.matmul(shape)
            choice = kept.get(str(shape))
            if choice is not None and (choice.algorithm is None or offer.supports(choice.algorithm)):
                self.tally.read += 1
            elif self._clock() - started < self._most_seconds and (choice := self._timed(each, shape, offer)):
                new[shape] = choice
                self.tally.timed += 1
            else:
                continue
            if choice.algorithm is not None:
                self._use(each.weights[0].device, shape, offer.launcher(choice.algorithm))
                self.tally.chosen += 1
        self.tally.seconds = self._clock() - started
        if new:
            self._store.add(new)

    def _timed(self, wanted: Wanted, shape: ProductShape, offer: Matmul) -> TimedAlgorithm | None:
        """None where the memory left does not suffice for timing."""
        try:
            timer = self._timer(wanted.weights, shape.tokens)
            return fastest(offer.algorithms(), offer.launcher, usual_product, timer)
        except torch.OutOfMemoryError:
            return None


def select_products(wanted: Sequence[Wanted]) -> str:
    """Choose the algorithms of matmuls on one GPU, and return a summary for the log.

    Call it while the device is idle; weights are in half precision on a GPU.
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
        torch.cuda.empty_cache()  # graphs have a private memory pool, which could not reuse timing's memory
    said = f"{selection.tally}, cuBLASLt {library.version}"
    log.info("matmul algorithms: %s", said)
    return said


def choose_products(readers: Iterable[tuple[object, Iterable[int]]], batch_invariant: bool = False) -> str:
    """Choose the algorithm of every cuBLASLt matmul of compiled code, and return a summary for the log.

    Call it after siblings were fused and before anything is captured, while the device is idle.
    readers: modules (others have no weights) and the numbers of tokens that they are captured for. batch_invariant:
    matmuls use one summation order for any number of tokens, so no choice is made.
    """
    if batch_invariant:
        return "none to choose (batch-invariant)"
    return select_products(wanted_products((m, t) for m, t in readers if isinstance(m, nn.Module)))


def wanted_products(readers: Iterable[tuple[nn.Module, Iterable[int]]]) -> list[Wanted]:
    """Weights of one shape, each once, with every number of tokens of a module that has one of them."""
    weights: dict[tuple[torch.device, torch.dtype, torch.Size], dict[int, torch.Tensor]] = {}
    tokens: dict[tuple[torch.device, torch.dtype, torch.Size], set[int]] = {}
    for module, numbers in readers:
        counts = frozenset(numbers)
        for weight in product_weights(module):
            if weight.is_cuda and weight.dtype in HALF:
                key = weight.device, weight.dtype, weight.shape
                weights.setdefault(key, {}).setdefault(weight.data_ptr(), weight)
                tokens.setdefault(key, set()).update(counts)
    return [Wanted(list(own.values()), frozenset(tokens[key])) for key, own in weights.items()]


def product_weights(module: nn.Module) -> list[torch.Tensor]:
    """Weights [O, I] of the linear layers without bias as compiled code reads them, siblings' once."""
    found: dict[int, torch.Tensor] = {}
    for layer in module.modules():
        if not isinstance(layer, nn.Linear) or layer.bias is not None:
            continue
        if not is_plain_weight(layer.weight):
            continue  # compiled code multiplies by it in the quantisation library's own operators
        weight = layer.fused_weight if isinstance(layer, SiblingLinear) else layer.weight
        found.setdefault(weight.data_ptr(), weight.detach())
    return list(found.values())
