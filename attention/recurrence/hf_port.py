"""RecurrentPort: gives a model's recurrent layers specdec's states during a specdec forward.

The functions by which transformers' modeling files mix tokens (`attention.recurrence.hf_calls`) are replaced meanwhile
by stand-ins that are made once, because a new function object would trigger recompilation. A stand-in serves threads
inside a specdec forward and calls the original on any other. The module's pre-hook records which layer calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock, get_ident
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from attention.errors import UnsupportedAttentionError
from attention.hf.mixing import RecurrentCall, modeling_files
from attention.recurrence.hf_calls import STAND_INS, Mixing, RecurrenceChannel
from attention.recurrence.runner import Recur, empty_output
from attention.recurrence.states import ConvSpec, DeltaSpec, RecurrenceSpec, ScanSpec, SsdSpec
from attention.threads import after_fork

_BOUND = "_specdec_recurrence"
Function = Callable[..., Any]


class _Entered:
    """The layer whose forward began last: its channel, the number of its first recurrent call, and how many it has and
    has made. Not the layer itself: objects that the compiler follows outlive models."""

    def __init__(self) -> None:
        self.place: tuple[RecurrenceChannel, int, int] | None = None
        self.calls = 0

    def next(self) -> tuple[RecurrenceChannel, int]:
        """The channel, and the number of the call that is being made.

        Raises:
            UnsupportedAttentionError: no probed layer makes this call, which would use another call's states.
        """
        if self.place is None or self.calls == self.place[2]:
            raise UnsupportedAttentionError(
                "a recurrence was called by a layer that the probe did not see; does a hook on the model run another "
                "model of the same modeling file?"
            )
        channel, first, _ = self.place
        self.calls += 1
        return channel, first + self.calls - 1


_traced = _Entered()
"""The entry that the compiler follows: it traces one forward at a time."""
_entered: dict[int, _Entered] = {}
"""By thread, for threads inside specdec forwards."""
_serving: dict[int, Callable[[], Mixing]] = {}
"""By thread, the function that makes the `Mixing` of the next call."""


class RecurrentPort:
    """Gives a model's recurrent layers, if it has any, specdec's states during a specdec forward."""

    def __init__(self, calls: Sequence[RecurrentCall]) -> None:
        self._channel = RecurrenceChannel()
        self._modules = list(dict.fromkeys(call.module for call in calls))
        owners = [call.module for call in calls]
        self._bound = {m: (self._channel, owners.index(m), owners.count(m)) for m in self._modules}
        self._hooks = [m.register_forward_pre_hook(_enter) for m in self._modules]
        self._places = modeling_files(self._modules)

    @contextmanager
    def using(self, recur: Recur) -> Iterator[None]:
        """Serve the layers' recurrences by `recur` for the duration of one forward, on this thread."""
        thread = get_ident()
        with self._channel.carrying(recur), replaced(self._places):
            for module, bound in self._bound.items():
                if getattr(module, _BOUND, (None,))[0] is not self._channel:
                    setattr(module, _BOUND, bound)
            try:
                _entered[thread] = _Entered()
                _serving[thread] = partial(self._next, recur, thread)
                yield
            finally:
                _serving.pop(thread, None)
                _entered.pop(thread, None)

    def release(self) -> None:
        """Undo the changes to the model. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module in self._modules:
            if getattr(module, _BOUND, (None,))[0] is self._channel:
                delattr(module, _BOUND)
        restore_unused(self._places)  # an interrupt may have struck while they were put back

    @staticmethod
    def _next(recur: Recur, thread: int) -> Mixing:
        call = _entered[thread].next()[1]
        return lambda name, *inputs: recur(name, call, *inputs)


def _enter(module: nn.Module, args: Any) -> None:
    """The pre-hook of a module with recurrent calls."""
    entered = _traced if torch.compiler.is_compiling() else _entered.get(get_ident())
    if entered is not None:
        entered.place = getattr(module, _BOUND, None)
        entered.calls = 0


_lock = RLock()
"""Reentrant: an engine may become garbage, and release its port, in any line."""


class _Use:
    """A specdec forward with replaced functions; it ends with its frame, even if an interrupt strikes then."""

    def __init__(self) -> None:
        self.thread = get_ident()


_uses: dict[str, WeakSet[_Use]] = {}
"""By the name of a modeling file, the running specdec forwards in which its functions are replaced."""
_stand_ins: dict[tuple[str, str], tuple[Function, Function]] = {}
"""By file and function: the original and its stand-in. The same for as long as the original is."""


@contextmanager
def replaced(files: Sequence[ModuleType]) -> Iterator[None]:
    """Replace the functions of modeling files; several threads may do so at a time."""
    use = _Use()
    try:
        with _lock:
            for file in files:
                _uses.setdefault(file.__name__, WeakSet()).add(use)
                _replace(file)  # whatever others do: an interrupt may have struck in theirs
        yield
    finally:
        with _lock:
            for file in files:
                _uses[file.__name__].discard(use)
        restore_unused(files)


def restore_unused(files: Sequence[ModuleType]) -> None:
    """Restore the functions of modeling files that no running specdec forward uses. Idempotent."""
    with _lock:
        for file in files:
            if not _uses.get(file.__name__):
                _restore(file)


def _restore(file: ModuleType) -> None:
    for name in STAND_INS:
        made = _stand_ins.get((file.__name__, name))
        if made is not None and vars(file).get(name) is made[1]:
            setattr(file, name, made[0])


@after_fork
def _renew_after_fork() -> None:
    """In a child process: end the forwards of threads that are not there."""
    global _lock
    _lock = RLock()
    me = get_ident()
    for by_thread in (_serving, _entered):
        for thread in [thread for thread in by_thread if thread != me]:
            del by_thread[thread]
    for uses in _uses.values():
        for use in [use for use in uses if use.thread != me]:
            uses.discard(use)
    restore_unused([sys.modules[name] for name in _uses if name in sys.modules])


def _replace(file: ModuleType) -> None:
    """Replace a file's functions by their stand-ins. Idempotent."""
    for name in STAND_INS:
        now = vars(file).get(name)
        key = (file.__name__, name)
        made = _stand_ins.get(key)
        if now is None or (made is not None and now is made[1]):
            continue
        if made is None or made[0] is not now:
            made = _stand_ins[key] = (now, _stand_in(name, now))
        setattr(file, name, made[1])


def _stand_in(name: str, original: Function) -> Function:
    served = STAND_INS[name]

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            channel, call = _traced.next()
            return served(channel.opaque(call), *args, **kwargs)
        serve = _serving.get(get_ident())
        return original(*args, **kwargs) if serve is None else served(serve(), *args, **kwargs)

    return stand_in


@contextmanager
def recorded_recurrences(root: nn.Module) -> Iterator[list[RecurrentCall]]:
    """Record the recurrent calls under `root` while it runs on this thread; the calls return zeros.

    Raises (from inside the run):
        UnsupportedAttentionError: a layer passes its own states, or layers with recurrent calls are nested.
    """
    calls: list[RecurrentCall] = []
    candidates = [m for m in root.modules() if modeling_files([m])]
    running = []

    def enter(module: nn.Module, args: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    hooks = [m.register_forward_pre_hook(enter) for m in candidates]
    hooks += [m.register_forward_hook(leave) for m in candidates]
    thread = get_ident()
    try:
        with replaced(modeling_files(candidates)):
            _serving[thread] = lambda: partial(_recorded, calls, running[-1])
            yield calls
    finally:
        _serving.pop(thread, None)
        for hook in hooks:
            hook.remove()
    _refuse_nested(calls)


def _refuse_nested(calls: Sequence[RecurrentCall]) -> None:
    modules = dict.fromkeys(call.module for call in calls)
    for module in modules:
        inner = next((m for m in module.modules() if m is not module and m in modules), None)
        if inner is not None:
            raise UnsupportedAttentionError(
                f"{type(inner).__name__} and {type(module).__name__} around it both have recurrent calls"
            )
    order = [module for i, module in enumerate(c.module for c in calls) if i == 0 or calls[i - 1].module is not module]
    if len(order) != len(modules):
        raise UnsupportedAttentionError(f"{type(order[0]).__name__} runs twice in one forward")


_SPECS: dict[str, Callable[..., RecurrenceSpec]] = {
    "short_conv": lambda x, weight, *_: ConvSpec(x.shape[1], weight.shape[1]),
    "gated_delta": lambda q, k, v, g, *_: DeltaSpec(k.shape[1], v.shape[1], k.shape[2], v.shape[2], g.dim() == 3),
    "ssd_scan": lambda x, dt, A, B, *_: SsdSpec(*x.shape[1:], *B.shape[1:]),
    "selective_scan": lambda x, dt, A, B, *_: ScanSpec(x.shape[1], B.shape[1]),
}
"""What a call requires, by the recurrence's name and its inputs."""


def _recorded(calls: list[RecurrentCall], module: nn.Module, name: str, *inputs: Any) -> Tensor:
    """Record the requirements of one call of this layer, and return zeros."""
    calls.append(RecurrentCall(module, _SPECS[name](*inputs)))
    return empty_output(name, inputs).zero_()
