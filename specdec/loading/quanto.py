"""Targets that optimum-quanto saved: packed weights, and a map of how each layer was quantised.

transformers quantises with this library, but cannot save or read the result; published checkpoints are in the library's
own format. Its own functions are used here to read one, with transformers' configuration and class.

Source: optimum/quanto/models/transformers_models.py, `QuantizedTransformersModel.from_pretrained`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from drafters.checkpoints.tensor_files import open_folder
from specdec.errors import ModelLoadError
from specdec.loading.checkpoint import Checkpoint, read_object
from specdec.loading.load_errors import check_complete
from specdec.loading.quantisation import QUANTO_MAP, check_packages

_SCALES = (".weight._scale", ".weight._shift", ".input_scale", ".output_scale")
"""Last parts of the names of scales and shifts."""
_NESTED = ("qint2", "qint4")
"""Tensors made of packed tensors, which are subclasses too. torch 2.13 raises "Cannot set version_counter for inference
tensor" where such a weight is transposed or detached in inference mode and was made outside of it."""
_ALIGNED = 64
"""Bytes. torch's kernel for bfloat16 times int8 on CPUs reads weights by instructions that need an address that this
divides; tensors in a file that is mapped into memory may lie at any address (torch 2.13: SIGSEGV)."""


def load_quanto(
    checkpoint: Checkpoint, loader: Any, config: PreTrainedConfig, dtype: torch.dtype | str
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Load such a folder on the CPU, all tensors or none; returns the model and the equivalent `quantization_config`.

    loader: the auto class of the configuration. dtype: of unquantised tensors, of the scales, and so of the outputs
    of quantised layers; "auto": the checkpoint's.

    Raises:
        ModelLoadError: a package is missing; the map is damaged, names no layer of the model or weights of fewer than 8
            bits, tensors do not fit it, or scales are too small or too large for the dtype.
    """
    what = f"cannot load the target model {checkpoint.name!r}"
    check_packages("quanto", what)
    from accelerate import init_empty_weights
    from optimum.quanto import requantize

    layers = _read_map(Path(checkpoint.path) / QUANTO_MAP, what)
    if nested := sorted({how["weights"] for how in layers.values()} & set(_NESTED)):
        raise ModelLoadError(
            f"{what}: its weights are in {', '.join(nested)}, whose packed tensors optimum-quanto cannot multiply in "
            "torch's inference mode, in which this library runs a model; take one quantised to qint8 or qfloat8, or in "
            "4 bits by another method (compressed-tensors, bitsandbytes)"
        )
    folder = open_folder(checkpoint.path)
    tensors = folder.load(folder.tensors)
    kind = _stored_dtype(config, tensors) if isinstance(dtype, str) else dtype
    scaled = _scaled_in(kind, tensors, what)
    tensors = {name: t if t.data_ptr() % _ALIGNED == 0 else t.clone() for name, t in scaled.items()}
    with init_empty_weights(include_buffers=False):
        model: Any = loader.from_config(config, dtype=kind)
    if unknown := sorted(set(layers) - {name for name, _ in model.named_modules()}):
        raise ModelLoadError(
            f"{what}: {QUANTO_MAP} names layers that the model does not have: {', '.join(unknown[:3])}"
        )
    requantize(model, state_dict=tensors, quantization_map=layers)
    model.tie_weights()
    check_complete(checkpoint.name, model, _differences(model, tensors))
    model.name_or_path = checkpoint.path
    if (Path(checkpoint.path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
    kinds = sorted({f"{name}={how[name]}" for how in layers.values() for name in ("weights", "activations")})
    return model.requires_grad_(False), {"quant_method": "quanto", "weights": ", ".join(kinds)}


def _stored_dtype(config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The dtype of the model that was quantised: its configuration's, else the dtype of the scales, which is equal."""
    if isinstance(config.dtype, torch.dtype):  # a name was made one when the configuration was read
        return config.dtype
    found = {tensor.dtype for name, tensor in tensors.items() if name.endswith(_SCALES) and tensor.is_floating_point()}
    return found.pop() if len(found) == 1 else torch.get_default_dtype()


def _scaled_in(kind: torch.dtype, tensors: Mapping[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    """The checkpoint with its scales in another dtype, as if the model had been quantised in it.

    A quantised layer computes in the dtype of its scales, which the library takes from the weights that it quantised
    and which cannot be changed later: a model with scales of another dtype than its norms and embeddings fails at the
    first attention.

    Source: optimum/quanto/library/qbytes_mm.py; tensor/weights/qbytes.py, `__torch_dispatch__`.

    Raises:
        ModelLoadError: a scale is out of range there: it would be infinite, or zero.
    """
    cast = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(_SCALES) and tensor.is_floating_point():
            cast[name] = tensor.to(kind)
            lost = (cast[name] == 0) & (tensor != 0)
            if bool(lost.any()) or not bool(cast[name].isfinite().all()):
                raise ModelLoadError(
                    f"{what}: dtype={str(kind).removeprefix('torch.')} cannot hold the scales {name} (largest "
                    f"{float(tensor.abs().max()):.3g}, in {str(tensor.dtype).removeprefix('torch.')}); "
                    "give dtype='bfloat16' or dtype='float32'"
                )
    return cast


def _differences(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The differences in the format of transformers' loading information; tied weights are stored once."""
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
    layers = dict(read_object(file, what))
    fits = all(isinstance(how, dict) and {"weights", "activations"} <= set(how) for how in layers.values())
    if not fits or not layers:
        raise ModelLoadError(f"{what}: {file} is no map of layers to weights and activations; download it again")
    return layers
