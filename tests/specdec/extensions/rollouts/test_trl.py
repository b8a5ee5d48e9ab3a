"""Rollouts as TRL takes them: with a fake trainer, and in TRL's own for a step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import eagle3_head, free_everywhere, random_prompts, table_head, tiny_llama, wrap
from transformers import GenerationConfig
from transformers.utils import logging

from specdec import SamplingParams, invariant
from specdec.errors import InvalidInputError
from specdec.extensions.rollouts.trl import rollout_func, use_invariant


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


def own_log_probs(model: Any, ids: torch.Tensor, mask: torch.Tensor, kept: int, temperature: float) -> torch.Tensor:
    """As a trainer computes them, with padding on both sides."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, -kept - 1 : -1].float() / temperature
    found: torch.Tensor = logits.log_softmax(2).gather(2, ids[:, -kept:, None])[..., 0]
    return found


def padded(prompts: list[list[int]], answers: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts to the left, answers to the right, and what is no padding."""
    left, right = max(map(len, prompts)), max(map(len, answers))
    ids, mask = torch.zeros(2, len(prompts), left + right, dtype=torch.int64)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, left - len(prompt) : left + len(answer)] = torch.tensor(prompt + answer)
        mask[row, left - len(prompt) : left + len(answer)] = 1
    return ids, mask


@pytest.mark.parametrize("defect", ["", "values of the trainer", "weights from before"])
@pytest.mark.parametrize(
    ("temperature", "drafts", "dtype"),
    [(1.0, 0, torch.bfloat16), (0.7, 3, torch.bfloat16), (2.0, 3, torch.float32), (0.7, 0, torch.float32)],
)
def test_a_trainers_values_are_the_rollouts_bits(
    temperature: float, drafts: int, dtype: torch.dtype, defect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after a step of the optimizer; the gradient is the plain forward's. Planted: two defects."""
    model = tiny_llama().to(dtype)
    head: Any = eagle3_head(model).to(dtype) if drafts else None
    options: dict[str, Any] = {"backend": "batch_invariant", "kv_cache_tokens": 800, "max_num_batched_tokens": 40}
    wrapped = wrap(model, head, num_speculative_tokens=drafts, **options)
    policy, prompts = invariant(wrapped), random_prompts((5, 30, 1, 9))
    params = SamplingParams(12, temperature=temperature, logprobs=0, logprobs_mode="processed", seed=3)
    if defect == "values of the trainer":
        monkeypatch.setattr(torch.Tensor, "masked_scatter_", lambda own, *others: own)
    same, weights = [], list(model.parameters())
    for weight in weights:
        weight.requires_grad_(True)
    model.train()
    model.gradient_checkpointing_enable()
    done = wrapped.generate(prompts, params)
    for step in range(2):
        if step and defect != "weights from before":
            done = wrapped.generate(prompts, params)
        answers = [c.token_ids[: 12 - row] for row, c in enumerate(done)]
        ids, mask = padded(prompts, answers)
        own = own_log_probs(model, ids, mask, 12, temperature)
        found = policy.log_probs(own, ids, mask, temperature)
        rolled = [each.logprob for c, a in zip(done, answers, strict=True) for each in (c.logprobs or ())[: len(a)]]
        same.append(found[mask[:, -12:].bool()].tolist() == rolled)
        gradient = torch.autograd.grad(found.sum(), weights, retain_graph=True)
        assert all(map(torch.equal, gradient, torch.autograd.grad(own.sum(), weights)))
        with torch.no_grad():
            for weight, own_gradient in zip(weights, gradient, strict=True):
                weight -= 0.01 * own_gradient
    assert all(same) == (not defect), same


@pytest.mark.parametrize("stale", [False, True])
def test_values_are_those_of_weights_that_were_written_in_place(stale: bool) -> None:
    """Bit for bit those of a model that is wrapped afterwards. Planted: the engine keeps pages of the old weights."""
    model, fresh = tiny_llama(), tiny_llama()
    options: dict[str, Any] = {"num_speculative_tokens": 0, "backend": "batch_invariant"}
    wrapped = wrap(model, None, **options)
    assert wrapped.prefix_caching == "on" and wrapped.config.page_size < 30
    if stale:
        wrapped.engine.forget_prefixes = lambda: None  # type: ignore[method-assign]
    ids = torch.tensor(random_prompts((40, 40)))
    given = (torch.zeros(2, 6), ids, torch.ones_like(ids), 0.7)
    before = invariant(wrapped).log_probs(*given)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 1.05
    after = invariant(wrapped).log_probs(*given)
    fresh.load_state_dict(model.state_dict())
    right = invariant(wrap(fresh, None, **options)).log_probs(*given)
    assert not torch.equal(before, right) and torch.equal(after, right) == (not stale)


def test_a_rows_first_token_and_padding_keep_the_trainers_values() -> None:
    """Rows padded on the right, on the left, and one without a token; all of their places are asked for."""
    model = tiny_llama()
    wrapped = wrap(model, None, num_speculative_tokens=0, backend="batch_invariant")
    (first, second), own = random_prompts((9, 4)), torch.arange(36.0).view(4, 9)
    ids = torch.tensor([first, second + [0] * 5, [0] * 5 + second, [0] * 9])
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5, [0] * 5 + [1] * 4, [0] * 9])
    found = invariant(wrapped).log_probs(own, ids, mask, 1.5)
    of_first, of_second = (
        [each.logprob for each in score.logprobs]
        for score in wrapped.score([first[:1], second[:1]], [first[1:], second[1:]], temperature=1.5)
    )
    right = own.clone()
    right[0, 1:], right[1, 1:4], right[2, 6:] = map(torch.tensor, (of_first, of_second, of_second))
    assert torch.equal(found, right) and torch.equal(own, torch.arange(36.0).view(4, 9))
    assert torch.equal(invariant(wrapped).log_probs(own[:, 6:], ids, mask, 1.5), right[:, 6:])


@pytest.mark.parametrize("shapes", [((2, 10), (2, 9)), ((2, 0), (2, 9)), ((1, 3), (2, 9)), ((2, 3), (2, 8))])
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    wrapped = wrap(tiny_llama(), None, num_speculative_tokens=0, backend="batch_invariant")
    own, mask = map(torch.zeros, shapes)
    with pytest.raises(InvalidInputError, match=r"of shapes \[\[\d, \d+\], \[2, 9\], .*give \[B, C\], \[B, L\]"):
        invariant(wrapped).log_probs(own, torch.tensor(random_prompts((9, 9))), mask, 1.0)


def test_a_grpo_trainer_takes_them_for_the_trained_model_alone() -> None:
    model = tiny_llama()
    wrapped = wrap(model, None, num_speculative_tokens=0, backend="batch_invariant")
    ids = torch.tensor(random_prompts((9, 9)))
    accelerator = SimpleNamespace(unwrap_model=lambda each: each)
    entropies = torch.zeros(2, 3)

    def own(trained: Any, ids: torch.Tensor, mask: torch.Tensor, kept: int, compute_entropy: bool = False) -> Any:
        return own_log_probs(trained, ids, mask, kept, 0.7), entropies, None

    name = "_get_per_token_logps_and_entropies"
    trainer: Any = SimpleNamespace(accelerator=accelerator, temperature=0.7, model=model, **{name: own})
    use_invariant(trainer, wrapped)
    mask = torch.ones_like(ids)
    found, *others = getattr(trainer, name)(model, ids, mask, 3, compute_entropy=True)
    right = wrapped.score(ids[:, :6].tolist(), ids[:, 6:].tolist(), temperature=0.7)
    assert found.tolist() == [[each.logprob for each in score.logprobs] for score in right]
    assert others[0] is entropies and others[1] is None
    reference = tiny_llama(seed=5)
    of_reference, *_ = getattr(trainer, name)(reference, ids, mask, 3)
    assert torch.equal(of_reference, own_log_probs(reference, ids, mask, 3, 0.7))
    trainer.model = reference  # or a PeftModel, whose reference is the same object with adapters off
    with pytest.raises(InvalidInputError, match=r"a trainer of another model \(LlamaForCausalLM\): give GRPO"):
        use_invariant(trainer, wrapped)


def test_another_backend_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"needs a model loaded with backend='batch_invariant', not 'torch'"):
        invariant(wrap(tiny_llama()))


@pytest.fixture
def own_verbosity() -> Iterator[None]:
    """A trainer changes what transformers logs in the whole process."""
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)


@pytest.mark.slow
@pytest.mark.usefixtures("own_verbosity")
@pytest.mark.parametrize("way", ["attached", "rollout", "invariant"])
@pytest.mark.thorough
def test_two_steps_of_grpo(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "examples"))
    import grpo

    trainer, rewards = grpo.train(way, "gsm-llama", 2, 0, str(tmp_path))
    assert trainer.state.global_step == 2 and len([line for line in rewards.lines if "reward" in line]) == 2
    if way == "invariant":
        with_it, without = (rewards.differences[name] for name in ("with invariant", "without"))
        assert with_it == [0.0, 0.0] and min(without) > 0
    assert "generate_batch" not in vars(type(trainer.model)) and not hasattr(trainer.model, "_specdec_attachment")
    sys.modules.pop("grpo")
