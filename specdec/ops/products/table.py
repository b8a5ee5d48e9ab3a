"""The matmuls of this process whose algorithm was chosen by measurement."""

from __future__ import annotations

import torch

from specdec.ops.products.choice import Launch
from specdec.ops.products.shape import ProductShape, aligned

_launches: dict[tuple[torch.device, ProductShape], Launch] = {}


def use(device: torch.device, shape: ProductShape, launch: Launch) -> None:
    """From now on, matmuls of this shape on this device run by `launch`."""
    _launches[device, shape] = launch


def forget() -> None:
    """Back to the usual calls, but for graphs that were captured."""
    _launches.clear()


def chosen_launch(x: torch.Tensor, weight: torch.Tensor) -> Launch | None:
    """What was chosen for x [T, I] · weightᵀ [I, O]; None where nothing was."""
    if not _launches:
        return None
    rows, width = weight.shape
    shape = ProductShape(x.dtype, rows, width, len(x))
    launch = _launches.get((x.device, shape))
    return launch if launch is not None and aligned(x, weight) else None
