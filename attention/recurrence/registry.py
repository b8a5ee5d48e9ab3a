"""Which functions compute the recurrences on a device: the one place where a kernel replaces the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attention.recurrence import reference


@dataclass(frozen=True)
class Recurrences:
    """The four recurrences, with the signatures of `attention.recurrence.reference`.

    Attributes:
        name: for `inspect`.
        short_conv, gated_delta, ssd_scan, selective_scan: the functions.
        capturable: whether a CUDA graph can hold their launches: nothing is read on the host.
    """

    name: str
    short_conv: Callable[..., torch.Tensor] = reference.short_conv
    gated_delta: Callable[..., torch.Tensor] = reference.gated_delta
    ssd_scan: Callable[..., torch.Tensor] = reference.ssd_scan
    selective_scan: Callable[..., torch.Tensor] = reference.selective_scan
    capturable: bool = False


REFERENCE = Recurrences("torch")


def recurrences_of(device: torch.device) -> Recurrences:
    """The fastest ones for a device: kernels of ours on CUDA, elsewhere the reference."""
    return _kernels() if device.type == "cuda" else REFERENCE


def _kernels() -> Recurrences:
    """Imported where they are wanted: Triton needs not be installed on a CPU."""
    from attention.kernels.conv import short_conv
    from attention.kernels.delta import gated_delta
    from attention.kernels.scan import selective_scan
    from attention.kernels.ssd import ssd_scan

    return Recurrences("triton", short_conv, gated_delta, ssd_scan, selective_scan, capturable=True)
