"""Whether a wrapped model has changed since the last look, so that what was kept from its earlier forwards is stale."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from attention.hf.weights import address_of
from specdec.target.settings import Settings
from specdec.target.unseen import hook_ids, hook_tables, unseen_state


class WeightVersions:
    """Whether a model has changed since the last look: other values in place, as far as torch counts that, and, but
    for graphs, other tensors in their place, other settings and other hooks.

    It counts what is written to a parameter (`load_state_dict`, an optimiser's step, an adapter merged in place), and
    not what is written through `.data`, `.detach()` or `.numpy()`: `SpeculativeModel.refresh()` is for those. For
    inference tensors it counts nothing. Another tensor is one that was assigned (`layer.weight = …`, `weight.data = …`,
    `load_state_dict(assign=True)`, another linear layer of the same sizes): rounds without graphs read it from then
    on. They call modules and run hooks, so other settings (`specdec.target.settings`), other hooks and a forward set on
    a module count as other weights.

    Attributes:
        unseen: the first hook, parametrization or forward of the target whose state nobody can see, in words; "" where
            there is none, and with graphs, which are not captured over such.
    """

    def __init__(self, *parts: object, captured: bool = False, settings: Settings | None = None) -> None:
        """
        Args:
            parts: modules, the target first; anything else has no weights.
            captured: graphs read the tensors that are there now, whatever is assigned in their place, so only their
                values are looked at.
            settings: of these modules; default as they are, those that forwards change themselves among them.
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
        """Whether any has since this was asked last."""
        return self._counted_on() if self._captured else self._looks_different()

    def _counted_on(self) -> bool:
        """Of the same tensors: a first token waits for this."""
        before, self._count = self._count, sum(tensor._version for tensor in self._counted)
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
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def equal_buffers(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether another buffer has the same values: some forwards make their rotary one anew."""
    if before is now or isinstance(before, nn.Parameter) or isinstance(now, nn.Parameter):
        return False
    return before.device == now.device and before.dtype == now.dtype and torch.equal(before, now)
