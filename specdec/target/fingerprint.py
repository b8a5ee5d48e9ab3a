"""Fingerprints: short texts that differ when a model's weights or configuration differ."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

from attention.hf.weights import memory_of
from specdec.requests.generation_config import eos_ids

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as an element, to look at bits instead of numbers."""
_CHUNK = 2**24
_SAMPLES = 64
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")
"""Configuration keys that say where a model came from or how it is run, not what it computes."""


@torch.no_grad()
def weights_fingerprint(module: torch.nn.Module) -> str:
    """16 hex digits over names, shapes, dtypes and values of all parameters and stored buffers; of quantised weights
    that are made of several tensors, over each of them.

    Of each tensor, the sum of all elements' bits as integers (exact in any order, so the same on every device) and 64
    evenly spaced elements are hashed: one pass over the memory, no copy to the host.
    """
    digest = hashlib.sha256()
    stored = {name: tensor for name, tensor in module.state_dict().items() if isinstance(tensor, torch.Tensor)}
    parts = [(f"{n}.{i}" if i else n, part) for n, t in stored.items() for i, part in enumerate(memory_of(t))]
    for name, tensor in sorted(parts, key=lambda part: part[0]):
        bits = _bits(tensor)
        total = sum(int(chunk.sum(dtype=torch.int64)) for chunk in bits.split(_CHUNK))
        places = torch.linspace(0, max(len(bits) - 1, 0), min(_SAMPLES, len(bits)), dtype=torch.float64).long()
        sample = bits[places.to(bits.device)].tolist()
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype), total, sample)).encode())
    return digest.hexdigest()[:16]


def target_fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits over a target's weights, configuration and end tokens; not over its name or place."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_THE_MODEL}
    parts = (
        weights_fingerprint(model),
        json.dumps(config, sort_keys=True, default=str),
        sorted(eos_ids(model.generation_config)),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in a row [n], as integers of the same size (complex numbers as pairs)."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = plain.detach().reshape(-1).contiguous()
    return flat.view(_INTEGERS[flat.element_size()])
