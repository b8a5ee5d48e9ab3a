"""Linear layers on a CPU: whether their weights are laid out for oneDNN, and laying them out in their only copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.hf.weights import computes_plainly, model_bytes
from specdec.errors import InvalidInputError
from specdec.ops.packed_weight import EVEN_ROWS, ONEDNN, Matrix, PackedWeight
from specdec.wrapped.alterations import Alterations
from specdec.wrapped.mapped_files import MappedFiles

_FEWEST_BYTES = 2**25
"""Weights of fewer bytes stay in a processor's cache, where laying them out gains nothing."""
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that read one tensor, by their names in transformers' models. Where they do not, each is computed alone."""
_Buffers = list[tuple[nn.Module, str]]
"""Those of heads that are a weight of the target."""
_Packed = tuple[nn.Parameter, Any, list[nn.Module], _Buffers]
"""A user's parameter, what is in its place, and in which layers and heads."""


def why_plain(asked: str, model: PreTrainedModel, loaded_before: bool, alone: bool, even: bool = False) -> str:
    """Why linear layers stay as they are, in words; "" where they are packed.

    loaded_before: by the user, who may hold the parameters. alone: whether one process runs the model. even: whether
    only packed ones will do.

    Raises:
        InvalidInputError: "packed" or `even`, and that is impossible.
    """
    reason = _impossible(model, alone)
    if even and (reason or asked == "plain"):
        reason = reason or "cpu_linears='plain' is given"
        raise InvalidInputError(f"backend='batch_invariant' packs linear layers, but {reason}; use backend='torch'")
    if asked == "packed" and reason:
        raise InvalidInputError(f"cpu_linears='packed': {reason}; give 'auto' or 'plain'")
    if reason or even or asked == "packed":
        return reason
    if asked == "plain":
        return "cpu_linears='plain'"
    if loaded_before:
        return "the model was loaded before, and its parameters may be used elsewhere"
    if not torch.cpu._is_avx2_supported():
        return "not measured on processors without AVX2"
    return "" if model_bytes(model) >= _FEWEST_BYTES else f"the weights take less than {_FEWEST_BYTES >> 20} MiB"


def _impossible(model: PreTrainedModel, alone: bool) -> str:
    if model.device.type != "cpu":
        return f"the model is on {model.device}, not on a CPU"
    if not alone:
        return "the model is divided among processes"
    return "" if model.dtype in _dtypes() else f"oneDNN takes no {model.dtype} on this processor"


def _dtypes() -> list[torch.dtype]:
    """Dtypes of weights that oneDNN lays out."""
    if not torch.backends.mkldnn.is_available():
        return []
    return [torch.float32, *([torch.bfloat16] if ONEDNN._is_mkldnn_bf16_supported() else [])]


def pack_linears(parts: Iterable[object], alterations: Alterations, even: bool = False) -> None:
    """Lay out the weights of the linear layers of a target and its head, in place of the plain ones until it is undone.

    parts: those that are modules have weights. even: those that several layers read as well, and a row gets the same
    bits in any batch.
    """
    roots = [part for part in parts if isinstance(part, nn.Module)]
    done: list[_Packed] = []
    alterations.on_undo(partial(_restore, done))
    for root in roots:
        alterations.on_undo(root.register_state_dict_post_hook(_plain_state).remove)
    modules = [module for root in roots for module in root.modules()]
    held: dict[int, _Buffers] = defaultdict(list)
    for module in modules:
        for name, buffer in module._buffers.items():
            if type(buffer) is Tensor:
                held[_address(buffer)].append((module, name))
    files = MappedFiles()
    for group in _groups(modules, held, even):
        owns = [own for own, _ in group]
        matrix = Matrix(
            [own.data for own in owns], len(group[0][1]) > 1 or _address(owns[0]) in held, EVEN_ROWS if even else 0
        )
        for place, (own, layers) in enumerate(group):
            packed = nn.Parameter(PackedWeight(matrix, place, own), own.requires_grad)
            buffers = held.get(_address(own), [])
            done.append((own, packed, layers, buffers))
            _put(packed, own, layers)
            for module, name in buffers:
                module._buffers[name] = packed
            files.give_back(own.data)
            own.data = own.data.new_empty(0) if matrix.packed else matrix.memory
    for weight in {p for module in modules for p in module._parameters.values() if type(p) is nn.Parameter}:
        if _address(weight) not in held:
            weight.data = weight.data.clone()  # else a file stays mapped for what is left of it


def _address(weight: Tensor) -> int:
    return weight.untyped_storage().data_ptr()


def _groups(
    modules: list[nn.Module], held: dict[int, _Buffers], every: bool
) -> list[list[tuple[nn.Parameter, list[nn.Module]]]]:
    """Weights that one linear layer reads, perhaps beside an embedding, with these modules; siblings' together.

    held: buffers by memory. A weight of which a buffer is a part stays as it is. every: weights of several
    layers as well.
    """
    readers = defaultdict(list)
    for module in dict.fromkeys(modules):
        readers[module._parameters.get("weight")].append(module)
    found = []
    dtypes = _dtypes()
    for parent in dict.fromkeys(modules):
        free = {}
        for name, layer in parent.named_children():
            if not computes_plainly(layer) or type(weight := layer.weight) is not nn.Parameter:
                continue
            layers = readers.pop(weight, [])  # once: a layer may have several parents
            alone = every or all(each is layer or type(each) is nn.Embedding for each in layers)
            buffers = held.get(_address(weight), ())
            whole = all(getattr(m, n).shape == weight.shape for m, n in buffers)
            if layers and alone and whole and weight.dtype in dtypes:
                free[name] = weight, layers
        for names in _SIBLINGS:
            if all(name in free and free[name][1][0].bias is None for name in names):
                found.append([free.pop(name) for name in names])
        found += [[each] for each in free.values()]
    return found


def _put(weight: nn.Parameter, before: nn.Parameter, layers: list[nn.Module]) -> None:
    """Give a weight to layers that have the one before."""
    for layer in layers:
        if layer._parameters.get("weight") is before:
            layer._parameters["weight"] = weight


def _restore(done: list[_Packed]) -> None:
    """Give the layers their own parameters, with the current values, and heads the same memory."""
    for own, packed, layers, buffers in done:
        own.data = packed.plain().clone()
        own.grad = packed.grad
        _put(own, packed, layers)
        for module, name in buffers:
            if module._buffers[name] is packed:
                module._buffers[name] = own.detach()


def _plain_state(module: nn.Module, state: dict[str, Any], *rest: Any) -> None:
    """A hook of `state_dict`: plain tensors, but for those who ask for the parameters themselves."""
    for name, value in state.items():
        if isinstance(value, PackedWeight) and not isinstance(value, nn.Parameter):
            state[name] = value.plain()


def linears_in_words(model: PreTrainedModel, reason: str) -> str:
    """How the linear layers of a target run. reason: see `why_plain`."""
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    by_onednn = [weight.matrix.packed for weight in weights if isinstance(weight, PackedWeight)]
    counts = f"{len(by_onednn)} of {len(weights)} by oneDNN, {sum(by_onednn)} in its layout"
    return counts if by_onednn else f"plain: {reason}"
