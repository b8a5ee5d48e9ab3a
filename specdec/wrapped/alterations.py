"""Alterations of a user's model while it is wrapped, each with the function that undoes it.

Changes that stay on a model between two specdec forwards are registered here: hooks, the handles by which attention
modules find their cache, fused projections of compiled code. Changes during one forward are undone by context managers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from specdec.errors import InvariantError


class Hook:
    """A hook of this library: calls `call`, does nothing once pickled. Subclasses pass on parts of its arguments."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *given: Any) -> Any:
        return self.call(*given)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _unpickled, ()

    def __deepcopy__(self, memo: Any) -> Hook:
        return self


def without_unpickled(model: nn.Module) -> None:
    """Remove the hooks that were pickled with a model of another engine."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            # A list first: hooks are deleted on the way. torch has no handle for hooks that came with a pickle.
            for number in [number for number, hook in hooks.items() if hook is _nothing]:
                del hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)


def _hook(call: Callable[..., Any]) -> Hook:
    return call if isinstance(call, Hook) else Hook(call)


def _unpickled() -> Callable[..., None]:
    """What a pickled `Hook` becomes."""
    return _nothing


def _nothing(*given: Any) -> None:
    """A hook that leaves all as it is."""


class Alterations:
    """Changes of models on behalf of one owner, taken back by `undo`, or when the owner is garbage.

    A registered function must not refer to the owner, or the owner would never be garbage.
    """

    def __init__(self, owner: object) -> None:
        """owner: the object that needs the alterations, usually the one that holds these."""
        self._stack = ExitStack()
        self._finalizer = weakref.finalize(owner, _on_real_tensors, self._stack.close)
        self._finalizer.atexit = False  # at the interpreter's exit the model ends as well

    def on_undo(self, undo: Callable[[], object]) -> None:
        """Register a function that takes back a change just made.

        Raises:
            InvariantError: everything was undone already; the change is taken back.
        """
        if not self._finalizer.alive:
            undo()
            raise InvariantError("a model was altered for an engine that is closed")
        self._stack.callback(undo)

    def hook_before(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Call hook(module, args, kwargs) before the module's forward."""
        self.on_undo(module.register_forward_pre_hook(_hook(hook), with_kwargs=True).remove)

    def hook_after(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Call hook(module, args, output) after the module's forward."""
        self.on_undo(module.register_forward_hook(_hook(hook)).remove)

    def undo(self) -> None:
        """Take back everything, the last change first. Idempotent."""
        self._finalizer()

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Take back everything when the block raises, so that a failed load leaves the model as it was."""
        try:
            yield
        except BaseException:  # also Ctrl-C during a load
            self.undo()
            raise


def _on_real_tensors(undo: Callable[[], object]) -> None:
    """Run `undo` outside of tracing: an owner may become garbage while the compiler traces another model."""
    with _disable_current_modes():
        undo()
