"""Tiny checkpoints quantised by the real libraries, and what transformers says of them.

Each library is imported where it is needed: a test of one that is not installed is skipped, with its name.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import TINY, enlarge
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {**TINY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
"""Wide enough for blocks of 64, in which bitsandbytes scales its 4-bit numbers."""
PACKAGES = {
    "compressed-tensors": ("compressed_tensors",),
    "torchao": ("torchao",),
    "quanto": ("optimum.quanto", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
}


def need(method: str) -> None:
    """Skip the test where a package of the method is not installed."""
    for module in PACKAGES[method]:
        try:
            found = importlib.util.find_spec(module)
        except ImportError:
            found = None
        if found is None:
            pytest.skip(f"{method}: the package {module} is not installed")


@functools.cache
def _plain() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False)
    enlarge(model)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.02)
        layer.mlp.down_proj.weight.mul_(0.02)
    return model


def plain_llama() -> LlamaForCausalLM:
    """The model before it was quantised: float32, 3 layers."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False)
    model.load_state_dict(_plain().state_dict())
    return model


def compressed_tensors(preset: str, folder: Path, kv_cache: Mapping[str, Any] | None = None, model: Any = None) -> None:
    """A checkpoint of compressed-tensors, calibrated by the weights alone; static activation scales are 0.05.

    model: what is quantised, by default `plain_llama`.

    kv_cache: a `kv_cache_scheme`; the scale of layer i is then 0.02 · (i + 1) for keys and half of that for values.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model, scheme = model or plain_llama(), preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.group_size:
        scheme.weights.group_size = 32
    kinds = {"W4A16": "pack-quantized", "W8A8": "int-quantized"}
    scheme_of_cache = None if kv_cache is None else QuantizationArgs(**kv_cache)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        kv_cache_scheme=scheme_of_cache,
        format=kinds.get(preset, "float-quantized"),
        quantization_status="initialized",
    )
    apply_quantization_config(model, config)
    for layer in model.modules():
        how = getattr(layer, "quantization_scheme", None)
        if how is None or how.weights is None:
            continue
        groups = layer.weight.unflatten(-1, (-1, how.weights.group_size or layer.weight.shape[-1]))
        low, high = (x.min() if how.weights.strategy == "tensor" else x for x in (groups.amin(-1), groups.amax(-1)))
        high = high if how.weights.strategy != "tensor" else groups.max()
        scale, zero = calculate_qparams(low.reshape(layer.weight_scale.shape), high.reshape(low.shape), how.weights)
        layer.weight_scale.data.copy_(scale.reshape(layer.weight_scale.shape))
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.data.copy_(zero.reshape(layer.weight_zero_point.shape))
        if how.input_activations is not None and not how.input_activations.dynamic:
            layer.input_scale.data.fill_(0.05)
    for number, layer in enumerate(model.model.layers):
        if kv_cache is not None and not kv_cache.get("dynamic"):
            layer.self_attn.k_scale.data.fill_(0.02 * (number + 1))
            layer.self_attn.v_scale.data.fill_(0.01 * (number + 1))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def torchao(config: Any, folder: Path) -> None:
    """A checkpoint of torchao, as transformers saves it."""
    from transformers import TorchAoConfig

    base = folder.parent / f"{folder.name}-base"
    plain_llama().save_pretrained(base)
    _reloaded(base, TorchAoConfig(config)).save_pretrained(folder)


def bitsandbytes(folder: Path, **options: Any) -> None:
    """A checkpoint of bitsandbytes, as transformers saves it."""
    from transformers import BitsAndBytesConfig

    base = folder.parent / f"{folder.name}-base"
    plain_llama().save_pretrained(base)
    _reloaded(base, BitsAndBytesConfig(**options), device_map={"": "cpu"}).save_pretrained(folder)


def quanto(folder: Path, dtype: torch.dtype = torch.float32, weights: str = "qint8") -> None:
    """A checkpoint of optimum-quanto, in its own format; dtype: of what is quantised, and so of the scales."""
    from optimum.quanto import QuantizedModelForCausalLM

    model = plain_llama().to(dtype)
    QuantizedModelForCausalLM.quantize(model, weights=weights, exclude="lm_head").save_pretrained(folder)


def own_model(folder: Path) -> Any:
    """The checkpoint as its users load it, without specdec."""
    if (folder / "quanto_qmap.json").exists():
        from optimum.quanto import QuantizedModelForCausalLM

        return QuantizedModelForCausalLM.from_pretrained(folder)._wrapped
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _reloaded(base: Path, how: Any, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=how, dtype=torch.float32, **options)


def _torchao_int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def _torchao_per_tensor() -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, PerTensor

    return Int8DynamicActivationInt8WeightConfig(granularity=PerTensor())


MAKERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "compressed-tensors int4": ("compressed-tensors", lambda folder: compressed_tensors("W4A16", folder)),
    "compressed-tensors fp8": ("compressed-tensors", lambda folder: compressed_tensors("FP8", folder)),
    "torchao int8": ("torchao", lambda folder: torchao(_torchao_int8(), folder)),
    "quanto int8": ("quanto", quanto),
    "bitsandbytes nf4": (
        "bitsandbytes",
        lambda folder: bitsandbytes(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_blocksize=64),
    ),
    "bitsandbytes int8": (
        "bitsandbytes",
        lambda folder: bitsandbytes(folder, load_in_8bit=True, llm_int8_threshold=0.0),
    ),
    "torchao int8, per tensor": ("torchao", lambda folder: torchao(_torchao_per_tensor(), folder)),
    "bitsandbytes LLM.int8": ("bitsandbytes", lambda folder: bitsandbytes(folder, load_in_8bit=True)),
    "compressed-tensors int8": ("compressed-tensors", lambda folder: compressed_tensors("W8A8", folder)),
}
"""Name -> method, and what writes a checkpoint into a folder."""


def make(name: str, folder: Path) -> Path:
    """Write the checkpoint of a name; skips the test where its library is not installed."""
    method, maker = MAKERS[name]
    need(method)
    maker(folder)
    return folder


def mxfp4(folder: Path, **more: Any) -> None:
    """A tiny gpt-oss checkpoint as published: experts in blocks of 32 4-bit numbers with a scale each (uint8).

    more: options of its configuration.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "sliding_window": 16}
    config = GptOssConfig(**{**TINY, **sizes, **more}, num_local_experts=4, num_experts_per_tok=2)
    model = GptOssForCausalLM(config).eval().requires_grad_(False)
    enlarge(model)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 124, shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def settings(folder: Path, **changes: Any) -> None:
    """Change values of a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def add_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Add tensors to a folder's weights."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


class Int8Pair(torch.Tensor):
    """A weight as torchao's tensors are made: int8 numbers [O, I] and scales [O, 1], a matrix of float32 to others."""

    numbers: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scales: torch.Tensor) -> Int8Pair:
        made: Int8Pair = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scales.dtype)  # type: ignore[attr-defined]
        made.numbers, made.scales = numbers, scales
        return made

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8Pair:
        """weight [O, I], rounded row by row."""
        scales = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scales).round().to(torch.int8), scales)

    def dequantize(self) -> torch.Tensor:
        """[O, I] in the dtype of the scales."""
        return self.numbers * self.scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], *_: Any) -> Int8Pair:
        return cls(parts["numbers"], parts["scales"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Itself where it is only looked at or copied; multiplied out in all other operators."""
        if function.overloadpacket.__name__ in ("detach", "alias", "clone", "_to_copy"):
            return cls(args[0].numbers, args[0].scales)
        dense = tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        return function(*dense[0], **dense[1])


class RoundedByTensor(torch.nn.Linear):
    """A quantised layer that rounds what it reads by the largest number of the whole batch; `by_row`: of each token."""

    by_row = False
    weight_qtype = "int8"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        largest = input.abs().amax(-1, keepdim=True) if self.by_row else input.abs().max()
        scale = largest.clamp(min=1e-9) / 127
        return torch.nn.functional.linear((input / scale).round() * scale, self.weight, self.bias)


class RoundedByRow(RoundedByTensor):
    """The same by the largest number of each token."""

    by_row = True
