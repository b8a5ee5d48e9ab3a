"""New weights, copied into a model's own memory: what a trainer in another process or on other devices sends.

Source: how trainers pass weights: verl, BaseRollout.update_weights; NVIDIA-NeMo/RL, GenerationInterface (refit);
huggingface/trl, WeightTransferProtocol.send_weights: an iterator of (name, tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from attention.errors import named_error
from attention.hf.gate import gate_of
from attention.hf.weights import dense_weight
from drafters.base import DraftsOnSome
from specdec.errors import InvalidInputError
from specdec.interrupts import interrupts_as_they_are
from specdec.ops.packed_weight import PackedWeight
from specdec.selftest.selftest import self_test
from specdec.torch_state import own_torch_state
from specdec.values import short

_OF_ADAPTERS = ("base_model.model.", ".base_layer.", "lora_")
_MERGED = (
    "it is a name of peft's; give merged weights by the names of the model below: "
    "peft_model.merge_and_unload().state_dict(), of a copy where training goes on"
)
Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@own_torch_state()
def renew(model: Any, what: str, change: Callable[[], None]) -> float:
    """Change the weights of a `SpeculativeModel`, test it again, and return its `self_test_error`.

    Raises:
        InvalidInputError: requests run, or this process has a share of the model. Others: see `refresh`.
    """
    model.group.check_whole(what)
    with model._shared.between_rounds() as idle, interrupts_as_they_are():
        if not idle:
            raise InvalidInputError(f"requests are running on the old weights; finish them before {what}")
        model._live.check()
        model.engine.forget_prefixes()  # of the old weights, and the self-test writes to the first pages
        if model.target.steps is not None:
            model.target.steps.forget()  # else the old layout of packed weights stays in memory beside the new one
        change()
        for weight in model.hf_model.parameters():
            if isinstance(weight, PackedWeight):
                weight.matrix.pack()
        head = model.head
        output = model.hf_model.get_output_embeddings()
        if isinstance(head, DraftsOnSome) and head.draft_rows is not None and (now := dense_weight(output)) is not None:
            head.renew_draft_rows(now)
        model.self_test_error = self_test(model.target)
    return float(model.self_test_error)


def write(model: Any, weights: Weights, head: Weights) -> None:
    """Copy new weights into a `SpeculativeModel`'s target and head; forwards on other threads wait.

    Mappings and lists are checked as a whole before anything is written, iterators item by item. Names are as in the
    modules' `state_dict`; shapes are the same, in any floating dtype, on any device. Values are not checked.

    Raises:
        InvalidInputError: an item that is no (name, tensor), a name or a shape that a module does not have, a tensor
            without plain values, whole numbers for floating ones or the other way round, or what an iterator raised;
            the message has the number of tensors written before. No weights are given, or a head's for a model without
            one.
    """
    given = [(model.hf_model, weights)]
    if isinstance(model.head, nn.Module):
        given.append((model.head, head))
    elif not isinstance(head, (Mapping, Sequence)) or head:
        raise InvalidInputError("head=…: this model drafts without a head that has weights; leave it out")
    with gate_of(model.hf_model.config).held(), torch.no_grad():
        count = 0
        try:
            ready = [_ready(module, own) for module, own in given]
            for there, tensor in (pair for own in ready for pair in own):
                there.copy_(tensor)
                count += 1
        except InvalidInputError as error:
            raise InvalidInputError(f"{error}; {_left(count)}") from error.__cause__
        # The user's iterator may raise anything, a trainer's connection error for example.
        except Exception as error:
            raise InvalidInputError(f"weights: {named_error(error)}; {_left(count)}") from error
    if not count:
        raise InvalidInputError("no weights were given (an iterator that was read already?); see refresh()")


def _left(count: int) -> str:
    """The state after an update that stopped after `count` tensors, in words."""
    if not count:
        return "nothing was written"
    return (
        f"the {count} before it are written: the model holds a mixture of old and new weights now, which was not "
        "tested; give all of them again"
    )


def _ready(module: nn.Module, weights: Weights) -> Iterable[tuple[Tensor, Tensor]]:
    """A module's tensors with their new values: already checked, except an iterator's."""
    # keep_vars: the parameters themselves, which `write` copies into.
    found = _fitting(module.state_dict(keep_vars=True), weights, type(module).__name__)
    return list(found) if isinstance(weights, (Mapping, Sequence)) else found


def _fitting(own: dict[str, Tensor], weights: Weights, what: str) -> Iterator[tuple[Tensor, Tensor]]:
    items = weights.items() if isinstance(weights, Mapping) else weights
    for place, item in enumerate(items):
        if not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[1], Tensor)):
            raise InvalidInputError(f"weights of {what}: item {place} is {short(item)}, not a (name, tensor)")
        name, tensor = item
        if problem := _problem(own, name, tensor):
            raise InvalidInputError(f"weights of {what}: {problem}")
        yield own[name], tensor


def _is_of_adapter(name: object) -> bool:
    return isinstance(name, str) and any(part in name for part in _OF_ADAPTERS)


def _problem(own: dict[str, Tensor], name: object, tensor: Tensor) -> str:
    """What is wrong with an item, in words; "" where nothing is."""
    there = own.get(name) if isinstance(name, str) else None
    if there is None:
        if _is_of_adapter(name) and not any(map(_is_of_adapter, own)):
            return f"it has no {short(name)}: {_MERGED}"
        near = get_close_matches(str(name), own, 1, 0.5)
        return f"it has no {short(name)}" + (f" (near is {near[0]!r})" if near else "")
    if tensor.shape != there.shape:
        return f"{name} has shape {list(there.shape)}, given is {list(tensor.shape)}"
    if tensor.is_meta or tensor.layout != torch.strided or hasattr(tensor, "full_tensor"):
        kind = "is on the meta device" if tensor.is_meta else f"is {type(tensor).__name__} in {tensor.layout}"
        return f"{name}, as it is given, {kind}: give a plain tensor with all values (to_dense(), full_tensor())"
    if tensor.is_floating_point() != there.is_floating_point():
        return f"{name} is {there.dtype}, given is {tensor.dtype}: give them as the module stores them"
    return ""
