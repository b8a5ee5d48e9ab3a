"""Linear layers on a CPU: whether their weights are laid out for oneDNN, and laying them out, in one copy."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.hf.gate import gate_of
from attention.hf.patches import attention_configs
from attention.hf.weights import computes_plainly, model_bytes
from specdec.errors import InvalidInputError
from specdec.loading.progress import log
from specdec.ops.packed_weight import ONEDNN, Matrix, PackedWeight
from specdec.wrapped.alterations import Alterations

DTYPES = (torch.float32, torch.bfloat16)
_FEWEST_BYTES = 2**25
"""Weights of fewer bytes stay in a processor's cache, where laying them out gains nothing."""
_MEASURED = ("x86_64", "AMD64")
"""Machines on which packed weights were measured to be faster."""


def why_plain(asked: str, model: PreTrainedModel, loaded_before: bool, alone: bool) -> str:
    """Why linear layers stay as they are, in words; "" where they are packed.

    loaded_before: by the user, who may hold the parameters. alone: whether one process runs the model.

    Raises:
        InvalidInputError: "packed", and that is impossible.
    """
    reason = _impossible(model, alone)
    if asked == "packed" and reason:
        raise InvalidInputError(f"cpu_linears='packed': {reason}; give 'auto' or 'plain'")
    if reason or asked == "packed":
        return reason
    if asked == "plain":
        return "cpu_linears='plain'"
    if loaded_before:
        return "the model was loaded before, and its parameters may be used elsewhere; cpu_linears='packed' packs them"
    if platform.machine() not in _MEASURED:
        return f"not measured on {platform.machine()}; cpu_linears='packed' packs them"
    small = model_bytes(model) < _FEWEST_BYTES
    return f"the weights take less than {_FEWEST_BYTES >> 20} MiB" if small else ""


def _impossible(model: PreTrainedModel, alone: bool) -> str:
    if model.device.type != "cpu":
        return f"it is for a CPU, and the model is on {model.device}"
    if not alone:
        return "the model is divided among processes"
    if not torch.backends.mkldnn.is_available() or not hasattr(ONEDNN, "_linear_pointwise"):
        return "this torch is built without oneDNN"
    if model.dtype == torch.bfloat16 and not ONEDNN._is_mkldnn_bf16_supported():
        return "oneDNN has no bfloat16 on this processor"
    return "" if model.dtype in DTYPES else f"it is for float32 and bfloat16, and the model is {model.dtype}"


def pack_linears(parts: Sequence[object], kept: Sequence[nn.Module], alterations: Alterations) -> None:
    """Lay out the weights of the linear layers of a target and its head; the plain ones are freed until that is undone.

    A weight that is also an embedding stays plain memory, which oneDNN reads as it is.

    parts: those that are modules have weights. kept: modules whose weights are read by others.
    """
    log.info("packing the weights of linear layers")
    roots = [part for part in parts if isinstance(part, nn.Module)]
    modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in modules:
        if (weight := module._parameters.get("weight")) is not None:
            owners.setdefault(weight, []).append(module)
    done: list[_Packed] = []
    alterations.on_undo(partial(_unpack, done, [config for root in roots for config in attention_configs(root)]))
    for root in roots:
        alterations.on_undo(root.register_state_dict_post_hook(_plain_state).remove)
    for weight, readers in owners.items():
        shared = [(m._buffers, key) for m in modules for key, b in m._buffers.items() if b is not None and _lies_in(b, weight)]
        if _packable(weight, readers, shared) and not set(readers) & set(kept):
            done.append(_Packed.of(weight, readers, shared))


@dataclass(frozen=True)
class _Packed:
    """A weight that was laid out.

    Attributes:
        own: the user's parameter, without memory if the weight has blocks. weight: what is in its place.
        owners: the modules whose weight it is. shared: dicts of buffers that are this weight, with their keys.
    """

    own: nn.Parameter
    weight: nn.Parameter
    owners: Sequence[nn.Module]
    shared: Sequence[tuple[dict[str, Tensor | None], str]]

    @classmethod
    def of(cls, own: nn.Parameter, owners: Sequence[nn.Module], shared: Any) -> _Packed:
        """Lay it out, and put the result in its place."""
        matrix = Matrix(own.detach(), not any(isinstance(owner, nn.Embedding) for owner in owners))
        found = cls(own, nn.Parameter(PackedWeight(matrix, own), own.requires_grad), owners, shared)
        found.place(found.weight)
        if matrix.blocks:
            own.data = own.data.new_empty(0)
        return found

    def place(self, weight: nn.Parameter) -> None:
        """Make it the owners' weight. An owner that was given another one keeps that."""
        for owner in self.owners:
            now = owner._parameters.get("weight")
            if now is self.own or now is self.weight:
                owner._parameters["weight"] = weight
        for buffers, key in self.shared:
            buffers[key] = weight.detach()

    def undo(self) -> None:
        """Put the user's parameter back, with the current values."""
        packed: Any = self.weight
        if packed.matrix.blocks:
            self.own.data = packed.plain()
        self.own.grad = packed.grad
        self.place(self.own)


def _unpack(done: Sequence[_Packed], configs: Sequence[Any]) -> None:
    """No forward runs meanwhile."""
    with gate_of(configs[0] if configs else None).held(), torch.no_grad():
        for packed in done:
            packed.undo()


def _packable(weight: nn.Parameter, owners: Sequence[nn.Module], shared: Sequence[tuple[Any, str]]) -> bool:
    """Whether linear layers, and embeddings beside them, are all that reads a weight, and read all of it."""
    linears = [owner for owner in owners if computes_plainly(owner)]
    others = [owner for owner in owners if owner not in linears and type(owner) is not nn.Embedding]
    whole = all(buffers[key].shape == weight.shape for buffers, key in shared)
    known = weight.dtype in DTYPES and type(weight) is nn.Parameter
    return bool(linears) and not others and whole and known


def _lies_in(buffer: Tensor, weight: nn.Parameter) -> bool:
    return buffer.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def _plain_state(module: nn.Module, state: dict[str, Any], *rest: Any) -> None:
    """A hook of `state_dict`: plain tensors, but for those who ask for the parameters themselves."""
    for name, value in state.items():
        if isinstance(value, PackedWeight) and not isinstance(value, nn.Parameter):
            state[name] = value.plain()


def linears_in_words(model: PreTrainedModel, head: Any, reason: str) -> str | None:
    """How the linear layers run on a CPU; None on another device. reason: see `why_plain`."""
    if model.device.type != "cpu":
        return None
    roots = [root for root in (model, head) if isinstance(root, nn.Module)]
    weights = [m.weight for root in roots for m in root.modules() if isinstance(m, nn.Linear)]
    packed: list[Any] = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if not packed:
        return f"plain: {reason}"
    tied = sum(not weight.matrix.blocks for weight in packed)
    plainly = f", {tied} of them in place: tied to an embedding" if tied else ""
    return f"oneDNN: {len(packed)} of {len(weights)} layers{plainly}"
