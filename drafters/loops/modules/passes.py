"""The passes of one of several modules as plain functions of tensors, which a compiler and a CUDA graph hold.

They know nothing of rows of a request: the draft prefill and every draft step run the same code, compiled once.
"""

from __future__ import annotations

import torch

from drafters.base import Head
from drafters.loops.chain.passes import BlockHead, MtpPasses


class ModulePasses(MtpPasses):
    """One module of several, fed by the module before it in their turn: module 0 by the last one."""

    def __init__(self, head: BlockHead, before: Head) -> None:
        """before: the module whose outputs this one reads."""
        super().__init__(head)
        self._before = before

    def over_target(self, aux: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Module 0 over the target's states [T, H], token_ids, positions [T] -> outputs [T, H]."""
        return self._forward(token_ids, self.head.fuse(aux), positions)

    def over_module(self, x: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Over outputs [T, H] of the module before, token_ids, positions [T] -> outputs [T, H]."""
        return self._forward(token_ids, self._before.feedback(x), positions)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [R, H] -> draft logits [R, Vd]."""
        return self.head.logits(x)
