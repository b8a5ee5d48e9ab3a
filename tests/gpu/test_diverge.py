"""`eval diverge` on compiled rounds: a planted norm is named, and no other operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evals.lossless.diverge import diverge
from tests.gpu.test_batch_invariant import loaded

TEXTS = ["1 2 3 4 5 6 7 8", "9 10 11", "12"]


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
@pytest.mark.parametrize("planted", [False, True])
def test_a_planted_norm_is_named(kind: str, planted: bool) -> None:
    model = loaded("batch_invariant", torch.bfloat16, 0, 4, 512, kind)
    norm = model.hf_model.get_submodule("model.layers.1.post_attention_layernorm")
    right = norm.forward

    def uneven(x: torch.Tensor) -> Any:
        return right(x) * (1 + 2**-6 * (x.shape[-2] < 4))

    if planted:
        norm.forward = uneven
    found = diverge(model, TEXTS)
    names = [each["name"] for each in found["operators"]]
    assert names == (["model.layers.1.post_attention_layernorm"] if planted else [])
    assert bool(found["logits"]) is planted and found["verdict"] == ("FAIL" if planted else "PASS")
