"""Targets that optimum-quanto saved: packed weights, and a map of how each layer was quantised.

transformers quantises with this library, but neither saves nor reads what it made; the library's own format is what is
published. Here its own functions put such a checkpoint together, with transformers' configuration and class.

Source: optimum/quanto/models/transformers_models.py, `QuantizedTransformersModel.from_pretrained`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from drafters.checkpoints.tensor_files import open_folder
from specdec.errors import ModelLoadError
from specdec.loading.checkpoint import Checkpoint
from specdec.loading.quantisation import check_packages
from specdec.loading.strictness import check_complete

_MAP = "quanto_qmap.json"


def is_quanto_folder(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a folder that optimum-quanto wrote."""
    return checkpoint.is_folder and (Path(checkpoint.path) / _MAP).is_file()


def load_quanto(
    checkpoint: Checkpoint, loader: Any, config: PreTrainedConfig, dtype: torch.dtype | str
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Load such a folder on the CPU, all tensors or none.

    Args:
        loader: the auto class of the configuration. dtype: of what is not quantised, and of the scales.

    Returns:
        The model, and what a `quantization_config` would have said.

    Raises:
        ModelLoadError: a package is missing; the map is damaged, names no layer of the model, or tensors do not fit it.
    """
    what = f"cannot load the target model {checkpoint.name!r}"
    check_packages("quanto", what)
    from accelerate import init_empty_weights
    from optimum.quanto import requantize

    layers = _read_map(Path(checkpoint.path) / _MAP, what)
    folder = open_folder(checkpoint.path)
    tensors = folder.load(folder.tensors)
    kind = config.dtype if isinstance(dtype, str) else dtype
    with init_empty_weights(include_buffers=False):
        model: Any = loader.from_config(config, dtype=kind)
    if unknown := sorted(set(layers) - {name for name, _ in model.named_modules()}):
        raise ModelLoadError(f"{what}: {_MAP} names layers that the model does not have: {', '.join(unknown[:3])}")
    requantize(model, state_dict=tensors, quantization_map=layers)
    model.tie_weights()
    check_complete(checkpoint.name, model, _differences(model, tensors))
    if kind is not None:
        model.to(kind)
    model.name_or_path = checkpoint.path
    if (Path(checkpoint.path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
    kinds = sorted({f"{name}={how[name]}" for how in layers.values() for name in ("weights", "activations")})
    return model.requires_grad_(False), {"quant_method": "quanto", "weights": ", ".join(kinds)}


def _differences(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What transformers' loading information would say; tied weights are stored once."""
    expected, ours = model.state_dict(), {name: tuple(t.shape) for name, t in tensors.items()}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = {name for name in expected if name not in ours and name not in tied}
    return {
        "missing_keys": missing,
        "unexpected_keys": set(ours) - set(expected),
        "mismatched_keys": [
            (name, ours[name], tuple(t.shape))
            for name, t in expected.items()
            if name in ours and ours[name] != tuple(t.shape)
        ],
    }


def _read_map(file: Path, what: str) -> dict[str, dict[str, str]]:
    try:
        layers = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{what}: {file} cannot be read as JSON: {error}; download it again") from error
    fits = isinstance(layers, dict) and all(
        isinstance(how, dict) and {"weights", "activations"} <= set(how) for how in layers.values()
    )
    if not fits or not layers:
        raise ModelLoadError(f"{what}: {file} is no map of layers to weights and activations; download it again")
    return layers
