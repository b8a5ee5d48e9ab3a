"""Training between generations, with CUDA graphs: training mode changes no bit, new weights count at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.loading.names import builtin_path
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.gpu.test_logits_options import QUESTIONS

PROMPTS = [f"Question: {question}\nAnswer:" for question in QUESTIONS]
PARAMS = SamplingParams(60, logprobs=0)
OPTIONS: dict[str, Any] = {"num_speculative_tokens": 4, "max_num_seqs": 8, "backend": "batch_invariant"}


def loaded() -> Any:
    """As a trainer casts it at each step: the buffers of its rotary embedding, too."""
    return AutoModelForCausalLM.from_pretrained(builtin_path("gsm-llama"), dtype=torch.float16).cuda().half()


def wrapped(model: Any) -> SpeculativeModel:
    tokenizer = AutoTokenizer.from_pretrained(builtin_path("gsm-llama"))
    return SpeculativeModel.from_pretrained(model, "auto", tokenizer=tokenizer, **OPTIONS)


def answers(own: SpeculativeModel) -> list[Any]:
    return [(c.token_ids, c.logprobs) for c in own.generate(PROMPTS, PARAMS)]


def changed(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        name: tensor * (1 + 0.05 * torch.randn_like(tensor)) if tensor.dim() > 1 else tensor
        for name, tensor in model.state_dict().items()
    }


def test_training_mode_and_new_weights() -> None:
    model = loaded()
    new = {name: tensor.cpu() for name, tensor in changed(model).items()}
    with wrapped(model) as own:
        assert own.graphs == "on"
        right = answers(own)
        model.gradient_checkpointing_enable()
        model.train()
        assert answers(own) == right
        model.to(torch.float16)
        assert answers(own) == right and all(m.training for m in model.modules())
        own.update_weights(iter(new.items()))
        found = answers(own)
    other = loaded()
    other.load_state_dict(new)
    with wrapped(other) as own:
        assert answers(own) == found != right


def test_steps_of_an_optimizer_between_generations() -> None:
    """Each generation is that of a model loaded with the weights of the moment."""
    model = loaded().requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ids = AutoTokenizer.from_pretrained(builtin_path("gsm-llama"))(PROMPTS[0], return_tensors="pt").input_ids.cuda()
    found, states = [], []
    with wrapped(model) as own:
        for _ in range(3):
            model.train()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
            found.append(answers(own))
    for state, right in zip(states, found, strict=True):
        other = loaded()
        other.load_state_dict(state)
        with wrapped(other) as own:
            assert answers(own) == right


@pytest.mark.parametrize("way", ["attached", "rollout"])
def test_two_steps_of_grpo(way: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import grpo

    trainer, rewards = grpo.train(way, "gsm-llama", 2, 0, str(tmp_path))
    assert trainer.state.global_step == 2 and len([line for line in rewards.lines if "reward" in line]) == 2
