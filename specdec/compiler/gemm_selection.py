"""Choose the algorithms of a start's matmuls: read from disk where known, else timed as long as time is left."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn

from attention.backends.limits import HALF
from attention.hf.weights import is_plain_weight
from specdec.compiler.siblings import SiblingLinear
from specdec.errors import OutputError
from specdec.ops.gemm import Algorithm, Launch, Library, Matmul, ProductShape, library_of, use
from specdec.ops.linear import MOST_TOKENS, usual_product
from specdec.run_files import cache_folder, write_atomically

log = logging.getLogger("specdec")
_FORMAT = 2
_LOCK_SECONDS = 10


class ChoiceStore:
    """The choices for one GPU and one version of the library.

    An unreadable file counts as missing, and a failed write is ignored: neither is an error.
    """

    def __init__(self, gpu: str, version: int, folder: Path | None = None) -> None:
        """gpu: its name and whatever else changes its timings."""
        self._gpu = gpu
        self._version = version
        name = re.sub(r"[^A-Za-z0-9.-]+", "_", f"{gpu} cublaslt {version}")
        self.path = (cache_folder() / "products" if folder is None else folder) / f"{name}.json"

    def read(self) -> dict[str, Algorithm | None]:
        """Choices by the name of their shape, without damaged entries; None: no algorithm beats the usual call."""
        try:
            found = json.loads(self.path.read_text("utf-8"))
            same = (found["format"], found["gpu"], found["library"]) == (_FORMAT, self._gpu, self._version)
            choices = dict(found["choices"]) if same else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("ignoring %s, which is damaged (%s)", self.path, error)
            return {}
        return {name: found for name, entry in choices.items() if isinstance(found := _choice(entry), Algorithm | None)}

    def add(self, choices: dict[ProductShape, Algorithm | None]) -> bool:
        """Merge into the file's current content; returns whether that worked."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=_LOCK_SECONDS):
                both = self.read() | {str(shape): choice for shape, choice in choices.items()}
                entries = {name: found and [found.data.hex(), found.workspace] for name, found in sorted(both.items())}
                content = {"format": _FORMAT, "gpu": self._gpu, "library": self._version, "choices": entries}
                # Whole: `read` takes no lock and must never see half a file.
                write_atomically(self.path, json.dumps(content, indent=1) + "\n")
        except (OSError, OutputError) as error:  # a lock that cannot be had is a TimeoutError, which is an OSError
            log.warning("choices of matmul algorithms are not kept: %s", error)
            return False
        return True


def _choice(entry: Any) -> Algorithm | str | None:
    """An entry of the file; a damaged one as words."""
    if entry is None:
        return None
    try:
        data, workspace = entry
        found = Algorithm(bytes.fromhex(data), int(workspace))
    except (TypeError, ValueError, OverflowError) as error:
        return str(error)
    return found if found.workspace >= 0 else "a negative workspace"


FINALISTS = 4
NEAR = 1.08
"""Algorithms that are slower than the best by more in a brief timing are no finalists. More or slower finalists changed
none of 192 choices on an H200 (docs/log/starts.md)."""
_SPAN_US = 400
_MOST_CALLS = 4
"""A long timing is this many microseconds of calls, but at most this many calls: more calls of a long matmul add
nothing."""
LEAST_GAIN = 0.02
"""A choice that gains less than this share of the time is noise: the library's own stays."""


Timer = Callable[[Sequence[Launch], int, int], list[float]]
"""(launches of one shape, calls, rounds) -> µs of a call of each: the least of `rounds` means; inf where one fails."""


def fastest(
    algorithms: Sequence[Algorithm], launcher: Callable[[Algorithm], Launch], usual: Launch, timer: Timer
) -> Algorithm | None:
    """The best algorithm; None if none beats the usual call. All algorithms are timed briefly, the best of
    them at length and in turn with the usual call."""
    launches = [launcher(each) for each in algorithms]
    brief = timer(launches, 2, 2)
    least = min(brief, default=float("inf"))
    best = sorted((us, i) for i, us in enumerate(brief) if us <= NEAR * least and us < float("inf"))[:FINALISTS]
    calls = min(max(round(_SPAN_US / max(least, 1)), 1), _MOST_CALLS)
    usual_us, *final = timer([usual, *(launches[i] for _, i in best)], calls, 6)
    us, winner = min(((us, i) for us, (_, i) in zip(final, best, strict=True)), default=(float("inf"), -1))
    gains = usual_us < float("inf") and us <= (1 - LEAST_GAIN) * usual_us
    return algorithms[winner] if gains else None


_CACHES = 3
"""Size of one turn's weights in L2 caches."""
_MOST_WEIGHTS = 32


class GpuTimer:
    """Launches read one weight after the other, so that none is still in the L2 cache when its turn comes again.

    A long read goes before each span, during which the host queues it, and nothing waits: so the measured time is the
    device's time even of launches that take the host a little longer than the device.
    """

    def __init__(self, weights: Sequence[Tensor], tokens: int) -> None:
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
                    start = torch.cuda.Event(enable_timing=True)
                    end = torch.cuda.Event(enable_timing=True)
                    self._long.sum()  # the long read of the class's docstring; its result is not used
                    start.record()
                    for weight in islice(self._weights, calls):
                        launch(self._x, weight)
                    end.record()
                    own.append((start, end))
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


MOST_SECONDS = 4.0
"""Time for timing in one start. Shapes that do not fit into it are left to the next start."""


def invariant_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I], weight [O, I] -> x · weightᵀ [T, O] by specdec's own batch-invariant kernel."""
    from specdec.ops.linear_kernel import launch_invariant_linear

    return launch_invariant_linear(x, weight, None)


Alike = Callable[[Matmul, Tensor], Callable[[Algorithm], bool]]
"""(matmul, weight [O, I]) -> whether an algorithm has the bits of the batch-invariant kernel."""


def sums_alike(matmul: Matmul, weight: Tensor) -> Callable[[Algorithm], bool]:
    """Whether an algorithm gives the bits of the batch-invariant kernel: then it adds up products in the same order.

    Compared by numbers of which the large ones cancel out, in columns in random order. What is left has the rounding
    errors of every partial sum in its upper bits, so another order shows in a single number of the smallest product.
    """
    generator = torch.Generator(weight.device).manual_seed(0)  # the user's own stays as it is
    tokens, width = matmul.shape.tokens, weight.shape[1]
    x, weight = (
        torch.randn((rows, width), generator=generator, device=weight.device, dtype=weight.dtype)
        for rows in (tokens, weight.shape[0])
    )
    large, opposite = torch.randperm(width, generator=generator, device=weight.device)[: width // 4 * 2].chunk(2)
    x *= 2**-9
    x[:, large] *= 2**17
    x[:, opposite] = -x[:, large]
    weight[:, opposite] = weight[:, large]
    right = invariant_product(x, weight)

    def is_alike(algorithm: Algorithm) -> bool:
        try:
            return torch.equal(matmul.launcher(algorithm)(x, weight), right)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # as in `GpuTimer._runs`
            return False

    return is_alike


Wanted = Mapping[ProductShape, Sequence[Tensor]]
"""The weights [O, I] of each shape, on one device."""


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


def choose(
    wanted: Wanted,
    library: Library,
    store: ChoiceStore,
    timer: Callable[[Sequence[Tensor], int], Timer] = GpuTimer,
    clock: Callable[[], float] = time.perf_counter,
    most_seconds: float = MOST_SECONDS,
    alike: Alike | None = None,
) -> Tally:
    """Choose for every shape, and use what is chosen.

    Few tokens come first: most rounds have few, and timing those takes least time; of as many tokens the weights that
    take longest to read.

    timer: made of the weights and the number of tokens of one shape. alike: only algorithms for which it is true are
    taken, for batch-invariant matmuls.
    """
    tally = Tally(len(wanted))
    usual = usual_product if alike is None else invariant_product
    started = clock()
    kept = store.read()
    new = {}
    for shape, weights in sorted(wanted.items(), key=lambda each: (each[0].tokens, -sum(w.nbytes for w in each[1]))):
        matmul = library.matmul(shape)
        algorithm = kept.get(str(shape))
        try:
            if str(shape) in kept and (
                algorithm is None
                or (matmul.supports(algorithm) and (alike is None or alike(matmul, weights[0])(algorithm)))
            ):
                tally.read += 1
            elif clock() - started < most_seconds:
                timed = timer(weights, shape.tokens)
                algorithms = matmul.algorithms()
                if alike is not None:
                    algorithms = list(filter(alike(matmul, weights[0]), algorithms))
                new[shape] = algorithm = fastest(algorithms, matmul.launcher, usual, timed)
                tally.timed += 1
            else:
                continue
        except torch.OutOfMemoryError:  # the memory left does not suffice for comparing or timing
            continue
        if algorithm is not None:
            use(weights[0].device, shape, matmul.launcher(algorithm), alike is not None)
            tally.chosen += 1
    tally.seconds = clock() - started
    if new:
        store.add(new)
    return tally


def choose_products(readers: Iterable[tuple[object, Iterable[int]]], batch_invariant: bool = False) -> str:
    """Choose the algorithm of every cuBLASLt matmul of compiled code, and return a summary for the log.

    Call it after siblings were fused and before anything is captured, while the device is idle.
    readers: modules (others have no weights) and the numbers of tokens that they are captured for. batch_invariant:
    only algorithms that add up in the order of specdec's own kernel are chosen, so that they change no bit.
    """
    wanted = wanted_products(readers)
    if not wanted:
        return "none to choose"
    device = next(iter(wanted.values()))[0].device
    library = library_of(device)
    if not isinstance(library, Library):
        return f"left to the library ({library})"
    facts = torch.cuda.get_device_properties(device)
    with torch.cuda.device(device):
        gpu = f"{facts.name} {facts.multi_processor_count}{' batch-invariant' * batch_invariant}"
        alike = sums_alike if batch_invariant else None
        tally = choose(wanted, library, ChoiceStore(gpu, library.version), alike=alike)
        torch.cuda.empty_cache()  # graphs have a private memory pool, which could not reuse timing's memory
    said = f"{tally}, cuBLASLt {library.version}"
    log.info("matmul algorithms: %s", said)
    return said


def wanted_products(readers: Iterable[tuple[object, Iterable[int]]]) -> Wanted:
    """The shapes that the choice concerns, with their weights, each once, all on the first one's device."""
    found: dict[ProductShape, dict[int, Tensor]] = {}
    device = None
    for module, numbers in readers:
        for weight in product_weights(module) if isinstance(module, nn.Module) else ():
            device = weight.device if device is None and weight.is_cuda else device
            if weight.device == device and weight.dtype in HALF:
                rows, width = weight.shape
                shapes = (ProductShape(weight.dtype, rows, width, tokens) for tokens in numbers if tokens > MOST_TOKENS)
                for shape in shapes:
                    if shape.is_aligned:
                        found.setdefault(shape, {}).setdefault(weight.data_ptr(), weight)
    return {shape: list(weights.values()) for shape, weights in found.items()}


def product_weights(module: nn.Module) -> list[Tensor]:
    """Weights [O, I] of the linear layers without bias as compiled code reads them, siblings' once."""
    found: dict[int, Tensor] = {}
    for layer in module.modules():
        if not isinstance(layer, nn.Linear) or layer.bias is not None:
            continue
        if not is_plain_weight(layer.weight):
            continue  # compiled code multiplies by it in the quantisation library's own operators
        weight = layer.fused_weight if isinstance(layer, SiblingLinear) else layer.weight
        found.setdefault(weight.data_ptr(), weight.detach())
    return list(found.values())
