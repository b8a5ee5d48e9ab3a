"""One forward of a model at a time: a round's forward and the user's forward on another thread wait for each other.

While specdec runs a forward, the model's config names specdec's attention, and no mask is built. A user's forward in
the meantime would attend without its mask and write to specdec's cache. So the gate of the config is held during each
specdec forward, and, by hooks on the model, during each user's forward.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from attention.threads import after_fork

_POLL = 2e-4
"""Seconds between two looks at a gate that another thread holds."""
_STALE = 1.0
"""Seconds after which a waiting thread looks for an interrupted holder: torch calls no hook after an interrupt."""
_HOLDER = "holder"


class ForwardGate:
    """Held by one thread. `dict.setdefault` takes it: one operation, which no interrupt can leave half done."""

    def __init__(self, is_guarding: bool = True) -> None:
        """is_guarding: whether forwards of a model pass the gate; False for the private gates that `gate_of` makes."""
        self.is_guarding = is_guarding
        self._holder: dict[str, tuple[int, bool]] = {}

    def enter(self, users: bool) -> None:
        """Take the gate, waiting for other threads; `users`: whether it is taken for the user's forward. Idempotent."""
        mine = (get_ident(), users)
        look_again = time.monotonic() + _STALE
        while self._holder.setdefault(_HOLDER, mine) != mine:
            if time.monotonic() > look_again:
                self._drop_stale()
                look_again += _STALE
            time.sleep(_POLL)

    def leave(self, users: bool) -> None:
        """Give it back, if this thread holds it for that purpose."""
        mine = get_ident(), users
        # No call from here on: between calls no interrupt strikes and no other thread runs.
        if _HOLDER in self._holder and self._holder[_HOLDER] == mine:
            del self._holder[_HOLDER]

    def is_mine(self) -> bool:
        """Whether this thread is in a forward already."""
        holder = self._holder.get(_HOLDER)
        if holder is None or holder[0] != get_ident():
            return False
        if holder[1]:
            self._drop_stale()
        return _HOLDER in self._holder

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Hold the gate for a specdec forward; yields whether this thread was in no forward before."""
        nested = self.is_mine()
        try:
            if not nested:
                self.enter(users=False)
            yield not nested
        finally:
            if not nested:
                self.leave(users=False)

    def _drop_stale(self) -> None:
        """Take it from a forward of the user's that an interrupt ended."""
        holder = self._holder.get(_HOLDER)
        if holder is not None and holder[1] and not _in_forward(holder[0]) and self._holder.get(_HOLDER) == holder:
            self._holder.pop(_HOLDER, None)

    def renew_after_fork(self) -> None:
        """In a child process: free, unless the thread that forked holds it. No other thread is there."""
        holder = self._holder.get(_HOLDER)
        if holder is not None and holder[0] != get_ident():
            del self._holder[_HOLDER]


_gates: dict[int, ForwardGate] = {}
_forked = False


def guard(root: nn.Module) -> tuple[RemovableHandle, ...]:
    """Let the user's forwards of `root` and specdec's wait for each other, until `unguard` removes the hooks.

    Several engines may guard the same model: a thread that already holds the gate passes the other hooks.
    """
    config = getattr(root, "config", None)
    if config is None:
        return ()
    if id(config) not in _gates:
        # By id, as configurations are not hashable; the finalizer drops the entry before another object can get the id.
        _gates[id(config)] = ForwardGate()
        weakref.finalize(config, _gates.pop, id(config), None)
    return (
        root.register_forward_pre_hook(_before_forward),
        root.register_forward_hook(_after_forward, always_call=True),
    )


def unguard(configs: Sequence[Any], hooks: Sequence[RemovableHandle]) -> None:
    """Remove the hooks of `guard`; `configs`: the model's configs, the top-level config first.

    The gate is held meanwhile, so that a user's forward runs with both hooks or with none.
    """
    with gate_of(configs[0] if configs else None).held():
        for hook in hooks:
            hook.remove()
        use_own_threads()  # the next forward does not pass them


@contextmanager
def guarded(root: nn.Module) -> Iterator[None]:
    """`guard` as a context manager."""
    hooks = guard(root)
    try:
        yield
    finally:
        unguard([getattr(root, "config", None)], hooks)


def gate_of(config: Any) -> ForwardGate:
    """The gate of a guarded model's config; a private one for any other."""
    return _gates.get(id(config)) or ForwardGate(is_guarding=False)


def _before_forward(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if _forked:
        use_own_threads()
    gate = _gates.get(id(module.config))
    if gate is not None and not gate.is_mine():
        gate.enter(users=True)
        if _after_forward not in module._forward_hooks.values():  # removed while this thread waited
            gate.leave(users=True)


def _after_forward(module: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling() and (gate := _gates.get(id(module.config))) is not None:
        gate.leave(users=True)


def _in_forward(thread: int) -> bool:
    """Whether a module is being called on that thread."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        # Every call of a module runs `_call_impl`, and its frame goes away even if an interrupt skips the hooks.
        if frame.f_code is nn.Module._call_impl.__code__:
            return True
        frame = frame.f_back
    return False


def use_own_threads() -> None:
    """In a forked child, before a forward: torch computes on the calling thread alone from now on.

    The threads of OpenMP that helped the parent's are not there, and GNU's OpenMP would wait for them without end.
    """
    global _forked
    if _forked:
        torch.set_num_threads(1)
        _forked = False


@after_fork
def _renew_after_fork() -> None:
    global _forked
    _forked = bool(_gates)
    for gate in list(_gates.values()):
        gate.renew_after_fork()
