"""Facts about recurrent layers that need no import of their code: their token-mixing functions and the callers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

MIXING_FUNCTIONS = (
    "causal_conv1d_fn",
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba_selective_scan",
)
"""Names of the functions of transformers' modeling files that `attention.recurrence.hf_calls` replaces."""

MIXING_OPERATORS = ("short_conv", "gated_delta", "ssd_scan", "selective_scan")
"""Operators `torch.ops.specdec.…` that replace them in compiled code, registered with the first recurrent model."""


@dataclass(frozen=True)
class RecurrentCall:
    """One call of a recurrence in a model's forward.

    Attributes:
        module: the layer that makes it.
        spec: its requirements on a state, an `attention.recurrence.states.RecurrenceSpec`.
    """

    module: nn.Module
    spec: Any


def modeling_files(modules: Sequence[nn.Module]) -> tuple[ModuleType, ...]:
    """The modeling files that these modules' code is in, of those with one of the `MIXING_FUNCTIONS`."""
    names = dict.fromkeys(kind.__module__ for module in modules for kind in type(module).__mro__)
    files = (sys.modules[name] for name in names if name in sys.modules)
    return tuple(file for file in files if any(name in vars(file) for name in MIXING_FUNCTIONS))
