"""Which matmuls compiled code will run, so that their algorithms can be chosen before."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from attention.backends.limits import HALF
from attention.hf.weights import is_plain_weight
from specdec.compiler.siblings import SiblingLinear
from specdec.ops.gemm_selection import Wanted, select_products


def choose_products(readers: Iterable[tuple[object, Iterable[int]]], batch_invariant: bool = False) -> str:
    """Choose the algorithm of every matmul that compiled code asks cuBLASLt for, and say in words what was done.

    Call it after siblings were fused and before anything is captured, while nothing else runs on the device.

    Args:
        readers: modules (anything else has no weights) and the numbers of tokens that they are captured for.
        batch_invariant: matmuls are summed alike for any number of tokens: nothing to choose.
    """
    if batch_invariant:
        return "none to choose (batch-invariant)"
    return select_products(wanted_products((m, t) for m, t in readers if isinstance(m, nn.Module)))


def wanted_products(readers: Iterable[tuple[nn.Module, Iterable[int]]]) -> list[Wanted]:
    """Weights of one shape, each once, with every number of tokens of a module that has one of them."""
    weights: dict[tuple[torch.device, torch.dtype, torch.Size], dict[int, torch.Tensor]] = {}
    tokens: dict[tuple[torch.device, torch.dtype, torch.Size], set[int]] = {}
    for module, numbers in readers:
        counts = frozenset(numbers)
        for weight in product_weights(module):
            if weight.is_cuda and weight.dtype in HALF:
                key = weight.device, weight.dtype, weight.shape
                weights.setdefault(key, {}).setdefault(weight.data_ptr(), weight)
                tokens.setdefault(key, set()).update(counts)
    return [Wanted(list(own.values()), frozenset(tokens[key])) for key, own in weights.items()]


def product_weights(module: nn.Module) -> list[torch.Tensor]:
    """Weights [O, I] of the linear layers without bias as compiled code reads them, siblings' once."""
    found: dict[int, torch.Tensor] = {}
    for layer in module.modules():
        if not isinstance(layer, nn.Linear) or layer.bias is not None:
            continue
        if not is_plain_weight(layer.weight):
            continue  # compiled code multiplies by it in the quantisation library's own operators
        weight = layer.fused_weight if isinstance(layer, SiblingLinear) else layer.weight
        found.setdefault(weight.data_ptr(), weight.detach())
    return list(found.values())
