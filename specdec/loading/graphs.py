"""Whether rounds run from CUDA graphs: they are tried where they shall, and given up where they may."""

from __future__ import annotations

import gc
import os
import warnings
from contextlib import suppress
from functools import cache
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from specdec.config import EngineConfig
from specdec.errors import InvariantError, KernelBuildError, SpecdecWarning
from specdec.execution.base import Drafter, Executor
from specdec.execution.eager import EagerExecutor
from specdec.loading.backends import GraphChoice
from specdec.loading.progress import log
from specdec.target.target import Target

if TYPE_CHECKING:
    from specdec.execution.graphs import GraphExecutor

_MOST_LETTERS = 200
_NICE = 10
"""Niceness of the compiler's processes."""
_NO_REASON = (InvariantError, KernelBuildError)
"""Bugs of ours, and kernels that rounds without graphs need as well: never a reason to run without."""


def warm_compiler() -> None:
    """Load the compiler in the background, and start the processes in which it compiles kernels: both take seconds.

    The processes import torch. They give way to others, such as the compilers of attention kernels, which are what a
    first start waits for in the end.
    """
    _warming()


@cache
def _warming() -> Thread:
    """Once a process."""
    thread = Thread(target=_warm, name="load the compiler", daemon=True)
    thread.start()
    return thread


def _warm() -> None:
    with suppress(ImportError, AttributeError):  # of a version with other names: it starts them when it compiles
        from torch._inductor.async_compile import AsyncCompile

        _make_pool(AsyncCompile)
    with suppress(ImportError):  # raised again where it is needed
        import specdec.execution.graphs  # noqa: F401 (with the compiler)


def _make_pool(compiler: Any) -> None:
    """compiler: torch's AsyncCompile. It makes its processes twice when two threads ask for them at once."""
    compiler.warm_pool()  # first computes a hash of torch's sources
    process = getattr(compiler.process_pool(), "process", None)
    if process is not None and hasattr(os, "setpriority"):
        own = os.getpriority(os.PRIO_PROCESS, process.pid)
        os.setpriority(os.PRIO_PROCESS, process.pid, max(own, _NICE))  # those that it forks inherit it
    compiler.wakeup()


class Graphs:
    """The attempt to run a target's rounds from CUDA graphs.

    Attributes:
        state: "on", or "off: " and the reason.
    """

    def __init__(self, target: Target, drafter: Drafter | None, config: EngineConfig, choice: GraphChoice) -> None:
        self._parts = (target, drafter, config)
        self._choice = choice
        self._made: GraphExecutor | None = None
        self._error: Exception | None = None
        self.state = "on" if choice.wanted else f"off: {choice.reason}"

    def compile(self) -> None:
        """Compile target and head where graphs are wanted. What goes wrong is kept until `executor` is called."""
        if not self._choice.wanted:
            return
        log.info("loading the compiler")
        if self._parts[0].hf_model.device.type == "cuda":
            _warming().join()
        from specdec.execution.graphs import GraphExecutor

        try:
            self._made = GraphExecutor(*self._parts)
        except Exception as error:
            self._error = error

    def executor(self) -> Executor:
        """Capture, and return what runs the rounds; where graphs may be given up and must be, what runs them without.

        A SpecdecWarning says why. The model is as it was before `compile` then.

        Raises:
            Exception: what went wrong, where graphs are required.
        """
        try:
            if self._error is not None:
                raise self._error
            if self._made is not None:
                self._made.capture()
                return self._made
        except Exception as error:
            if self._made is not None:
                self._made.release()
            if self._choice.required or isinstance(error, _NO_REASON):
                raise
            self._give_up(_in_words(error))
        else:
            if not self._choice.expected:
                self._warn(self._choice.reason)
        return EagerExecutor(*self._parts)

    def _give_up(self, reason: str) -> None:
        """No graphs; what there is of them is freed."""
        self._made = self._error = None
        self.state = f"off: {reason}"
        self._warn(reason)
        gc.collect()
        if self._parts[0].hf_model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _warn(self, reason: str) -> None:
        name = type(self._parts[0].hf_model).__name__
        warnings.warn(
            f"{name} runs without CUDA graphs, several times slower in small batches: {reason}. "
            "cuda_graphs=True shows the whole error, cuda_graphs=False is silent",
            SpecdecWarning,
            stacklevel=2,
        )


def _in_words(error: Exception) -> str:
    """The first line of what an error says, with its type."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return said if len(said) <= _MOST_LETTERS else f"{said[:_MOST_LETTERS]}…"
