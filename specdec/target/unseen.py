"""What a model's forward may depend on that nobody can see: the state of hooks, parametrizations and forwards that are
the user's own functions, which may read any variable."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules import module as of_every_module
from torch.nn.utils.parametrize import ParametrizationList

_KNOWN = (
    *("attention", "drafters", "specdec", "torch", "transformers", "peft", "accelerate"),
    *("compressed_tensors", "torchao", "optimum", "bitsandbytes", "kernels", "gptqmodel", "awq"),
)
"""Packages whose hooks and forwards keep their state in modules, parameters and buffers, where it is seen."""
_WATCHING = ("attention", "drafters", "specdec", "torch", "transformers")
"""Packages whose hooks change no output: transformers puts them where a forward is to return hidden states."""


def unseen_state(model: nn.Module) -> str:
    """The first hook, parametrization or forward of a model whose state nobody can see, in words; "" where none is."""
    for kind, hooks in (
        ("forward hook", of_every_module._global_forward_hooks),
        ("forward pre-hook", of_every_module._global_forward_pre_hooks),
    ):
        if foreign := _first_foreign(hooks.values()):
            return f"a {kind} of every module ({foreign})"
    patched = _patched_classes(model)
    for name, module in model.named_modules():
        if found := _of_module(module, patched):
            kind, foreign = found
            return f"{kind} {name or type(module).__name__} ({foreign})"
    return ""


def hook_tables(modules: Iterable[nn.Module]) -> tuple[dict[int, Any], ...]:
    """Where the forward hooks of these modules, and those of every module, are registered."""
    own = (table for module in modules for table in (module._forward_hooks, module._forward_pre_hooks))
    return (*own, of_every_module._global_forward_hooks, of_every_module._global_forward_pre_hooks)


def hook_ids(tables: tuple[dict[int, Any], ...]) -> list[int]:
    """Of the hooks that are registered; torch gives each a number of its own."""
    return [hook for table in tables if table for hook in table]


def new_hook(model: nn.Module, uncalled: Iterable[nn.Module], known: Iterable[int]) -> str:
    """The first hook on one of these modules, or on every module, whose number is not among `known`, in words.

    "" for none. Hooks that only watch do not count, nor do those that known packages put on every module.
    """
    own = set(known)
    every = (of_every_module._global_forward_hooks, of_every_module._global_forward_pre_hooks)
    for module in uncalled:
        for table in (module._forward_hooks, module._forward_pre_hooks):
            for number, hook in table.items():
                if number not in own and _package(hook) not in _WATCHING:
                    name = next((name for name, each in model.named_modules() if each is module), "")
                    return f"a forward hook on {name or type(module).__name__} ({_words(hook)})"
    foreign = _first_foreign(hook for table in every for number, hook in table.items() if number not in own)
    return f"a forward hook of every module ({foreign})" if foreign else ""


def _of_module(module: nn.Module, patched: dict[type, str]) -> tuple[str, str] | None:
    for kind, functions in (
        ("a forward hook on", module._forward_hooks.values()),
        ("a forward pre-hook on", module._forward_pre_hooks.values()),
        ("a parametrization of", module if isinstance(module, ParametrizationList) else ()),
        ("a forward set on", [vars(module)["forward"]] if "forward" in vars(module) else ()),
    ):
        if foreign := _first_foreign(functions):
            return kind, foreign
    if type(module) in patched:
        return "a forward set on the class of", patched[type(module)]
    return None


def _patched_classes(model: nn.Module) -> dict[type, str]:
    """Classes of modules whose forward is from another package than the class, and not of a known one."""
    found: dict[type, str] = {}
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        owner = next(base for base in kind.__mro__ if "forward" in vars(base))
        forward = vars(owner)["forward"]
        if _package(forward) != owner.__module__.partition(".")[0] and (foreign := _first_foreign([forward])):
            found[kind] = foreign
    return found


def _first_foreign(functions: Iterable[Any]) -> str:
    """The first that no known package has written, in words; "" for none."""
    for function in functions:
        if _package(function) not in _KNOWN:
            return _words(function)
    return ""


def _words(function: Any) -> str:
    plain = _unwrapped(function)
    return f"{getattr(plain, '__qualname__', type(plain).__qualname__)} of {_file(plain)}"


def _unwrapped(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


def _file(function: Any) -> str:
    own = getattr(function, "__module__", None)
    return own if isinstance(own, str) else type(function).__module__


def _package(function: Any) -> str:
    return _file(_unwrapped(function)).partition(".")[0]
