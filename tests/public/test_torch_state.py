"""What a caller has set in torch for itself (autocast, a default device or dtype, modes) changes nothing here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from fakes import hf_greedy, random_prompts, table_head, tiny_llama, wrap

from specdec import SamplingParams, SpeculativeModel

PROMPT = random_prompts([9])[0]
NEW = 8
EXACT = 1e-5
"""Largest error of a self-test in float32; with bfloat16 anywhere it is 0.005 or more."""


@contextmanager
def default_device() -> Iterator[None]:
    """As on a machine with a GPU and "cuda": tensors of a generator of the CPU cannot be made there."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "set_default_device": default_device,
    "with a device": lambda: torch.device("meta"),
    "set_default_dtype": default_dtype,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "deterministic algorithms": deterministic,
    "autocast in inference mode": lambda: both(torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)),
}


@contextmanager
def both(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    with outer, inner:
        yield


def seen() -> tuple[object, ...]:
    """What a caller can see of its own state."""
    return (
        *(torch.is_autocast_enabled("cpu"), torch.get_default_device(), torch.get_default_dtype()),
        *(torch.is_inference_mode_enabled(), torch.is_grad_enabled()),
    )


@pytest.mark.parametrize("state", STATES)
@pytest.mark.cases(1)
def test_a_model_is_loaded_tested_and_asked_as_without(state: str) -> None:
    model, head = tiny_llama(), table_head(tiny_llama())
    logits = wrap(tiny_llama()).own_logits(PROMPT)
    with STATES[state]():
        own = seen()
        wrapped = wrap(model, head, num_speculative_tokens=3)
        assert max(wrapped.self_test_error, wrapped.refresh()) < EXACT
        torch.testing.assert_close(wrapped.own_logits(PROMPT), logits)
        tokens = [wrapped.generate(PROMPT, SamplingParams(max_new_tokens=NEW))[0].token_ids]
        assert seen() == own
    tokens.append(wrapped.generate(PROMPT, SamplingParams(max_new_tokens=NEW))[0].token_ids)
    assert tokens == [hf_greedy(PROMPT, NEW)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("state", ["autocast", "set_default_device"])
@pytest.mark.cases(1)
def test_a_model_by_name_and_its_head(state: str) -> None:
    with STATES[state]():
        model = SpeculativeModel.from_pretrained("gsm-llama", "auto", device="cpu")
        answer = model.generate("Tom has 3 boxes.", SamplingParams(max_new_tokens=NEW))[0]
    assert model.device == torch.device("cpu") and model.dtype == torch.float32
    assert answer.token_ids == model.generate("Tom has 3 boxes.", SamplingParams(max_new_tokens=NEW))[0].token_ids
    assert model.self_test_error < EXACT


class Careless(torch.nn.Module):
    """A norm that makes a tensor where the caller's default device is."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.norm(states) + torch.zeros(states.shape[-1])


def test_rounds_of_a_model_that_names_no_device() -> None:
    model = tiny_llama()
    model.model.norm = Careless(model.model.norm).eval()
    with wrap(model, table_head(tiny_llama()), num_speculative_tokens=3) as wrapped, default_device():
        found = wrapped.generate(PROMPT, SamplingParams(max_new_tokens=NEW))[0].token_ids
    assert found == hf_greedy(PROMPT, NEW)
