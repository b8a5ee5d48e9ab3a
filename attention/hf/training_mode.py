"""Modules that compute otherwise in training mode (dropout, noise of routers) run specdec's forwards in evaluation
mode.

A model that is trained between two generations is in training mode now and then. Most modules compute the same in both
modes and stay as they are. The others are switched while the gate of the model is held, so a forward of the user's on
another thread keeps its dropout.
"""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from attention.errors import SpecdecError
from attention.hf.patches import Value, borrowed

_SWITCH = re.compile("drop|jitter|noise|checkpointing")
"""Parts of names of attributes without which training mode changes nothing."""

_CHECKPOINTING = "gradient_checkpointing"


class Trainable(NamedTuple):
    """A module whose class looks at its mode. switches: names of attributes, of it or its config, that decide whether
    that matters; it always does where it has none of them."""

    place: weakref.ref[nn.Module]
    switches: tuple[str, ...]

    @property
    def computes_otherwise(self) -> bool:
        """Whether it is in training mode, and computes otherwise in it."""
        module = self.place()
        if module is None or not module.training:
            return False
        values = [value for name in self.switches if (value := _value(module, name)) is not None]
        return any(values) if values else True


def trainable_modules(root: nn.Module) -> tuple[Trainable, ...]:
    """The modules of a model whose classes look at their mode."""
    found = []
    for module in root.modules():
        cls: Any = type(module)
        switches = _switches(cls)
        if switches != () and hasattr(module, _CHECKPOINTING):  # a layer that may be computed again for its gradients
            switches = (*(switches or ()), _CHECKPOINTING)
        if switches is not None:
            found.append(Trainable(weakref.ref(module), switches))
    return tuple(found)


@contextmanager
def evaluating(root: nn.Module, modules: tuple[Trainable, ...]) -> Iterator[None]:
    """Run these modules of `root` as in evaluation mode. The caller must hold the model's gate.

    Where `root.train()` or `eval()` is called meanwhile, on another thread, the modules follow it in the end.

    Raises:
        SpecdecError: modules were switched to training mode meanwhile, so the results are invalid.
    """
    mode = root.training
    looked_at = [own.place() for own in modules if own.computes_otherwise]
    switched = [module for module in looked_at if module is not None]
    hooked = _without_grads(root) if getattr(root, "_require_grads_hooks", ()) else ()
    with borrowed([*((module, "training", False) for module in switched), *hooked]):
        yield
        if any(own.computes_otherwise for own in modules):
            raise SpecdecError(
                "the model came into training mode during a round, in which its dropout would change tokens; call "
                "train() between rounds, or once more what failed"
            )
    if root.training != mode:
        for module in switched:
            module.training = root.training


def _without_grads(root: Any) -> Iterator[Value]:
    """The embeddings' hooks without those of gradient checkpointing, which compiled code could not contain.

    Source: huggingface/transformers, modeling_utils.py, `enable_input_require_grads`.
    """
    for handle in root._require_grads_hooks:
        for module in root.modules():
            if (hooks := module._forward_hooks) is handle.hooks_dict_ref():
                kept = OrderedDict((key, hook) for key, hook in hooks.items() if key != handle.id)
                yield module, "_forward_hooks", kept


@functools.cache
def _switches(cls: Any) -> tuple[str, ...] | None:
    """See `Trainable`; None where no function of a class looks at the mode."""
    names = set[str]()
    looks = False
    for base in cls.__mro__:
        if base in PreTrainedModel.__mro__:  # methods of a model other than its forward
            continue
        for given in vars(base).values():
            function = inspect.unwrap(given) if callable(given) else None
            used = set(_names(function.__code__)) if isinstance(function, FunctionType) else set()
            if "training" in used:
                own = {name for name in used if _SWITCH.search(name)}
                if not own:
                    return ()
                looks = True
                names = names | own
    return tuple(sorted(names)) if looks else None


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function and those inside it use."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _value(module: Any, name: str) -> bool | None:
    """Whether a switch of a module, or of its config, is on; None for a name that neither has (of a function)."""
    for owner in (module, getattr(module, "config", None)):
        value = getattr(owner, name, None)
        if isinstance(value, (int, float, nn.Module)):
            return bool(value)
    return None
