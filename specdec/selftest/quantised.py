"""Self-tests of quantised layers: the same result in any batch, rounding of activations, and FP8 operators.

A layer that rounds its activations by the largest one of the *batch* (torchao's per-tensor scales), or treats columns
with large values in another way (bitsandbytes' LLM.int8), gives a token different results in a batch, by less than the
self-test of logits may notice. So one layer of each kind is tested directly. A wrong scale of an FP8 operator is on
both sides of the self-test of logits, whose eager forward runs the same operators: they are tested here as well.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.hf.weights import is_quantised
from specdec.errors import UnsupportedModelError
from specdec.ops.fp8 import BLOCK, FP8, fp8_linear
from specdec.ops.mixtures.choice import own_form
from specdec.ops.mixtures.paired import expert_matmul
from specdec.selftest.eager_reference import errors_named, relative_errors
from specdec.wrapped.quantised_layers import Fp8Layers, Mxfp4Experts

_BATCH_TOKENS = 32
"""Tokens of a call: above the 16 that integer matmuls of cuBLAS need."""
_FAINT = 1e-3
_LOUD = 100.0
_SAME = 1e-3
"""Tolerated relative rms difference of a row between batches; rounding a row to 8 bits, or not, makes 3e-3 or more."""
_LINEAR = 1e-4
"""The same of f(x + y) to f(x) + f(y), in float32; activations in 8 bits make 3e-3 or more."""


def quantised_self_test(model: PreTrainedModel, fp8: Fp8Layers | None) -> None:
    """All tests of a quantised target's layers. Raises UnsupportedModelError: one fails."""
    neighbour_test(model)
    packed = {m.down_proj_blocks.shape: (n, m) for n, m in model.named_modules() if isinstance(m, Mxfp4Experts)}
    for name, module in packed.values():  # one mixture of every shape
        _test_packed(name, module, Mxfp4Experts.forward)
    if fp8 is not None:
        fp8_self_test(fp8)


@torch.no_grad()
def neighbour_test(model: PreTrainedModel) -> None:
    """Give one quantised linear layer of each kind the same row in a batch with small rows and in one with large rows.

    Raises:
        UnsupportedModelError: the row comes out differently, or the layer fails; the message names the layer and the
            likely cause.
    """
    for name, layer, x in _one_of_each_kind(model):
        results = []
        for scale in (_FAINT, _LOUD):
            batch = x * scale
            batch[0, 0] = x[0, 0]
            with errors_named(model, f"{name} ({type(layer).__name__}) reads {_BATCH_TOKENS} tokens"):
                results.append(layer(batch)[0, 0])
        difference = float(relative_errors(results[1], results[0]))
        if not difference <= _SAME:  # "not <=": NaN is an error, too
            raise UnsupportedModelError(
                f"{type(model).__name__} is quantised so that a token's result depends on what else is in the batch: "
                f"{name} ({type(layer).__name__}) gives a token another output (off by {difference:.2g}) beside large "
                f"ones than beside small ones. {_cause(layer)}"
            )


@torch.no_grad()
def rounds_activations(model: nn.Module) -> bool:
    """Whether a quantised linear layer rounds its input, so that its output is not linear in it; float32 only.

    A value between two steps goes to either by rounding errors of 1e-7, and the output then differs by a step.
    """
    for _, layer, x in _one_of_each_kind(model):
        bias = layer(torch.zeros_like(x)).double()
        whole = layer(x + x.flip(1))
        parts = layer(x).double() + layer(x.flip(1)).double() - bias
        if not relative_errors(whole.flatten(), parts.flatten()) <= _LINEAR:
            return True
    return False


def _one_of_each_kind(model: Any) -> Iterator[tuple[str, Any, Tensor]]:
    """The first quantised linear layer of each class, weight class and scheme, and tokens [1, T, I] for it; the user's
    random generator stays as it is."""
    seen = set()
    for name, layer in model.named_modules():
        if not is_quantised(layer) or not isinstance(getattr(layer, "in_features", None), int):
            continue
        weight = getattr(layer, "weight", None)
        kind = (type(layer), type(getattr(weight, "data", None)), str(getattr(layer, "quantization_scheme", "")))
        if kind not in seen:
            seen.add(kind)
            x = torch.randn(1, _BATCH_TOKENS, layer.in_features, generator=torch.Generator().manual_seed(0))
            yield name, layer, x.to(model.device, model.dtype)


def _cause(layer: Any) -> str:
    threshold = getattr(getattr(layer, "state", None), "threshold", None)
    if threshold:
        return (
            f"bitsandbytes computes columns in 16 bits in which any token of the batch is beyond llm_int8_threshold="
            f"{threshold:g}; load the model with llm_int8_threshold=0.0 (rows are then rounded each for itself), in 4 "
            "bits, or without quantisation"
        )
    return (
        "Probably its activations are scaled by the largest one of the whole tensor, at every call (dynamic, per "
        "tensor); take a quantisation with scales per token (per row), with static ones, or of the weights alone"
    )


_TOLERANCE = 0.01
_ROUNDED = 0.03
"""Largest error of a matmul over its result, rms of any block of rows: bfloat16 rounds by 0.002; and of
two with a rounding to 8 bits between them, which a last bit moves by a step."""
_TOKENS = (3, 40)
_FP8_ROWS = 4 * BLOCK


@torch.inference_mode()
def fp8_self_test(layers: Fp8Layers) -> None:
    """Multiply by one layer of every shape.

    Raises:
        UnsupportedModelError: an operator's results are wrong on this device; the message names the layer.
    """
    linear = {(m.weight.shape, m.activation_scale is None): (n, m) for n, m in layers.linear.items()}
    for name, module in linear.values():
        for tokens in _TOKENS:
            _test_linear(name, module, tokens)
    mixtures = {m.down_proj.shape: (n, m) for n, m in layers.experts.items()}
    for name, experts in mixtures.values():
        _test_experts(name, experts)
        if experts.has_gate:
            _test_packed(name, experts, own_form)


@torch.inference_mode()
def _test_packed(name: str, module: Any, run: Callable[..., Tensor]) -> None:
    """Compare packed experts with their operator's results on a CPU, for the first and the last expert."""
    ends = [0, module.num_experts - 1]
    small = copy.copy(module)
    device = next(module.parameters()).device
    # A new dict: the shallow copy shares the module's own, into which assigned parameters would go.
    small._parameters = {n: None if p is None else p[ends].cpu() for n, p in module._parameters.items()}
    x = torch.randn(_BATCH_TOKENS, module.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    index = torch.arange(_BATCH_TOKENS)[:, None] % 2
    weights = torch.ones(_BATCH_TOKENS, 1, dtype=x.dtype)
    theirs = torch.tensor(ends)[index].to(device)
    for tokens in (1, _BATCH_TOKENS):
        part = slice(tokens)
        ours = run(module, x[part].to(device), theirs[part], weights[part].to(device))
        _compare(name, ours.cpu().float(), run(small, x[part], index[part], weights[part]).float(), _ROUNDED)


def _test_linear(name: str, module: Any, tokens: int) -> None:
    weight = module.weight
    static = module.activation_scale
    x = _random(tokens, weight, static)
    ours = fp8_linear(x, weight, module.weight_scale_inv, None, static).float()
    blocks = module.weight_scale_inv.reshape(1, 1) if module.block_size is None else module.weight_scale_inv
    blocks = blocks.expand(math.ceil(weight.shape[0] / BLOCK), math.ceil(weight.shape[1] / BLOCK))
    for start in sorted({0, max(weight.shape[0] - _FP8_ROWS, 0) // BLOCK * BLOCK}):
        part = slice(start, start + _FP8_ROWS)
        right = _summed(x, static, weight[part], blocks[start // BLOCK :])
        _compare(name, ours[:, part], right)


def _test_experts(name: str, module: Any) -> None:
    stack = module.down_proj
    scales = module.down_proj_scale_inv
    index = torch.arange(3, device=stack.device)[:, None] % len(stack)
    x = _random(3, stack, None)
    ours = expert_matmul(x[:, None].float(), stack, scales, index)
    for token, expert in enumerate(index.flatten().tolist()):
        _compare(name, ours[token], _summed(x[token : token + 1], None, stack[expert], scales[expert]))


def _random(tokens: int, weight: Tensor, static: Tensor | None) -> Tensor:
    """[T, I] bfloat16; groups of different size, by which a scale in the wrong place shows."""
    generator = torch.Generator().manual_seed(0)
    width = weight.shape[-1]
    sizes = torch.rand(tokens, math.ceil(width / BLOCK), generator=generator).add(0.2).repeat_interleave(BLOCK, 1)
    x = (torch.randn(tokens, width, generator=generator) * sizes[:, :width]).to(weight.device, torch.bfloat16)
    return x if static is None else x * (100 * static).to(x.dtype)


def _summed(x: Tensor, static: Tensor | None, weight: Tensor, scales: Tensor) -> Tensor:
    """x [T, I] rounded to 8 bits, times weight [O, I] with scales [≥⌈O/128⌉, ⌈I/128⌉]: [T, O] float32, plainly."""
    out = torch.zeros(len(x), len(weight), device=x.device)
    for group in range(math.ceil(x.shape[1] / BLOCK)):
        columns = slice(group * BLOCK, (group + 1) * BLOCK)
        part = x[:, columns].float()
        scale = part.abs().amax(1, keepdim=True) / 448 if static is None else static.float().reshape(1, 1)
        rounded = (part / scale).clamp(-448, 448).to(FP8).float()
        by_row = scales[:, group].repeat_interleave(BLOCK)[: len(weight)]
        out += (rounded @ weight[:, columns].float().t()) * scale * by_row
    return out


def _compare(name: str, ours: Tensor, right: Tensor, allowed: float = _TOLERANCE) -> None:
    """[T, O] each, block by block of rows."""
    errors = [
        float(relative_errors(a.flatten(), b.flatten()))
        for a, b in zip(ours.split(BLOCK, 1), right.split(BLOCK, 1), strict=True)
    ]
    if not (worst := max(errors)) <= allowed:
        raise UnsupportedModelError(
            f"a matmul of quantised weights comes out wrong on {ours.device}: relative error {worst:.2g} (allowed: "
            f"{allowed:g}) with the weight of {name}, {len(ours)} tokens"
        )
