"""The draft oracle in two forms that tests alone need: several modules, and prefixes too long for an [L, L] mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from attention.backends.reference import attend as dense_attend
from drafters.base import Head
from drafters.loops.base import Attend
from drafters.mtp.head import MtpStack
from drafters.oracle import ChooseDraft, drafts_of, most_probable


def oracle_module_drafts(
    stack: MtpStack, token_ids: Tensor, states: Tensor, num_drafts: int, choose: ChooseDraft = most_probable
) -> list[int]:
    """As `oracle_drafts`, for M modules.

    token_ids: [L+1] int64; states: [L, H] the target's states after its final norm. A request with fewer than M
    committed states has too few rows for some modules: it gets at most L+1 drafts.
    """
    most = num_drafts if len(states) >= len(stack.mtp_modules) else len(states) + 1
    return drafts_of(stack.mtp_modules, token_ids, states, min(num_drafts, most), choose)


@contextmanager
def last_position_alone() -> Iterator[None]:
    """The oracle attends for the last position, in L steps instead of L². Of a head with one attention layer no other
    position's attention reaches a draft."""
    with patch("drafters.oracle.full_attend", _last_attend):
        yield


def _last_attend(head: Head, length: int) -> Attend:
    """Zeros for the positions before the last one."""
    assert len(head.attention_specs) == 1

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spec = head.attention_specs[layer]
        first = 0 if spec.window is None else max(0, length - spec.window)
        q, k, v = (states.transpose(0, 1)[None] for states in (query[-1:], key[first:], value[first:]))
        out = dense_attend(q, k, v, torch.ones(1, 1, 1, length - first, dtype=torch.bool), spec)
        own = out[0].transpose(0, 1).to(query.dtype)
        return torch.cat([own.new_zeros(length - 1, *own.shape[1:]), own])

    return attend
