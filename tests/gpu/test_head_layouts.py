"""Heads of every published layout on a GPU: rounds from graphs draft as those without, and as a head by hand says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import free_everywhere, random_prompts, wrap

from specdec import SamplingParams
from specdec.execution.graphs import GraphExecutor
from tests.agreement import agreement, drafted
from tests.drafters.eagle3.test_layouts import compared
from tests.head_layouts import LAYOUTS, target

PROMPTS = random_prompts((5, 27, 2, 40))
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128, "kv_cache_tokens": 640}
OPTIONS: dict[str, Any] = {**SIZES, "page_size": 16, "num_speculative_tokens": 3}
PARAMS = SamplingParams(max_new_tokens=32, return_drafts=True)


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_graphs_draft_as_eager_rounds(name: str, tmp_path: Path) -> None:
    """Windows, dynamic RoPE and EAGLE-1's plain first layer are compiled, too."""
    model = target().to("cuda", torch.float16)
    folder = str(LAYOUTS[name]().write(tmp_path))
    with wrap(model, folder, cuda_graphs=False, **OPTIONS) as loaded:
        eager = loaded.generate(PROMPTS, PARAMS)
    with wrap(model, folder, cuda_graphs=True, **OPTIONS) as loaded:
        assert isinstance(loaded.engine.executor, GraphExecutor)
        graphed = loaded.generate(PROMPTS, PARAMS)
        assert free_everywhere(loaded)
    assert agreement([c.token_ids for c in graphed], [c.token_ids for c in eager]) >= 0.9
    assert agreement(drafted(graphed), drafted(eager)) >= 0.9
    assert max(r.accepted for c in graphed for r in c.stats.rounds) >= 1


@pytest.mark.parametrize("name", ["speculators_qwen3", "eagle1", "deepspec"])
@torch.no_grad()
def test_drafts_are_those_by_hand(name: str, tmp_path: Path) -> None:
    """In half precision nearly all of them."""
    layout = LAYOUTS[name]()
    model = target().to("cuda", torch.float16)
    with wrap(model, str(layout.write(tmp_path)), **OPTIONS) as loaded:
        completions = loaded.generate(PROMPTS, PARAMS)
    exact = target()
    rounds = [r for p, c in zip(PROMPTS, completions, strict=True) for r in compared(layout, exact, p, c, None)]
    same = sum(ours == by_hand for ours, by_hand, _ in rounds)
    assert same >= 0.9 * len(rounds) > 20
