"""Heads for targets that give no attention heads, and whose layers are not all attention; how a head is measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import wrap

from drafters.eagle3.family import new_spec
from drafters.training.data import answer_set
from specdec.errors import InvalidInputError
from specdec.extensions.training import run
from specdec.extensions.training.run import target_features
from specdec.requests.stats import RoundRecord
from tests.hybrids import tiny_hybrid


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
@pytest.mark.cases(1)
def test_a_recurrent_target_gives_a_head_its_shape(name: str) -> None:
    model = wrap(tiny_hybrid(name), max_num_seqs=1, max_model_len=64, kv_cache_tokens=256)
    config = model.hf_model.config
    spec = new_spec(model.hf_model, model.target.vocab_size, 64, {"aux_layers": (1, 2, 3)})
    heads = {
        "mamba2": (1, 32),
        "qwen3_next": (config.to_dict().get("num_attention_heads"), config.to_dict().get("head_dim")),
    }
    assert (spec.num_heads, spec.head_dim) == heads[name]
    assert spec.num_heads % spec.num_kv_heads == 0 and spec.intermediate_size > 0


@pytest.mark.slow
def test_every_boundary_of_a_hybrid_can_be_trained_on() -> None:
    """Its last layers too, though fewer layers attend than it has."""
    model = wrap(tiny_hybrid("qwen3_next"), max_num_seqs=1, max_model_len=64, kv_cache_tokens=256)
    layers = model.hf_model.config.num_hidden_layers
    assert len(model.target.runner.layers) < layers
    ids = torch.tensor([[5, 6, 7]])
    states, logits = target_features(model, (0, layers - 1))(ids, torch.ones_like(ids, dtype=torch.bool))
    with torch.no_grad():
        expected = model.hf_model(ids, output_hidden_states=True, use_cache=False)
    right = torch.cat([expected.hidden_states[0], expected.hidden_states[layers - 1]], -1)
    assert torch.equal(states, right) and torch.equal(logits, expected.logits)
    with pytest.raises(InvalidInputError, match=f"aux layers 0 … {layers - 1}"):
        target_features(model, (0, layers))


@pytest.mark.parametrize(("asked", "used"), [(96, 96), (2048, 512)])
def test_the_finished_head_is_measured_with_answers_as_long_as_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: int, used: int
) -> None:
    told: list[int] = []

    def generate(prompts: Any, params: Any) -> list[Any]:
        told.append(params.max_new_tokens)
        return [SimpleNamespace(stats=SimpleNamespace(rounds=(RoundRecord(2, 1, 2),)))]

    trial = SimpleNamespace(generate=generate)
    monkeypatch.setattr(run.SpeculativeModel, "from_pretrained", lambda *a, **more: trial)
    model: Any = SimpleNamespace(
        hf_model=None,
        tokenizer=None,
        backend_name="torch",
        generation_config_use="auto",
        config=SimpleNamespace(max_model_len=64),
    )
    evaluate = run.evaluation(model, answer_set([[1, 2]], [[3, 4]], 64), 2, lambda head: head, asked)
    assert evaluate(None) == {"tau": 2.0} and told == [used]
