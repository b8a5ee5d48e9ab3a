"""After a start on a GPU no Triton kernel is compiled any more: not by greedy rounds, not by sampled ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.gpu.test_graph_rounds import PROMPTS, Tokenizer, pair

FILTERED = {"temperature": 0.8, "top_p": 0.9, "top_k": 50}


@pytest.mark.parametrize("drawn", ["probabilistic", "greedy"])
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_rounds_compile_no_kernel(drafts: int, drawn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that end at different times, so that rounds have fewer drafts, and a prompt beside rows that decode."""
    from triton import knobs

    target, head = pair(torch.bfloat16)
    options: dict[str, Any] = {"num_speculative_tokens": drafts, "max_num_seqs": 4, "draft_sampling": drawn}
    with SpeculativeModel.from_pretrained(
        target, head if drafts else None, tokenizer=Tokenizer(), max_num_prefill_tokens=64, **options
    ) as loaded:
        assert loaded.graphs == "on"
        compiled: list[str] = []
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda fn, **_: compiled.append(fn.name))
        for settings in ({}, FILTERED, {"temperature": 1.1, "min_p": 0.05}):
            params = [SamplingParams(max_new_tokens=n, **settings) for n in (9, 2, 30, 17, 4)]
            assert len(loaded.generate(PROMPTS, params)) == len(PROMPTS)
        assert not compiled
