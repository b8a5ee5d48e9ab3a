"""Every class of experts in transformers: the form of rounds from graphs computes what its own does. About a minute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.sweep_configs import all_cases
from benchmarks.sweep_models import build
from specdec.ops.mixtures.choice import ALL_EXPERTS_FUNCTIONS, mixtures, own_form
from specdec.selftest.twin import enlarge


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.float() - right.float()).norm() / right.float().norm())


def every_class() -> Iterator[Any]:
    """The first mixture of each, in a tiny model of random weights."""
    seen = set()
    for case in all_cases():
        try:
            model = build(case).float().eval()
        except Exception:  # a miniature that transformers cannot build: `benchmarks.sweep` counts them
            continue
        found = mixtures(model)
        if found and type(found[0]) not in seen:
            seen.add(type(found[0]))
            enlarge(model)
            yield found[0]


@pytest.mark.long
@torch.inference_mode()
def test_each_computes_what_transformers_own_form_does() -> None:
    count = 0
    for mixture in every_class():
        chosen = min(2, mixture.num_experts)
        x = torch.randn(12, mixture.down_proj.shape[1 if mixture.is_transposed is False else 2])
        index, weights = torch.rand(12, mixture.num_experts).topk(chosen, -1).indices, torch.rand(12, chosen)
        right = ALL_EXPERTS_FUNCTIONS["batched_mm"](mixture, x, index, weights)
        assert relative(own_form(mixture, x, index, weights), right) < 1e-5, type(mixture)
        half = mixture.bfloat16()
        assert relative(own_form(half, x.bfloat16(), index, weights.bfloat16()), right) < 2e-2, type(mixture)
        count += 1
    assert count > 20  # 61 in transformers 5.24
