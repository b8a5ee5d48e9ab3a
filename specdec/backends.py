"""Which attention backend a device gets. Chosen by the user or by the device, never by an exception."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from attention.backend import AttentionBackend
from attention.torch_backend import TorchBackend
from specdec.errors import InvalidInputError

BACKENDS = ("auto", "torch", "flashinfer")


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """The attention backend: "auto" is FlashInfer on CUDA and the torch reference elsewhere.

    Raises:
        InvalidInputError: unknown name, FlashInfer off CUDA, or FlashInfer not installed.
    """
    if name not in BACKENDS:
        raise InvalidInputError(f"backend={name!r}: allowed are {', '.join(BACKENDS)}")
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return TorchBackend(device)
    if device.type != "cuda":
        raise InvalidInputError(f"backend='flashinfer' needs a CUDA device, not {device}; use backend='torch'")
    if find_spec("flashinfer") is None:
        raise InvalidInputError(
            "FlashInfer is not installed: pip install \"specdec-hf[cuda]\", or choose backend='torch' (slow on a GPU)"
        )
    from attention.flashinfer_backend import FlashInferBackend

    return FlashInferBackend(device)
