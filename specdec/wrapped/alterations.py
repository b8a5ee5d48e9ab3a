"""Alterations of a user's model: ours while it is wrapped, each with the function that undoes it, and other people's.

Changes that stay on a model between two specdec forwards are registered here: hooks, the handles by which attention
modules find their cache, fused projections of compiled code. Changes during one forward are undone by context managers.
Other people's are hooks, parametrizations and forwards, some of them with state that cannot be seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.modules import module as of_every_module
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import _disable_current_modes

from specdec.errors import InvariantError
from specdec.values import Function

_KNOWN = (
    *("attention", "drafters", "specdec", "torch", "transformers", "peft", "accelerate"),
    *("compressed_tensors", "torchao", "optimum", "bitsandbytes", "kernels", "gptqmodel", "awq"),
)
"""Packages whose hooks and forwards keep their state in modules, parameters and buffers, where it is seen."""
_WATCHING = ("attention", "drafters", "specdec", "torch", "transformers")
"""Packages whose hooks change no output: transformers puts them where a forward is to return hidden states."""
_OF_EVERY_MODULE = (of_every_module._global_forward_hooks, of_every_module._global_forward_pre_hooks)
"""Private names: torch has no public list of registered hooks."""


HookTables = tuple[dict[int, Any], ...]
"""torch's tables of forward hooks, by their ids."""


class Hook(partial[Any]):
    """A hook of this library; does nothing once pickled."""

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

    def hook_before(self, module: nn.Module, hook: Function) -> None:
        """Call hook(module, args, kwargs) before the module's forward."""
        self.on_undo(module.register_forward_pre_hook(Hook(hook), with_kwargs=True).remove)

    def hook_after(self, module: nn.Module, hook: Function) -> None:
        """Call hook(module, args, output) after the module's forward."""
        self.on_undo(module.register_forward_hook(Hook(hook)).remove)

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


def unseen_state(model: nn.Module) -> str:
    """The first hook, parametrization or forward of a model with state that cannot be seen, in words; "" for none."""
    for kind, hooks in zip(("hook", "pre-hook"), _OF_EVERY_MODULE, strict=True):
        if foreign := _first_foreign(hooks.values()):
            return f"a forward {kind} of every module ({foreign})"
    for name, module in model.named_modules():
        for kind, functions in (
            ("hook on", module._forward_hooks.values()),
            ("pre-hook on", module._forward_pre_hooks.values()),
            ("set on", [vars(module)["forward"]] if "forward" in vars(module) else ()),
            ("set on the class of", _forward_from_elsewhere(type(module))),
        ):
            if foreign := _first_foreign(functions):
                return f"a forward {kind} {name or type(module).__name__} ({foreign})"
        if isinstance(module, ParametrizationList) and (foreign := _first_foreign(module)):
            return f"a parametrization of {name} ({foreign})"
    return ""


def hook_tables(modules: Iterable[nn.Module]) -> HookTables:
    """The tables of the forward hooks of these modules, and torch's tables of global forward hooks."""
    own = (table for module in modules for table in (module._forward_hooks, module._forward_pre_hooks))
    return (*own, *_OF_EVERY_MODULE)


def hook_ids(tables: HookTables) -> list[int]:
    """The registered hooks' ids; torch numbers each hook uniquely."""
    return [hook for table in tables if table for hook in table]


def new_hook(model: nn.Module, uncalled: Iterable[nn.Module], known: Iterable[int]) -> str:
    """The first hook on one of these modules, or on every module, whose number is not among `known`, in words.

    "" for none. Hooks that only watch do not count, nor do those that known packages put on every module.
    """
    own = set(known)
    for module in uncalled:
        for number, hook in chain(module._forward_hooks.items(), module._forward_pre_hooks.items()):
            if number not in own and _package(hook) not in _WATCHING:
                name = next((name for name, each in model.named_modules() if each is module), "")
                return f"a forward hook on {name or type(module).__name__} ({' of '.join(_origin(hook))})"
    new = (hook for table in _OF_EVERY_MODULE for number, hook in table.items() if number not in own)
    foreign = _first_foreign(new)
    return f"a forward hook of every module ({foreign})" if foreign else ""


def _forward_from_elsewhere(kind: type) -> list[Any]:
    """The forward of a class of modules where it is from another package than the class; [] for most."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    forward = vars(owner)["forward"]
    return [] if _package(forward) == owner.__module__.partition(".")[0] else [forward]


def _first_foreign(functions: Iterable[Any]) -> str:
    """A description of the first function that no known package has written; "" for none."""
    return next((" of ".join(_origin(each)) for each in functions if _package(each) not in _KNOWN), "")


def _origin(function: Any) -> tuple[str, str]:
    """Name and module of a function; of any other callable, of its class."""
    while isinstance(function, partial):
        function = function.func
    kind = type(function)
    file = getattr(function, "__module__", None)
    return getattr(function, "__qualname__", kind.__qualname__), file if isinstance(file, str) else kind.__module__


def _package(function: Any) -> str:
    return _origin(function)[1].partition(".")[0]
