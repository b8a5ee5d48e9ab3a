"""Programmatic dependent launch: a kernel is set up while the one before it still runs, and waits at its own start.

Every kernel launched so must wait before it touches memory that a kernel may write (a model's weights it may read at
once), and only then let the next one be launched: so each knows that everything before its predecessor is complete.
Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def dependent_launches(device: torch.device) -> bool:
    """Whether the GPU has them (Hopper and later)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
