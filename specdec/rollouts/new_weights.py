"""New weights, copied into a model's own memory: what a trainer in another process or on other devices sends.

Source: how trainers pass weights: verl, BaseRollout.update_weights; NVIDIA-NeMo/RL, GenerationInterface (refit);
huggingface/trl, WeightTransferProtocol.send_weights: an iterator of (name, tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from attention.hf.gate import gate_of
from specdec.errors import InvalidInputError
from specdec.interrupts import interrupts_as_they_are
from specdec.selftest.selftest import self_test
from specdec.torch_state import own_torch_state
from specdec.values import short

Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@own_torch_state()
def renew(model: Any, what: str, change: Callable[[], None]) -> float:
    """Change the weights of a `SpeculativeModel`, test it again, and return its `self_test_error`.

    Raises:
        InvalidInputError: requests run, or this process has a share. Those of `SpeculativeModel.refresh`.
    """
    model.group.check_whole(what, "save new weights and load them again")
    with model._shared.between_rounds() as idle, interrupts_as_they_are():
        if not idle:
            raise InvalidInputError(f"requests are running on the old weights; finish them before {what}")
        model._live.check()
        model.engine.forget_prefixes()  # of the old weights, and the self-test writes to the first pages
        change()
        model.self_test_error = self_test(model.target)
    return float(model.self_test_error)


def write(model: Any, weights: Weights, head: Weights) -> None:
    """Copy new weights into a `SpeculativeModel`'s target and head; forwards on other threads wait.

    Mappings and lists are checked as a whole before anything is written, iterators item by item. Names are those of the
    modules' `state_dict`; shapes are the same, in any floating dtype, on any device.

    Raises:
        InvalidInputError: an item that is no (name, tensor), a name or a shape that a module does not have, whole
            numbers for floating ones or the other way round; the message says how many were written before. Nothing is
            given, or weights of a head that it does not have.
    """
    given = [(model.hf_model, weights)]
    if isinstance(model.head, nn.Module):
        given.append((model.head, head))
    elif not isinstance(head, (Mapping, Sequence)) or head:
        raise InvalidInputError("head=…: this model drafts without a head that has weights; leave it out")
    with gate_of(model.hf_model.config).held(), torch.no_grad():
        ready = [_ready(module, own) for module, own in given]
        count = 0
        for there, tensor in (pair for own in ready for pair in own):
            there.copy_(tensor)
            count += 1
    if not count:
        raise InvalidInputError("no weights were given (an iterator that was read already?); see refresh()")


def _ready(module: nn.Module, weights: Weights) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """A module's tensors with their new values: checked already, but those of an iterator."""
    found = _fitting(module.state_dict(keep_vars=True), weights, type(module).__name__)
    return list(found) if isinstance(weights, (Mapping, Sequence)) else found


def _fitting(own: dict[str, torch.Tensor], weights: Weights, what: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    items = weights.items() if isinstance(weights, Mapping) else weights
    before = not isinstance(weights, (Mapping, Sequence))
    for place, item in enumerate(items):
        if not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[1], torch.Tensor)):
            raise InvalidInputError(f"weights of {what}: item {place} is {short(item)}, not a (name, tensor)")
        name, tensor = item
        if problem := _problem(own, name, tensor):
            written = f"; the {place} before it are written" if before and place else "; nothing was written"
            raise InvalidInputError(f"weights of {what}: {problem}{written}")
        yield own[name], tensor


def _problem(own: dict[str, torch.Tensor], name: object, tensor: torch.Tensor) -> str:
    """What is wrong with an item, in words; "" where nothing is."""
    there = own.get(name) if isinstance(name, str) else None
    if there is None:
        near = get_close_matches(str(name), own, 1, 0.5)
        return f"it has no {short(name)}" + (f" (near is {near[0]!r})" if near else "")
    if tensor.shape != there.shape:
        return f"{name} has shape {list(there.shape)}, given is {list(tensor.shape)}"
    if tensor.is_floating_point() != there.is_floating_point():
        return f"{name} is {there.dtype}, given is {tensor.dtype}: give them as the module stores them"
    return ""
