"""device= and dtype=, resolved."""

from __future__ import annotations

from typing import Any

import torch

from specdec.errors import InvalidInputError
from specdec.values import short

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def resolve_device(device: Any) -> torch.device:
    """The chosen device (a name, a torch.device, or the index of a GPU); by default CUDA where there is one.

    Raises:
        InvalidInputError: the name is no device of torch, or one that is not supported or not there.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    allowed = f"allowed are cpu{_cuda_devices()}"
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise InvalidInputError(f"device={short(device)} ({type(device).__name__}): {allowed}")
    try:
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"device={short(device)} is not a torch device: {allowed}") from error
    if place.type == "cpu":
        return torch.device("cpu")
    if place.type != "cuda":
        raise InvalidInputError(f"device={short(device)}: CPU and CUDA are supported; {allowed}")
    if not torch.cuda.is_available():
        raise InvalidInputError(f"device={short(device)}: torch finds no CUDA device on this machine; {allowed}")
    if place.index is not None and place.index >= torch.cuda.device_count():
        raise InvalidInputError(f"device={short(device)}: this machine has no such GPU; {allowed}")
    return place


def resolve_dtype(dtype: Any, device: torch.device) -> torch.dtype | str:
    """A torch dtype; "auto" is float32 on CPU and the checkpoint's own on a GPU.

    Raises:
        InvalidInputError: no floating-point dtype that a model computes in.
    """
    if isinstance(dtype, str) and dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in _DTYPES.values():
        raise InvalidInputError(f"dtype={short(dtype)}: allowed are auto, {', '.join(_DTYPES)}")
    return found


def _cuda_devices() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "".join([", cuda", *(f", cuda:{i}" for i in range(count))]) if count else " (there is no CUDA device here)"
