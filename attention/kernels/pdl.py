"""Programmatic dependent launch: a kernel is set up while the one before it still runs, and waits at its own start.

Every kernel launched so waits before it stores anything and before it loads what the kernel before it stores, and only
then lets the next one be launched. So when a kernel is launched, everything before its predecessor is complete, and may
be loaded at once: weights, and what was there before a row of launches that always follow each other. All programs
wait, also those that have nothing to do (tests/interpreter_memory.py looks at all of this).
Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization".

Imported on CUDA only.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_predecessor(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """After this call all earlier kernels are complete, and the next kernel may be launched."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """The options of a launch, for kernels that call `wait_for_predecessor`; Hopper and later have it.

    On a ROCm build the instructions are left out of the kernels, and Triton knows no option `launch_pdl`.
    """
    if torch.version.hip is not None:
        return {"DEPENDENT": False}
    has = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"DEPENDENT": has, "launch_pdl": has}
