"""The passes of a chain in a fixed shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import Operators, eagle3_spec

from drafters.loops.base import FixedPrefill, LoopSize
from drafters.loops.fixed_forms import FixedChain
from drafters.loops.head_passes import EaglePasses
from tests.drafters.eagle3.test_head import make_head


@pytest.mark.parametrize("mapped", [True, False])
def test_a_pass_ends_with_the_launch_that_finds_its_drafts(mapped: bool) -> None:
    """It writes the target ids into their column by itself: nothing is mapped or copied after it."""
    spec = eagle3_spec()
    head = make_head(spec if mapped else eagle3_spec(draft_vocab_size=spec.vocab_size))
    seen, found = Operators(), []

    def greedy(logits: torch.Tensor, target_ids: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        ids = logits.argmax(-1)
        out.copy_(ids if target_ids is None else target_ids[ids])
        found.append((ids, target_ids))
        seen.counts.clear()
        return ids

    def attend(planned: Any, layer: int, query: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
        return query.clone()

    aux, size = torch.randn(12, len(head.aux_layers) * spec.target_hidden_size), LoopSize(rows=4, drafts=3)
    chain = FixedChain(EaglePasses(head), SimpleNamespace(attend=attend), aux, size, greedy, lambda function: function)  # type: ignore[arg-type]
    inputs = FixedPrefill(torch.arange(12) % 7, torch.tensor([3, 8]))
    planned = SimpleNamespace(metadata=SimpleNamespace(positions=torch.tensor([4, 6])))
    with torch.no_grad(), seen:
        chosen = [chain.prefill(inputs, (torch.arange(12),), lambda layer, q, k, v: q.clone())]
        assert not seen.counts
        for step in range(2):
            chain.step(step, 2, planned, None, lambda _, own: chosen.append(own))  # type: ignore[arg-type]
            assert not seen.counts
    ids = torch.stack([each.ids for each in chosen], 1)
    assert chain.drafts.tolist() == [*head.to_target_ids(ids).tolist(), *[[0, 0, 0]] * 3]
    assert all((target_ids is not None) == mapped for _, target_ids in found)
