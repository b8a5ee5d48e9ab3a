"""The processes that run one target together: the calls in which several must agree, and the case of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdec.values import Json

E = TypeVar("E")
GRAPH_PASSES: list[Callable[[Any], None]] = []
"""Run first on every compiled graph: passes of a divided target's operators."""


class Reading:
    """How a checkpoint is read: here all of it. options: further arguments of transformers' `from_pretrained`."""

    options: Mapping[str, Any] = {}

    def while_reading(self) -> AbstractContextManager[None]:
        """Entered around `from_pretrained`."""
        return nullcontext()

    def finish(self, model: Any) -> None:
        """Called with the model that was read and found complete; may change it in place."""


class Group:
    """The processes that run one target together: here this process alone, which has all of the target.

    Code that loads, tests or runs a target makes these calls wherever several processes would have to agree. A target
    that is divided among processes has a subclass; all of its processes make the same calls in the same order.

    Attributes:
        size: number of processes. lost: whether another process was lost before `close`.
    """

    size: int = 1
    lost: bool = False

    def share(self, ids: Tensor) -> None:
        """Overwrite `ids`, contiguous int64 on the device, with the first process's ids; here they are unchanged."""

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait on the host for an event of the device.

        Raises:
            RanksLostError: another process is lost, and the event would never come.
        """
        event.synchronize()

    def before_launch(self, target: Any) -> None:
        """Called with the `TargetArrays` of every round before it is launched.

        Raises:
            RanksLostError: the processes would launch different rounds.
        """

    def note_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        """Called with every CUDA graph before it is captured."""

    def least(self, values: Sequence[int]) -> list[int]:
        """The smallest of all processes' values, place by place."""
        return list(values)

    def gather(self, rows: list[list[int]]) -> list[list[list[int]]]:
        """Every process's table of int64 numbers, in the order of the processes."""
        return [rows]

    def copies(self, name: str) -> int:
        """How many processes in a row hold the same part of this tensor of the target, which add up to the whole."""
        return 1

    def reading(self, config: Any, found: Any) -> Reading:
        """How the target of a configuration is read; `found`: its `AutoClass`.

        Raises:
            UnsupportedModelError: it cannot be divided.
        """
        return Reading()

    def check_target(self, probed: Any) -> None:
        """Raises UnsupportedModelError for a `TargetProbe` of a model that runs in one process only."""

    def check_whole(self, call: str) -> None:
        """Raises InvalidInputError, which names `call`, where this process has only a part of the weights."""

    def engine(self, make: Callable[..., E], *parts: Any) -> E:
        """`make(*parts)`, an engine, or one that keeps all processes at the same place."""
        return make(*parts)

    def run(self, function: Callable[..., E], engine: Any, *arguments: Any) -> E:
        """Call a function of a module with the engine and these arguments in every process, between two rounds; returns
        the result here.

        Raises:
            RanksLostError: another process is lost.
        """
        return function(engine, *arguments)

    def facts(self) -> Json | None:
        """For `SpeculativeModel.describe`; None for one process."""
        return None

    def close(self) -> None:
        """Let the other processes go. Idempotent."""


ALONE = Group()
"""One process, which has all of the target."""
