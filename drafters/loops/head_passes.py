"""Passes of a head, or of one of several modules, as compilable functions of tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from attention.hf.custom_op import Channel, LayerAttend, opaque_attend
from drafters.base import ChainHead, Head
from drafters.loops.base import Attend

Passed = tuple[Tensor, Tensor]
"""Block outputs [R, H], draft logits [R, Vd]."""


class HeadPasses:
    """The passes of any head, with attention through `channel`."""

    can_compile = False
    """Whether the compiler is known to trace the head's code into one graph."""

    def __init__(self, head: ChainHead, before: ChainHead | None = None) -> None:
        """before: the module whose outputs it reads, of several that take turns; default the head itself."""
        self.head = head
        self.before = before or head
        self.channel = Channel[LayerAttend]()

    def carrying(self, attend: Attend) -> AbstractContextManager[None]:
        """A context in which `attend` computes the passes' attention."""
        return self.channel.carrying(lambda layer, query, key, value, sinks: attend(layer, query, key, value))

    def prefill(self, aux: Tensor, token_ids: Tensor, positions: Tensor, last_row: Tensor) -> Passed:
        """aux [T', A·Ht], token_ids, positions [T'], last_row [R] -> outputs and logits of the last rows."""
        return self._with_logits(self.over_target(aux, token_ids, positions).index_select(0, last_row))

    def step(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Passed:
        """x [R, H] of the previous step, token_ids, positions [R] -> outputs and logits."""
        return self._with_logits(self.over_head(x, token_ids, positions))

    def over_target(self, aux: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The target's states [T, A·Ht], token_ids, positions [T] -> outputs [T, H]."""
        return self._forward(token_ids, self.head.fuse(aux), positions)

    def over_head(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Outputs [T, H] of the head `before`, token_ids, positions [T] -> outputs [T, H]."""
        return self._forward(token_ids, self.before.feedback(x), positions)

    def logits(self, x: Tensor) -> Tensor:
        """Outputs [R, H] -> draft logits [R, Vd]."""
        return self.head.logits(x)

    def _forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        return self.head.forward(token_ids, hidden, positions, self._attend)

    def _with_logits(self, x: Tensor) -> Passed:
        return x, self.logits(x)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return opaque_attend(query, key, value, None, self.channel.number, layer)


class RowSelecting(ChainHead, Protocol):
    """A head whose forward can compute the outputs of some rows only."""

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """As `ChainHead.forward`; rows: [R] int64, the rows to compute outputs for -> [R, H]."""


class EaglePasses(HeadPasses):
    """The passes of a `RowSelecting` head."""

    can_compile = True
    head: RowSelecting

    def prefill(self, aux: Tensor, token_ids: Tensor, positions: Tensor, last_row: Tensor) -> Passed:
        """See `HeadPasses.prefill`; of rows other than the last ones only keys and values are computed."""
        hidden = self.head.fuse(aux)
        return self._with_logits(self.head.forward(token_ids, hidden, positions, self._attend, rows=last_row))


class PortedHead(ChainHead, Protocol):
    """A head whose block is a transformers layer, which calls attention through a port."""

    def attending(self, attend: Attend) -> AbstractContextManager[None]:
        """A context in which `attend` computes the block's attention."""

    def run_block(self, token_ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """`forward` inside `attending`; can be compiled."""


class MtpPasses(HeadPasses):
    """The passes of a `PortedHead`."""

    can_compile = True
    head: PortedHead

    def carrying(self, attend: Attend) -> AbstractContextManager[None]:
        return self.head.attending(attend)

    def _forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        return self.head.run_block(token_ids, hidden, positions)


class TokenReader(ChainHead, Protocol):
    """A head that reads the token at p at position p. Its block output is its logits."""

    def attending(self, attend: Attend) -> AbstractContextManager[None]:
        """A context in which `attend` computes its attention."""

    def read(self, token_ids: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """A pass over the tokens at these positions, inside `attending`; can be compiled.

        rows: [R] int64, the token rows whose logits [R, V] are computed; None for all.
        """


def target_ids_of(head: Head, device: torch.device) -> Tensor | None:
    """Target ids of all of a head's draft ids [Vd] int64; None where both are the same."""
    ids = torch.arange(head.draft_vocab_size, device=device)
    target_ids = head.to_target_ids(ids)
    return None if torch.equal(ids, target_ids) else target_ids.contiguous()
