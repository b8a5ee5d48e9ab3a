"""Which attention backend a device gets, and how its cache is stored. Chosen by the user or by the device, never by an
exception."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from attention.backends.base import AttentionBackend, GraphBackend
from attention.backends.reference import TorchBackend
from attention.cache.kv_cache import FP8, KVFormat
from attention.spec import AttentionSpec
from drafters.loops.base import DraftLoop, GraphLoop
from specdec.config import BACKENDS
from specdec.errors import InvalidInputError

_STORED = {"auto": None, "fp8": FP8}


def kv_format(dtype: str, scales: Sequence[tuple[float, float]] | None) -> KVFormat:
    """How the target's keys and values are stored; the head's single layer always keeps the dtype of the model.

    Args:
        dtype: "auto" is the dtype of the model, "fp8" is e4m3 with static scales.
        scales: (scale of keys, scale of values) of each layer; default 1.0 everywhere.

    Raises:
        InvalidInputError: an unknown name, scales without fp8, or scales that are none.
    """
    if dtype not in _STORED:
        raise InvalidInputError(f"kv_cache_dtype={dtype!r}: allowed are {', '.join(_STORED)}")
    return KVFormat(_STORED[dtype], tuple((keys, values) for keys, values in scales or ()))


def check_graphs(
    backend: AttentionBackend,
    loop: DraftLoop[Any, Any] | None,
    attention_specs: Sequence[AttentionSpec],
    cuda_graphs: bool,
) -> None:
    """Refuse what cannot run from CUDA graphs, and what cannot run without.

    Args:
        loop: the head's draft loop; None without a head.
        attention_specs: what the target's layers need.

    Raises:
        InvalidInputError: a backend, a draft loop or a target that has no graphs, or a backend that needs them.
    """
    if any(s.chunk_size or s.temperature for s in attention_specs) and (cuda_graphs or backend.batch_invariant):
        raise InvalidInputError(
            "attention in chunks and temperature tuning (Llama 4) run without CUDA graphs, and so not with "
            "backend='batch_invariant'; use backend='flashinfer', cuda_graphs=False"
        )
    if cuda_graphs and not isinstance(backend, GraphBackend):
        raise InvalidInputError(f"cuda_graphs=True needs a backend for a GPU, not {backend.name!r}")
    if loop is not None and not isinstance(loop, GraphLoop) and (cuda_graphs or backend.batch_invariant):
        raise InvalidInputError(
            f"{loop.name} run without CUDA graphs, and so not with backend='batch_invariant'; use "
            "backend='flashinfer', cuda_graphs=False"
        )
    if backend.batch_invariant and not cuda_graphs:
        raise InvalidInputError(f"backend={backend.name!r} needs cuda_graphs=True: its model is a compiled one")


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """The attention backend: "auto" is FlashInfer on CUDA and the torch reference elsewhere.

    Raises:
        InvalidInputError: unknown name, a backend for CUDA elsewhere, or FlashInfer not installed.
    """
    if name not in BACKENDS:
        raise InvalidInputError(f"backend={name!r}: allowed are {', '.join(BACKENDS)}")
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return TorchBackend(device)
    if device.type != "cuda":
        raise InvalidInputError(f"backend={name!r} needs a CUDA device, not {device}; use backend='torch'")
    if name == "batch_invariant":
        from attention.backends.invariant import InvariantBackend

        return InvariantBackend()
    if find_spec("flashinfer") is None:
        raise InvalidInputError(
            "FlashInfer is not installed: pip install \"specdec-hf[cuda]\", or choose backend='torch' (slow on a GPU)"
        )
    from attention.backends.flashinfer.backend import FlashInferBackend

    return FlashInferBackend(device)
