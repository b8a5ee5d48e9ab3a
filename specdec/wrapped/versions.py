"""Detects changes of a model, and state that cannot be tracked: in the user's hooks, parametrizations, forwards."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_every_module
from torch.nn.utils.parametrize import ParametrizationList

from attention.hf.weights import address_of
from specdec.wrapped.settings import Settings

_KNOWN = (
    *("attention", "drafters", "specdec", "torch", "transformers", "peft", "accelerate"),
    *("compressed_tensors", "torchao", "optimum", "bitsandbytes", "kernels", "gptqmodel", "awq"),
)
"""Packages whose hooks and forwards keep their state in modules, parameters and buffers, where it is seen."""
_WATCHING = ("attention", "drafters", "specdec", "torch", "transformers")
"""Packages whose hooks change no output: transformers puts them where a forward is to return hidden states."""


def unseen_state(model: nn.Module) -> str:
    """The first hook, parametrization or forward of a model with state that cannot be seen, in words; "" for none."""
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
    """The tables of the forward hooks of these modules, and torch's tables of global forward hooks."""
    own = (table for module in modules for table in (module._forward_hooks, module._forward_pre_hooks))
    # Private names: torch has no public list of registered hooks.
    return (*own, of_every_module._global_forward_hooks, of_every_module._global_forward_pre_hooks)


def hook_ids(tables: tuple[dict[int, Any], ...]) -> list[int]:
    """The registered hooks' ids; torch numbers each hook uniquely."""
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
    """A description of the first function that no known package has written; "" for none."""
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


class WeightVersions:
    """Whether a model has changed since the last look: other values in place, as far as torch counts that, and, but
    for graphs, other tensors in their place, other settings and other hooks.

    It counts writes to a parameter (`load_state_dict`, an optimiser's step, an adapter merged in place), but not writes
    through `.data`, `.detach()` or `.numpy()`, for which `SpeculativeModel.refresh()` exists. For inference tensors it
    counts nothing. Another tensor is one that was assigned (`layer.weight = …`, `weight.data = …`,
    `load_state_dict(assign=True)`, another linear layer of the same sizes): rounds without graphs read it from then on.
    They call modules and run hooks, so other settings (`specdec.wrapped.settings`), other hooks and a forward set on a
    module count as other weights.

    Attributes:
        unseen: a description of the target's first hook, parametrization or forward that may read state that specdec
            cannot track; "" if it has none, and with graphs, which are not captured in that case.
    """

    def __init__(self, *parts: object, captured: bool = False, settings: Settings | None = None) -> None:
        """parts: modules, the target first; anything else has no weights. settings: their settings; default: the
        current ones.

        captured: graphs read the tensors that are there now, whatever is assigned in their place: only values count.
        """
        self._roots = tuple(part for part in parts if isinstance(part, nn.Module))
        self._captured = captured
        self._settings = settings or Settings.of(*self._roots)
        self._walk()
        self._look()
        self.unseen = "" if captured else unseen_state(self._roots[0])
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._count = sum(tensor._version for tensor in self._counted)

    def changed(self) -> bool:
        """Whether anything has changed since the last call."""
        if not self._captured:
            return self._looks_different()
        before = self._count
        self._count = sum(tensor._version for tensor in self._counted)  # only a sum: the first token waits for this
        return before != self._count

    def _looks_different(self) -> bool:
        before, versions, hooks, addresses = self._tensors, self._versions, self._hooks, self._addresses
        same = self._settings.are_same
        if self._children != self._children_now():
            self._walk()
            same = False
        self._look()
        if not same or hooks != self._hooks:
            self._settings = self._settings.renewed()
            self.unseen = unseen_state(self._roots[0])
            return True
        if len(before) != len(self._tensors):
            return True
        if (
            addresses == self._addresses
            and versions == self._versions
            and all(map(operator.is_, before, self._tensors))
        ):
            return False
        old = zip(before, versions, addresses, strict=True)
        new = zip(self._tensors, self._versions, self._addresses, strict=True)
        return not all(
            (was[0] is now[0] and was[1:] == now[1:]) or equal_buffers(was[0], now[0])
            for was, now in zip(old, new, strict=True)
        )

    def _walk(self) -> None:
        self._modules = [module for root in self._roots for module in root.modules()]
        self._children = self._children_now()
        self._hook_tables = hook_tables(self._modules)
        self._owners: list[Any] = [d for module in self._modules for d in (module._parameters, module._buffers)]

    def _children_now(self) -> list[nn.Module | None]:
        return [child for module in self._modules if module._modules for child in module._modules.values()]

    def _look(self) -> None:
        self._tensors = [tensor for owner in self._owners for tensor in owner.values() if tensor is not None]
        self._versions = writes_to(self._tensors)
        self._addresses = addresses_of(self._tensors)
        self._hooks = hook_ids(self._hook_tables)


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where their values begin."""
    plain = {torch.Tensor, nn.Parameter}.issuperset(map(type, tensors))
    return list(map(torch.Tensor.data_ptr if plain else address_of, tensors))


def writes_to(tensors: list[torch.Tensor]) -> list[int]:
    """torch's counts of writes to them; 0 for inference tensors, which have none."""
    try:
        return [tensor._version for tensor in tensors]  # torch's count of in-place writes has no public name
    except RuntimeError:  # of an inference tensor, which has no count
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def equal_buffers(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether another buffer has the same values: some forwards recreate their rotary buffer."""
    if before is now or isinstance(before, nn.Parameter) or isinstance(now, nn.Parameter):
        return False
    return before.device == now.device and before.dtype == now.dtype and torch.equal(before, now)
