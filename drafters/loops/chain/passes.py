"""The passes of a head as plain functions of tensors, which a compiler and a CUDA graph can hold."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from attention.hf.custom_op import Channel, LayerAttend, opaque_attend
from drafters.attend import Attend
from drafters.base import Head

Passed = tuple[torch.Tensor, torch.Tensor]
"""Block outputs [R, H], draft logits [R, Vd]."""


class HeadPasses:
    """The passes of any head; attention goes through `channel`."""

    can_compile = False
    """Whether the head's code is known to be one graph for the compiler."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.channel = Channel[LayerAttend]()

    def carrying(self, attend: Attend) -> AbstractContextManager[None]:
        """Serve the passes' attention with `attend`, for a while."""
        return self.channel.carrying(lambda layer, query, key, value, sinks: attend(layer, query, key, value))

    def prefill(
        self, aux: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, last_row: torch.Tensor
    ) -> Passed:
        """aux [T', A·Ht], token_ids, positions [T'], last_row [R] -> what follows for the last rows."""
        x = self._forward(token_ids, self.head.fuse(aux), positions)
        return self._with_logits(x.index_select(0, last_row))

    def step(self, x: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor) -> Passed:
        """x [R, H] of the step before, token_ids, positions [R] -> what follows."""
        return self._with_logits(self._forward(token_ids, self.head.feedback(x), positions))

    def _forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head.forward(token_ids, hidden, positions, self._attend)

    def _with_logits(self, x: torch.Tensor) -> Passed:
        return x, self.head.logits(x)

    def _attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return opaque_attend(query, key, value, None, self.channel.number, layer)


class RowSelecting(Head, Protocol):
    """A head that can leave out what nobody reads."""

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Head.forward`; rows: [R] int64, those whose output is wanted -> [R, H]."""


class EaglePasses(HeadPasses):
    """The same for a head that can leave out what nobody reads."""

    can_compile = True

    def __init__(self, head: RowSelecting) -> None:
        super().__init__(head)
        self._eagle = head

    def prefill(
        self, aux: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, last_row: torch.Tensor
    ) -> Passed:
        """See `HeadPasses.prefill`. Only the keys and values of the other rows are needed."""
        return self._with_logits(
            self._eagle.forward(token_ids, self._eagle.fuse(aux), positions, self._attend, rows=last_row)
        )


class BlockHead(Head, Protocol):
    """A head whose block is a transformers layer, with the attention port that such layers call."""

    def attending(self, attend: Attend) -> AbstractContextManager[None]:
        """Serve the block's attention with `attend`, for a while."""

    def run_block(self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`forward` without its attention, which must be served (`attending`) meanwhile; can be compiled."""


class MtpPasses(HeadPasses):
    """The same for a module whose block brings its own attention port."""

    can_compile = True

    def __init__(self, head: BlockHead) -> None:
        super().__init__(head)
        self._module = head

    def carrying(self, attend: Attend) -> AbstractContextManager[None]:
        """See `HeadPasses.carrying`."""
        return self._module.attending(attend)

    def _forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._module.run_block(token_ids, hidden, positions)


def target_ids_of(head: Head, device: torch.device) -> torch.Tensor | None:
    """The target ids of all of a head's draft ids [Vd] int64; None where they are the same."""
    ids = torch.arange(head.draft_vocab_size, device=device)
    target_ids = head.to_target_ids(ids)
    return None if torch.equal(ids, target_ids) else target_ids.contiguous()
