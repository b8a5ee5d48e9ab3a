"""Our kernels of recurrences in the engine, without a GPU: Triton's interpreter says what transformers says."""

from __future__ import annotations

import pytest
import torch
from fakes import random_prompts, wrap

pytest.importorskip("triton", reason="Triton is not installed")

from attention.recurrence.functions import recurrences_of
from specdec import SamplingParams
from tests.hybrids import RecallHead, greedy_text, tiny_hybrid

PROMPTS, NEW = random_prompts([18, 3]), 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["qwen3_next", "jamba", *(pytest.param(n, marks=pytest.mark.long) for n in ("kimi_linear", "mamba2", "lfm2"))],
)
@pytest.mark.cases(1)
def test_the_kernels_serve_a_target(name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("with a GPU the kernels are tested on it: tests/gpu/test_recurrent_targets.py")
    kernels = recurrences_of(torch.device("cuda"))
    assert kernels.name == "Triton" and kernels.capturable
    head = RecallHead([greedy_text(name, prompt, NEW) for prompt in PROMPTS], 0.6)
    wrapped = wrap(tiny_hybrid(name), head, num_speculative_tokens=2, max_model_len=64)
    wrapped.target.states.functions = kernels
    completions = wrapped.generate(PROMPTS, SamplingParams(NEW))
    right = [greedy_text(name, prompt, NEW)[len(prompt) :] for prompt in PROMPTS]
    assert [list(c.token_ids) for c in completions] == right
    assert any(r.accepted for c in completions for r in c.stats.rounds)
    assert wrapped.describe()["recurrent"]["kernel"] == "Triton"
