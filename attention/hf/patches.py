"""Attributes and forwards of a user's model that are replaced for the duration of one specdec forward.

They are put back when the forward ends. In a forked child a forward never ends if it ran on another thread than the one
that forked, because that thread does not exist in the child. So borrowed values are listed here, and the child puts
them back at its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import nn

from attention.hf.gate import gate_of
from attention.threads import after_fork

Value = tuple[Any, str, Any]
"""(an object, the name of its attribute, a value)."""

_ABSENT = object()
_borrowed: dict[int, dict[int, list[Value]]] = {}
"""By thread, the values before of each `borrowed` that is open there, by their id."""


@contextmanager
def borrowed(values: Iterable[Value]) -> Iterator[None]:
    """Give attributes these values inside the block; afterwards they have their old values, and class attributes are
    visible again.

    Pass the same function object each time for a module's `forward`, so that compiled code, which guards on it, stays
    valid; hooks of the module stay in place.

    An interrupt that strikes on the way out, before the last lines here, leaves the values until its traceback is
    dropped; `settle` puts them back before.
    """
    values = list(values)
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in values]
    own = _borrowed.setdefault(get_ident(), {})
    try:
        own[id(before)] = before  # first: a thread that forks between any two lines is to find all of them
        for owner, name, value in values:
            setattr(owner, name, value)
        yield
    finally:
        if own.get(id(before)) is before:  # not settled
            _put_back(before)
            own.pop(id(before), None)
        if not own:
            _borrowed.pop(get_ident(), None)


def settle(owners: Iterable[object]) -> None:
    """Put back what a forward that an interrupt ended has left borrowed of these; no forward of theirs may be open."""
    wanted = set(map(id, owners))
    for own in list(_borrowed.values()):
        for key, before in list(own.items()):
            if any(id(owner) in wanted for owner, _, _ in before):
                _put_back(before)
                own.pop(key, None)


def _put_back(before: list[Value]) -> None:
    """Idempotent."""
    for owner, name, old in before:
        if old is not _ABSENT:
            setattr(owner, name, old)
        elif name in vars(owner):
            delattr(owner, name)


@after_fork
def put_back_after_fork() -> None:
    """In a child process: undo what other threads have borrowed, which do not exist here."""
    for thread in [thread for thread in _borrowed if thread != get_ident()]:
        for before in reversed(list(_borrowed.pop(thread).values())):
            _put_back(before)


@contextmanager
def attention_implementation(configs: tuple[Any, ...], name: str, others: Iterable[Value] = ()) -> Iterator[None]:
    """Set the attention implementation on a model's configs, and other attributes, and put the old ones back after.

    Only for the duration of a forward: the user's own `model.generate` keeps the attention it had. Meanwhile the gate
    of the model (the first config is its own) is held.
    """
    gate = gate_of(configs[0] if configs else None)
    with gate.held() as outermost:
        if outermost and gate.is_guarding:
            settle(configs)
        with borrowed([*((config, "_attn_implementation_internal", name) for config in configs), *others]):
            yield


def attention_configs(root: nn.Module) -> tuple[Any, ...]:
    """Every distinct config object that a submodule reads its attention implementation from."""
    configs = {}
    for module in root.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    return tuple(configs.values())
