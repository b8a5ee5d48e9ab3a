"""What a call of `generate` asks for, part by part; test_attach.py beside it has whole calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import tiny_llama
from transformers import GenerationConfig

from specdec.extensions.attached.asked import Asked


def asked(**config: Any) -> Asked:
    ids = torch.tensor([[4, 5], [6, 7]])
    return Asked(ids, torch.ones_like(ids), GenerationConfig(max_length=6, **config))


@pytest.mark.parametrize(
    ("config", "pad"),
    [({"pad_token_id": 5, "eos_token_id": 7}, 5), ({"eos_token_id": [7, 9]}, 7), ({"eos_token_id": 7}, 7), ({}, 0)],
)
def test_what_stands_behind_a_shorter_row(config: dict[str, Any], pad: int) -> None:
    """The pad token, else the first that ends a row, as in transformers."""
    assert asked(**config).pad == pad


def test_greedy_calls_leave_torchs_generator_alone() -> None:
    model, before = tiny_llama(), torch.get_rng_state()
    assert [own.seed for own in asked(do_sample=False).params(model)] == [None, None]
    assert torch.equal(torch.get_rng_state(), before)
    first, second = asked(do_sample=True).params(model)
    assert first.seed != second.seed and not torch.equal(torch.get_rng_state(), before)
