"""CUDA graphs of a target's rounds: whether they are wanted, loading the compiler for them, compiling and capturing."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attention.backends.base import AttentionBackend, GraphBackend
from attention.hf.weights import runs_plainly
from attention.threads import start_thread
from drafters.base import Head
from drafters.loops.base import AnyLoop, GraphLoop
from specdec.config import EngineConfig
from specdec.errors import InvalidInputError, InvariantError, KernelBuildError
from specdec.execution.base import Drafter, Executor
from specdec.execution.eager import EagerExecutor
from specdec.interrupts import interrupt_in
from specdec.loading.backends import runs_evenly
from specdec.loading.progress import log
from specdec.options.kinds import OrAuto
from specdec.user_warnings import warn_user
from specdec.wrapped.alterations import unseen_state
from specdec.wrapped.probing import TargetProbe
from specdec.wrapped.target import Target

if TYPE_CHECKING:
    from specdec.execution.graphs import GraphExecutor

_NICE = 10
"""Niceness of the compiler's processes."""
_LEFT_TO_TORCH = (ImportError, AttributeError, AssertionError, RuntimeError, OSError)
"""Errors of torch versions with other names, or without such processes. They start what they need when they compile."""
_MOST_LETTERS = 200
_NO_REASON = (InvariantError, KernelBuildError)
"""Bugs of specdec, and kernels that rounds without graphs need as well: never a reason to run without graphs."""


@dataclass(frozen=True)
class GraphChoice:
    """CUDA graphs: required, attempted with fallback, or off.

    Attributes:
        reason: why they are off, "" if they are attempted. required: a failure is an error; else rounds run without.
        expected: whether being off needs no warning.
    """

    reason: str
    required: bool = False
    expected: bool = True


def choose_graphs(
    backend: AttentionBackend,
    loop: AnyLoop | None,
    cuda_graphs: OrAuto,
    uncapturable: str = "",
) -> GraphChoice:
    """Decide on CUDA graphs: True and False decide; "auto" uses them if they can be captured.

    loop: the head's draft loop; None without a head. uncapturable: see the function of that name.

    Raises:
        InvalidInputError: a backend, a draft loop or a target that has no graphs where they are required, by True or by
            the backend; or False with a backend that needs them.
    """
    needs = backend.batch_invariant and not runs_evenly(backend)
    name = backend.name
    required = cuda_graphs is True or needs
    if cuda_graphs is True and uncapturable:
        raise InvalidInputError(f"cuda_graphs=True: {uncapturable}; give 'auto' or False")
    if needs and uncapturable:
        raise InvalidInputError(f"backend={name!r} runs from CUDA graphs alone: {uncapturable}")
    if required and not isinstance(backend, GraphBackend):
        raise InvalidInputError(f"cuda_graphs=True needs a backend for a GPU that has graphs, not {name!r}")
    without = "" if loop is None or isinstance(loop, GraphLoop) else f"{loop.name} run without CUDA graphs"
    if required and without:
        raise InvalidInputError(
            f"{without}, and so not with backend='batch_invariant'; use backend='flashinfer', cuda_graphs=False"
        )
    if needs and cuda_graphs is False:
        raise InvalidInputError(f"backend={name!r} needs cuda_graphs=True: its model is a compiled one")
    if required or cuda_graphs is False:
        return GraphChoice("" if required else "cuda_graphs=False", required)
    if not isinstance(backend, GraphBackend):
        return GraphChoice(f"backend {name!r} has none")
    reason = without or uncapturable
    return GraphChoice(reason, expected=not reason)


def uncapturable(probed: TargetProbe, head: Head | None) -> str:
    """Why rounds of a target cannot run from CUDA graphs, in words; "" where they can.

    Graphs are compiled and captured outside of inference mode, where torch counts no writes to tensors made inside.
    They call no hooks, parametrizations and forwards of the user's, and hold only some functions of recurrent layers.
    """
    if probed.recurrent_calls:
        from attention.recurrence.functions import recurrences_of

        functions = recurrences_of(probed.model.device)
        if not functions.capturable:
            return f"recurrent layers are computed by {functions.name} functions, which no CUDA graph can hold"
    modules = [module for module in (probed.model, head) if isinstance(module, nn.Module)]
    if any(tensor.is_inference() for module in modules for tensor in module.parameters()):
        return "parameters were made in torch.inference_mode(); load the model outside of it"
    found = unseen_state(probed.model)
    return f"the model has {found}, which a replayed graph does not call" if found else ""


class Graphs:
    """The attempt to run a target's rounds from CUDA graphs. state: "on", or "off: " and the reason."""

    def __init__(self, target: Target, drafter: Drafter | None, config: EngineConfig, choice: GraphChoice) -> None:
        self._parts = (target, drafter, config)
        self._model = target.hf_model
        self._choice = choice
        self._made: GraphExecutor | None = None
        self._error: Exception | None = None
        self.state = f"off: {choice.reason}" if choice.reason else "on"

    def compile(self) -> None:
        """Compile target and head for CUDA graphs, if they are wanted. Errors are raised by `executor`."""
        if self._choice.reason:
            return
        log.info("loading the compiler")
        if self._model.device.type == "cuda":
            loading_thread().join()  # else two threads could start the compiler's processes, see `make_pool`
        from specdec.execution.graphs import GraphExecutor

        gc.collect()  # dropped SpeculativeModels remove their hooks from this model now, not while it is traced
        try:
            self._made = GraphExecutor(*self._parts)
        except Exception as error:
            if interrupt_in(error) is not None:
                raise
            self._error = error

    def executor(self) -> Executor:
        """Capture, and return the executor of rounds; without graphs, and with a warning, where these are optional and
        fail.

        The model is then as it was before `compile`.

        Raises:
            Exception: the error of compiling or capturing, if graphs are required.
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
            # Anything that the compiler, a kernel or the allocator may raise: graphs are optional here.
            self._made = self._error = None
            # The first line of an error's message, with its type.
            first = str(error).strip().partition("\n")[0].strip()
            said = f"{type(error).__name__}: {first}" if first else type(error).__name__
            reason = said if len(said) <= _MOST_LETTERS else f"{said[:_MOST_LETTERS]}…"
            self.state = f"off: {reason}"
            self._warn(reason)
            gc.collect()
            # After gc: graphs refer to themselves and hold their memory until they are collected.
            if self._model.device.type == "cuda":
                torch.cuda.empty_cache()
        else:
            if not self._choice.expected:
                self._warn(self._choice.reason)
        return EagerExecutor(*self._parts)

    def _warn(self, reason: str) -> None:
        quantised = dict.fromkeys(type(layer).__name__ for layer in self._model.modules() if not runs_plainly(layer))
        name = type(self._model).__name__ + (f" with quantised layers ({', '.join(quantised)})" if quantised else "")
        warn_user(
            f"{name} runs without CUDA graphs, several times slower in small batches: {reason}. "
            "cuda_graphs=True shows the whole error, cuda_graphs=False is silent"
        )


@cache
def loading_thread() -> Thread:
    """The thread that loads the compiler and starts the processes in which it compiles kernels, begun once a process.

    Both take seconds. The processes import torch, at a low priority: compilers of attention kernels are what a first
    start waits for in the end.
    """
    return start_thread(_warm, name="load the compiler")


def _warm() -> None:
    with suppress(*_LEFT_TO_TORCH):
        from torch._inductor.async_compile import AsyncCompile

        make_pool(AsyncCompile)
    with suppress(ImportError):  # raised again where it is needed
        import specdec.execution.graphs  # noqa: F401 (with the compiler)


def make_pool(compiler: Any) -> None:
    """Start the compiler's processes. Called on one thread: with two at once, torch would start them twice.

    compiler: torch's AsyncCompile.
    """
    compiler.warm_pool()  # first computes a hash of torch's sources
    process = getattr(compiler.process_pool(), "process", None)
    if process is not None and hasattr(os, "setpriority"):
        own = os.getpriority(os.PRIO_PROCESS, process.pid)
        os.setpriority(os.PRIO_PROCESS, process.pid, max(own, _NICE))  # those that it forks inherit it
    compiler.wakeup()  # else the process pool would start its workers only at the first compilation
