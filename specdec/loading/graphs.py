"""Whether rounds run from CUDA graphs: they are tried where they shall, and given up where they may."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from attention.hf.weights import runs_plainly
from specdec.config import EngineConfig
from specdec.errors import InvariantError, KernelBuildError
from specdec.execution.base import Drafter, Executor
from specdec.execution.eager import EagerExecutor
from specdec.interrupts import interrupt_in
from specdec.loading.backends import GraphChoice
from specdec.loading.progress import log
from specdec.loading.warming import loading_thread
from specdec.target.target import Target
from specdec.user_warnings import warn_user

if TYPE_CHECKING:
    from specdec.execution.graphs import GraphExecutor

_MOST_LETTERS = 200
_NO_REASON = (InvariantError, KernelBuildError)
"""Bugs of ours, and kernels that rounds without graphs need as well: never a reason to run without."""


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
            loading_thread().join()
        from specdec.execution.graphs import GraphExecutor

        gc.collect()  # dropped models of ours remove their hooks from this one: not while it is traced
        try:
            self._made = GraphExecutor(*self._parts)
        except Exception as error:
            if interrupt_in(error) is not None:
                raise
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
                gc.collect()  # else Python looks through all that compiling left in the midst of a round: half a second
                return self._made
        except Exception as error:
            if self._made is not None:
                self._made.release()
            if self._choice.required or isinstance(error, _NO_REASON) or interrupt_in(error) is not None:
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
        model = self._parts[0].hf_model
        quantised = dict.fromkeys(type(layer).__name__ for layer in model.modules() if not runs_plainly(layer))
        name = type(model).__name__ + (f" with quantised layers ({', '.join(quantised)})" if quantised else "")
        warn_user(
            f"{name} runs without CUDA graphs, several times slower in small batches: {reason}. "
            "cuda_graphs=True shows the whole error, cuda_graphs=False is silent"
        )


def _in_words(error: Exception) -> str:
    """The first line of what an error says, with its type."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return said if len(said) <= _MOST_LETTERS else f"{said[:_MOST_LETTERS]}…"
