"""A quantised layer whose result for a token depends on its neighbours is refused, in every dtype; others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import wrap
from torch import nn

from specdec.errors import UnsupportedModelError
from specdec.selftest.quantised import neighbour_test, rounds_activations
from tests.quantised import Int8Pair, RoundedByRow, RoundedByTensor, plain_llama

pytestmark = pytest.mark.usefixtures("every_self_test")


def llama_of(kind: type[nn.Linear], dtype: torch.dtype = torch.float32) -> Any:
    """A model whose layers' projections down are of another class."""
    model: Any = plain_llama().to(dtype)
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = kind
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.cases(1)
def test_scales_of_the_whole_batch_are_refused(dtype: torch.dtype) -> None:
    words = r"model\.layers\.0\.mlp\.down_proj \(RoundedByTensor\) gives.*scaled by the largest one of the whole tensor"
    with pytest.raises(UnsupportedModelError, match=f"depends on what else is in the batch: {words}"):
        wrap(llama_of(RoundedByTensor, dtype))
    neighbour_test(llama_of(RoundedByRow, dtype))
    neighbour_test(plain_llama().to(dtype))


@pytest.mark.slow
def test_half_precision_would_not_notice_by_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why layers are asked: the self-test of logits lets such a model pass in bfloat16."""
    monkeypatch.setattr("specdec.selftest.quantised.neighbour_test", lambda model: None)
    wrap(llama_of(RoundedByTensor, torch.bfloat16)).close()


@pytest.mark.slow
def test_rounding_each_token_for_itself_is_allowed_and_said() -> None:
    model = llama_of(RoundedByRow)
    assert rounds_activations(model) and not rounds_activations(plain_llama())
    with wrap(model) as wrapped:
        found = wrapped.describe()["quantisation"]
    assert found["layers"] == "3 RoundedByRow" and found["activations"].startswith("rounded at every call")


@pytest.mark.slow
def test_quantised_weights_alone_round_no_token() -> None:
    model: Any = plain_llama()
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = nn.Parameter(Int8Pair.of(layer.mlp.up_proj.weight), requires_grad=False)
    neighbour_test(model)
    assert not rounds_activations(model)
    with wrap(model) as wrapped:
        found = wrapped.describe()
    assert found["quantisation"]["layers"] == "3 Linear of Int8Pair"
    assert found["quantisation"]["activations"] == "not rounded"
    saved = 3 * (64 * 64 * 3 - 64 * 4)
    assert found["weights_bytes"] == sum(p.nbytes for p in plain_llama().parameters()) - saved


def test_a_layer_that_fails_is_named() -> None:
    class Failing(RoundedByRow):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no kernel for this")

    with pytest.raises(UnsupportedModelError, match=r"down_proj \(Failing\) reads 32 tokens: RuntimeError: no kernel"):
        neighbour_test(llama_of(Failing))
