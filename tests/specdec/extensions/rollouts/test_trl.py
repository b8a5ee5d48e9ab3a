"""Rollouts as TRL takes them: with a fake trainer, and in TRL's own for a step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import free_everywhere, random_prompts, table_head, tiny_llama, wrap
from transformers import GenerationConfig
from transformers.utils import logging

from specdec.extensions.rollouts.trl import rollout_func


def test_log_probabilities_are_those_of_the_trainers_forward() -> None:
    """After the temperature; also while the model is in training mode, and after a step."""
    model = tiny_llama()
    wrapped = wrap(model, table_head(model), num_speculative_tokens=3)
    config = GenerationConfig(max_new_tokens=12, do_sample=True, temperature=1.7, top_k=0, top_p=1.0)
    trainer: Any = SimpleNamespace(generation_config=config)
    prompts = [random_prompts((5,))[0]] * 3 + random_prompts((9, 4))
    function, seen = rollout_func(wrapped, seed=3), list[Any]()
    for _ in range(2):
        model.train()
        found = function(prompts, trainer)
        assert found["prompt_ids"] == prompts
        for prompt, ids, own in zip(*(found[key] for key in ("prompt_ids", "completion_ids", "logprobs")), strict=True):
            with torch.no_grad():
                scores = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 1.7
            right = scores.log_softmax(1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            assert len(ids) == len(own) == 12
            assert torch.allclose(right, torch.tensor(own), atol=1e-4)
        seen.append(found["completion_ids"])
        model.load_state_dict(tiny_llama(seed=5).state_dict())
    assert seen[0] != seen[1] and free_everywhere(wrapped)


@pytest.fixture
def own_verbosity() -> Iterator[None]:
    """A trainer changes what transformers logs in the whole process."""
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)


@pytest.mark.slow
@pytest.mark.usefixtures("own_verbosity")
@pytest.mark.parametrize("way", ["attached", "rollout"])
@pytest.mark.cases(1)
def test_two_steps_of_grpo(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "examples"))
    import grpo

    trainer, rewards = grpo.train(way, "gsm-llama", 2, 0, str(tmp_path))
    assert trainer.state.global_step == 2 and len([line for line in rewards.lines if "reward" in line]) == 2
    assert "generate_batch" not in vars(type(trainer.model)) and not hasattr(trainer.model, "_specdec_attachment")
    sys.modules.pop("grpo")
