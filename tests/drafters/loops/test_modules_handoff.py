"""Several modules carry vectors of a request from round to round: they move with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import wrap

from tests.specdec.execution.test_graphs import graphs_on_cpu, recorded_on_cpu, with_graphs  # noqa: F401 (fixtures)
from tests.specdec.extensions.handoff.test_transfers import PARAMS, PROMPTS, SIZES, lived, moved, sent


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.usefixtures("graphs_on_cpu")
@pytest.mark.thorough
def test_vectors_that_modules_carry_move(graphs: bool, tiny_case: Callable[..., Any], tmp_path: Path) -> None:
    case = tiny_case("deepseek_v3", modules=2, context=0.5)
    for name, tensor in case.tensors.items():
        if name.endswith("eh_proj.weight"):
            noise = 0.1 * torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
            tensor.copy_(torch.cat([torch.eye(32), noise], 1))
    folder = case.write(tmp_path / "modules")
    p, d, stays = ((with_graphs(str(folder), case.model, **SIZES) if graphs else wrap(case.model, str(folder), **SIZES))
                   for _ in range(3))  # fmt: skip
    expected = lived(stays.generate(PROMPTS, PARAMS))
    assert lived(moved(p, d, PROMPTS, PARAMS)) == expected
    handoffs = sent(p.prefill(PROMPTS, PARAMS))
    assert handoffs[0].tensors["carried"].shape == (1, 32)
    for handoff in handoffs:  # planted: vectors of nobody
        handoff.tensors["carried"].mul_(-3.0)
    assert lived(d.resume(handoffs)) != expected
