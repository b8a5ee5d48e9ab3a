"""Whether a quantised layer gives a token the same result whatever else is in the batch, and whether it rounds tokens.

A layer that rounds its activations by the largest one of the *batch* (torchao's per-tensor scales), or treats columns
in which any token is large in another way (outliers of bitsandbytes' LLM.int8), computes a token by its neighbours. In
a batch of requests, or a verification of several tokens, such a model says other things than alone; in half precision
the difference may be below what the self-test of logits allows. Here one layer of each kind is asked directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from attention.hf.weights import is_quantised
from specdec.errors import UnsupportedModelError
from specdec.selftest.rereading import errors_named

_BATCH_TOKENS = 32
"""Tokens of a call: above the 16 that integer matmuls of cuBLAS need."""
_FAINT, _LOUD = 1e-3, 100.0
_SAME = 1e-3
"""Relative rms difference of a row beside others; rounding a row to 8 bits, or not, makes 3e-3 or more."""
_LINEAR = 1e-4
"""The same of f(x + y) to f(x) + f(y), in float32; activations in 8 bits make 3e-3 or more."""


@torch.no_grad()
def neighbour_test(model: PreTrainedModel) -> None:
    """Give one quantised linear layer of each kind the same row beside faint rows and beside loud ones.

    Raises:
        UnsupportedModelError: the row comes out differently, or the layer fails; the message names the layer and the
            likely cause.
    """
    for name, layer in _one_of_each_kind(model):
        run, x = _runner(layer, model)
        results = []
        for scale in (_FAINT, _LOUD):
            batch = x * scale
            batch[0] = x[0]
            with errors_named(model, f"{name} ({type(layer).__name__}) reads {_BATCH_TOKENS} tokens"):
                results.append(run(batch)[0].double())
        difference = _relative(results[1], results[0])
        if not difference <= _SAME:
            raise UnsupportedModelError(
                f"{type(model).__name__} is quantised so that a token's result depends on what else is in the batch: "
                f"{name} ({type(layer).__name__}) gives a token another output (off by {difference:.2g}) beside large "
                f"ones than beside small ones. {_cause(layer)}"
            )


@torch.no_grad()
def rounds_activations(model: nn.Module) -> bool:
    """Whether a quantised linear layer rounds what it reads, so that its output is not linear in it; float32 only.

    A value between two steps goes to either by rounding errors of 1e-7, and the output then differs by a step.
    """
    for _, layer in _one_of_each_kind(model):
        run, x = _runner(layer, model)
        bias = run(torch.zeros_like(x)).double()
        whole, parts = run(x + x.flip(0)), (run(x).double() + run(x.flip(0)).double() - bias)
        if not _relative(whole.double(), parts) <= _LINEAR:
            return True
    return False


def _one_of_each_kind(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The first quantised linear layer of each class, weight class and scheme."""
    seen = set()
    for name, layer in model.named_modules():
        if not is_quantised(layer) or not isinstance(getattr(layer, "in_features", None), int):
            continue
        weight = getattr(layer, "weight", None)
        kind = (type(layer), type(getattr(weight, "data", None)), str(getattr(layer, "quantization_scheme", "")))
        if kind not in seen:
            seen.add(kind)
            yield name, layer


def _runner(layer: Any, model: Any) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """The layer as a function of tokens [T, I], and tokens; the user's random generator stays as it is."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_BATCH_TOKENS, layer.in_features, generator=generator).to(model.device, model.dtype)
    return lambda tokens: layer(tokens[None])[0], x


def _relative(ours: torch.Tensor, right: torch.Tensor) -> float:
    return float((ours - right).square().mean().sqrt() / right.square().mean().sqrt())


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
