"""How a model's weights are stored: plain matrices, or packed and scaled by a quantisation library.

No library is imported to recognise its classes: a quantised layer is recognised by its class, by a `forward` set on the
instance, or by tensors that wrap others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_PACKED = "PackedWeight"
"""Of specdec: a class of plain matrices in another order of memory."""
_EXPERTS = "Mxfp4GptOssExperts"
"""transformers' class of experts in MXFP4, whose matrices are no parameters but objects of its kernels' package."""
_PACKED_EXPERTS = (_EXPERTS, "Mxfp4Experts")
_NARROW = 1
"""Bytes of a number that no model computes in: 8 bits or fewer, or packed into bytes."""
_MARKS = ("quantization_scheme", "qweight", "W_q", "weight_packed", "weight_qtype", "_packed_params")
"""Attributes of quantised linear layers whose tensors need not show it: compressed-tensors decompresses weights; GPTQ,
AWQ and HQQ pack 4-bit numbers into wider ones; a layer of optimum-quanto that is not frozen rounds its weight at every
call; torch.ao's holds no tensors."""


def computes_plainly(layer: nn.Module) -> bool:
    """Whether a layer is an `nn.Linear` that computes x · weightᵀ + bias of a matrix that torch can read.

    False if the class differs, the instance has its own `forward` (compressed-tensors sets one that rounds
    activations), or the weight is packed, in 8 bits or a wrapper tensor (torchao).
    """
    own_forward = "forward" in vars(layer) or type(vars(layer).get("_parameters")) is not dict  # offloading libraries
    return type(layer) is nn.Linear and not own_forward and is_plain_weight(layer.weight)


def is_plain_weight(weight: Any) -> bool:
    """Whether a parameter is a plain matrix of floating-point numbers of 16 bits or more, with its own storage."""
    return _is_plain(weight) and weight.is_floating_point() and weight.element_size() > _NARROW


def _is_plain(tensor: Any) -> bool:
    kind = type(tensor)
    return (kind in _PLAIN_TENSORS and type(tensor.data) is Tensor) or kind.__name__ == _PACKED


def is_quantised(layer: nn.Module) -> bool:
    """Whether a layer's own weights are stored by a quantisation library, or its activations rounded by one."""
    if type(layer).__name__ in _PACKED_EXPERTS:
        return True
    if isinstance(layer, nn.Embedding):
        return not is_plain_weight(layer.weight)
    own = [t for t in (*layer._parameters.values(), *layer._buffers.values()) if t is not None and t.ndim > 0]
    if not hasattr(layer, "in_features"):
        return False
    if any(getattr(layer, name, None) is not None for name in _MARKS):
        return True
    made_of_others = (type(t.data) is not Tensor and not _is_plain(t) for t in own)
    packed = (t.element_size() <= _NARROW and t.dtype is not torch.bool for t in own if type(t.data) is Tensor)
    return any(chain(made_of_others, packed))


def has_quantised(model: nn.Module) -> bool:
    """Whether anything in a model may be quantised: any layer of `is_quantised`, and experts or attention, which that
    leaves out, by a mark or a weight in 8 bits or fewer."""
    if any(not is_plain_weight(weight) for weight in model.parameters()):
        return True
    return any(is_quantised(m) or any(getattr(m, mark, None) is not None for mark in _MARKS) for m in model.modules())


def runs_plainly(layer: nn.Module) -> bool:
    """Whether a layer is not quantised, or was and is decompressed to an `nn.Linear` that computes as any other."""
    return not is_quantised(layer) or computes_plainly(layer)


def memory_of(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor's values lie in: itself, or those that a tensor subclass is made of."""
    if type(tensor) in _PLAIN_TENSORS or type(tensor).__name__ == _PACKED:
        yield tensor
        return
    flatten = getattr(tensor.data, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _ = flatten()
    for name in names:
        yield from memory_of(getattr(tensor.data, name))


def address_of(tensor: Tensor) -> int:
    """Where a tensor's values begin, by its first plain tensor where it is made of several."""
    return tensor.data_ptr() if type(tensor) is nn.Parameter else next(memory_of(tensor)).data_ptr()


def stored_bytes(tensor: Tensor) -> int:
    """Bytes that a parameter's values take, with the scales that belong to them."""
    inner = sum(part.numel() * part.element_size() for part in memory_of(tensor))
    return inner + sum(part.nbytes for part in _bitsandbytes_scales(tensor))


def num_elements(name: str, tensor: Tensor) -> int:
    """Weights that a parameter of this name encodes: two per byte for bitsandbytes' 4-bit weights and for MXFP4, none
    for MXFP4's exponents."""
    if tensor.dtype == torch.uint8 and name.endswith(("_blocks", "_scales")):
        return 2 * tensor.numel() if name.endswith("_blocks") else 0
    state = getattr(tensor, "quant_state", None)
    return tensor.numel() if state is None else int(state.shape.numel())


def _bitsandbytes_scales(tensor: Tensor) -> Iterator[Tensor]:
    """bitsandbytes' scales of a parameter: absmax of blocks, nested or not; row scales of 8-bit weights."""
    state = getattr(tensor, "quant_state", None)
    nested = getattr(state, "state2", None)
    for part in (
        getattr(state, "absmax", None),
        getattr(state, "code", None),
        getattr(nested, "absmax", None),
        getattr(tensor, "SCB", None),
    ):
        if isinstance(part, Tensor):
            yield part


def model_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights as they are stored: parameters, and the quantised layers' buffers."""
    layers = [m for m in model.modules() if is_quantised(m)]
    buffers = (b for m in layers for b in m._buffers.values() if b is not None)
    experts = (t for m in layers if type(m).__name__ == _EXPERTS for t in _mxfp4_memory(m))
    moved = (getattr(getattr(m, "state", None), "SCB", None) for m in layers)  # bitsandbytes' scales of 8-bit rows
    rows = (t for t in moved if isinstance(t, Tensor))
    return sum(map(stored_bytes, chain(model.parameters(), buffers, experts, rows)))


def _mxfp4_memory(experts: Any) -> Iterator[Tensor]:
    """Blocks and scales of experts in MXFP4, as transformers' integration keeps them (`swizzle_mxfp4`)."""
    for name in ("gate_up_proj", "down_proj"):
        config = getattr(experts, f"{name}_precision_config", None)
        for held in (getattr(experts, name, None), getattr(config, "weight_scale", None)):
            memory = getattr(getattr(held, "storage", held), "data", None)
            if isinstance(memory, Tensor) and not isinstance(held, nn.Parameter):
                yield memory


def dense_weight(module: nn.Module) -> Tensor | None:
    """A layer's weight as a matrix of floating-point numbers, a copy where it is quantised; None if impossible.

    Source: torchao's and optimum-quanto's tensors offer `dequantize`.
    """
    weight = getattr(module, "weight", None)
    if is_plain_weight(weight):
        return weight
    multiply_out = getattr(getattr(weight, "data", None), "dequantize", None)
    if weight is None or type(weight.data) is Tensor or multiply_out is None:
        return None
    with torch.no_grad():
        dense: Tensor = multiply_out()
    return dense
