"""Heads for targets that give no attention heads, and whose layers are not all attention; how a head is measured."""

from __future__ import annotations

import itertools
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import tiny_llama, wrap

from drafters.eagle3.family import new_spec
from drafters.training.data import answer_set
from drafters.training.state import TrainConfig
from specdec.errors import InvalidInputError
from specdec.extensions.training import run
from specdec.extensions.training.run import RoundSeconds, target_features
from specdec.requests.stats import RequestStats, RoundRecord
from tests.hybrids import tiny_hybrid

MODEL: Any = SimpleNamespace(
    hf_model=None,
    tokenizer=None,
    backend_name="torch",
    generation_config_use="auto",
    plain_linears="",
    config=SimpleNamespace(max_model_len=64),
)
"""What is read of a loaded target to wrap it once more."""


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
    monkeypatch.setattr(run.SpeculativeModel, "from_pretrained", lambda *a, **more: nullcontext(trial))
    evaluate = run.evaluation(MODEL, answer_set([[1, 2]], [[3, 4]], 64), 2, lambda head: head, asked)
    assert evaluate(None) == {"tau": 2.0} and told == [used]
    evaluate = run.evaluation(MODEL, answer_set([[1, 2]], [[3, 4]], 64), 2, lambda head: head, asked, lambda n: n / 4)
    assert evaluate(None) == {"tau": 2.0, "predicted speed-up": 0.5}


def test_rounds_are_timed_in_turn_and_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of runs of two rounds: seconds for warming up, then five of 2 to 6 ms a round, with three drafts 3 to 30."""
    timed = [(0.004, 0.006), (0.006, 0.008), (0.008, 0.060), (0.012, 0.010), (0.010, 0.050)]
    seconds = itertools.chain((9.0, 8.0), *timed)
    asked, sizes = [], {}

    def generate(prompts: Any, params: Any) -> list[Any]:
        asked.append((prompts, params.num_speculative_tokens))
        return [SimpleNamespace(stats=RequestStats(rounds=(RoundRecord(3, 0, 1),) * 2, decode_s=next(seconds)))]

    def load(*given: Any, **options: Any) -> Any:
        sizes.update(options)
        return nullcontext(SimpleNamespace(generate=generate))

    monkeypatch.setattr(run.SpeculativeModel, "from_pretrained", load)
    head: Any = object()
    found = run.time_rounds(MODEL, head, 3, [5] * 4)
    assert found == RoundSeconds(0.004, 0.005, 3)
    assert asked == [([[5] * 4], 0), ([[5] * 4], 3)] * 6
    assert sizes["draft"] is head and sizes["max_model_len"] == 40 and sizes["max_num_seqs"] == 1
    assert "cuda_graphs" not in sizes, "as a head will be used"


@pytest.mark.parametrize(
    ("rounds", "told"),
    [
        (RoundSeconds(0.01, 0.014, 5), "accepts 0.40 of 5 drafts breaks even; predicted speed-up by acceptance length: "
         "2: 1.43 ×, 2.5: 1.79 ×, 3: 2.14 ×"),
        (RoundSeconds(0.01, 0.025, 1), "no head breaks even; predicted speed-up by acceptance length: 2: 0.80 ×"),
        (RoundSeconds(0.01, 0.009, 1), "accepts 0.00 of 1 drafts breaks even"),
    ],
)  # fmt: skip
def test_what_breaks_even(rounds: RoundSeconds, told: str) -> None:
    assert told in str(rounds)
    needed = rounds.drafted / rounds.plain
    assert rounds.speedup(needed) == pytest.approx(1.0)


@pytest.mark.slow
def test_the_rounds_of_a_real_target_are_timed_beside_it() -> None:
    """Also with a prompt that leaves less room than a run wants; the target is as it was."""
    model = wrap(tiny_llama(), max_num_seqs=1, max_model_len=64, kv_cache_tokens=256)
    before = model.generate([[5, 6, 7]], max_new_tokens=8)[0].token_ids
    config = TrainConfig(steps=1, ttt_steps=2)
    plan = run.plan_training(model, "eagle3", {"aux_layers": (1, 2, 3)}, config, held_out=1)
    asked: Any = SimpleNamespace(prompts=[[1], [5] * 44, [2] * 45], usable=[1, 2])
    with warnings.catch_warnings(action="error"):
        found = plan.round_seconds([asked])
    assert found.plain > 0 and found.drafted > 0 and found.num_drafts == 2
    assert model.generate([[5, 6, 7]], max_new_tokens=8)[0].token_ids == before
