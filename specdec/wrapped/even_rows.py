"""A model's operators on a CPU whose results for a token depend on the batch: activations in even pieces, and a check
that finds others.

torch computes element-wise functions in vectors, and the numbers that are left at the end of a thread's share one by
one, by another exponential function. So silu, gelu, sigmoid and softplus round by where a number lies in memory.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from transformers import PreTrainedModel

from attention.hf.patches import Value, borrowed
from attention.hf.probe import probe
from specdec.errors import UnsupportedModelError
from specdec.ops.packed_weight import filled_linear
from specdec.wrapped.target import Target

_VECTORS = 64
"""A multiple of the numbers that a loop of vectors takes at once, in any dtype and on any processor."""
_ONE_THREAD = 2**14
"""torch divides no function of so few numbers among threads.

Source: pytorch/pytorch, aten/src/ATen/native/cpu/Activation.cpp, GELU_MIN_ELEMENTS_FOR_MULTI_THREADING."""
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_ELEMENTWISE = ("silu", "gelu", "sigmoid", "softplus", "elu", "celu", "selu", "mish", "log_sigmoid", "hardswish")
_UNEVEN = frozenset(
    (
        *("linear", "mm", "addmm", "baddbmm", "mv", "addmv", "dot", "einsum", "convolution", "cumsum"),
        *_ELEMENTWISE,
        "scaled_dot_product_attention",
    )
)
"""Operators that sum or round by the number of rows. Norms, softmax, exp, tanh, erf, sin and cos do not, which was
measured for 1 to 1,000 rows of five widths with 1 to 5 threads; bmm of rotary embeddings sums nothing."""


def even_activations(model: nn.Module) -> list[Value]:
    """Forwards, for the duration of a specdec forward, by which a model's activations round each number alike."""
    return [
        (module, "forward", partial(_evenly, module.forward))
        for module in model.modules()
        if type(module).__module__ in _ACTIVATIONS and not (module._parameters or hasattr(module, "dim"))
    ]


def even_values(model: PreTrainedModel) -> list[Value]:
    """Attributes, for the duration of a specdec forward, by which a model rounds each number alike, once its linear
    layers are packed.

    Experts take turns. A model that calls other uneven functions than its activations, such as routers do, runs by
    even ones.
    """
    # The property's own attribute: a property cannot be borrowed.
    turns = [(m.config, "_experts_implementation_internal", "eager") for m in model.modules() if hasattr(m, "has_gate")]
    found: list[Value] = [*even_activations(model), *turns]
    packed = [(m, "forward", partial(_empty, m)) for m in model.modules() if type(m) is nn.Linear]
    try:
        with borrowed([*found, *packed]), _Operators():
            uneven = bool(probe(model).recurrent_calls)  # whose functions it does not run
    except UnsupportedModelError:
        uneven = True
    return [*found, (model, "forward", partial(_run_evenly, model.forward))] if uneven else found


def _empty(layer: nn.Linear, x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], layer.out_features)


def _multiplies(func: Any, args: Any) -> bool:
    """Whether it is a product with a matrix; those of two tensors with more dimensions are rotary embeddings', which
    sum nothing."""
    return func is torch.ops.aten.matmul.default and min(args[0].ndim, args[1].ndim) == 2


def _run_evenly(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with _Even():
        return forward(*args, **kwargs)


class _Even(TorchDispatchMode):
    """Linear layers and activations that are no modules give a row the same bits in any batch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.linear.default:
            return filled_linear(*args)
        if _multiplies(func, args):
            left, right = args
            if right.ndim == 2:
                return filled_linear(left, right.t().contiguous())
            return filled_linear(right.mT, left).mT
        if func.overloadpacket.__name__ in _ELEMENTWISE:
            return _evenly(lambda x: func(x, *args[1:], **kwargs or {}), args[0])
        return func(*args, **kwargs or {})


def _evenly(activation: Any, x: Tensor) -> Tensor:
    """An element-wise function of x [..., I] in vectors alone, in pieces that one thread computes."""
    # `_Operators` watches those outside. Hidden from a recording (`recorded.py`) their results would be constants.
    watched = _Operators in map(type, _get_current_dispatch_mode_stack())
    with torch._C._DisableTorchDispatch() if watched else nullcontext():
        count = x.numel()
        if count <= _ONE_THREAD and x.ndim and x.shape[-1] % _VECTORS == 0:
            return activation(x)
        flat = F.pad(x.reshape(-1), (0, -count % _VECTORS))
        return torch.cat([activation(piece) for piece in flat.split(_ONE_THREAD)])[:count].view(x.shape)


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.strip("_") in _UNEVEN or _multiplies(func, args):
            raise UnsupportedModelError(
                f"the model calls {func}, which may round a token by what else is in the batch: not with "
                "backend='batch_invariant' on a CPU; use backend='torch'"
            )
        return func(*args, **kwargs or {})


@torch.inference_mode()
def check_operators(target: Target) -> None:
    """Run a target on two tokens, without attention.

    Raises:
        UnsupportedModelError: an operator's results may depend on the batch.
    """
    tokens = torch.arange(2)
    with _Operators():
        # Without attention, whose own operators are another matter.
        target.launch(
            tokens,
            tokens,
            tokens,
            lambda _, q, k, v, *sinks: q.new_zeros(*q.shape[:2], v.shape[-1]),
            target.hf_model,
            None if target.states is None else target.states.blank(),
            0,
        )
