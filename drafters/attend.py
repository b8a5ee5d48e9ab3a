"""Attend: attention as a head sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Attend(Protocol):
    """Attention as a head sees it; the callable's creator (paged cache, trainer, oracle) keeps K and V."""

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [T, Hq, Dk], key [T, Hkv, Dk] (both after RoPE), value [T, Hkv, Dv] -> [T, Hq, Dv].

        `layer` indexes the head's `attention_specs`; scale and window come from there.
        """
