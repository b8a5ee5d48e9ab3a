"""A capture and a forward of the user's own on another thread wait for each other: the capture changes the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import backend_of_ours, experts_form, random_prompts, wrap

import specdec.execution.ragged
from attention.hf.gate import ForwardGate
from specdec.execution.graphs import GraphExecutor
from specdec.ops.mixtures.choice import CAPTURABLE
from specdec.requests.sampling import SamplingParams
from tests.specdec.execution.test_graphs import (  # noqa: F401 (fixtures)
    FixedPlaceBackend,
    Replayed,
    graphs_on_cpu,
    mla_mixture_pair,
    recorded_on_cpu,
    with_graphs,
)

PROMPTS = random_prompts((33, 60))
"""93 tokens in one round: neither the largest bucket nor the smallest."""
SIZES: dict[str, Any] = {"num_speculative_tokens": 0, "max_num_seqs": 2, "max_num_batched_tokens": 256}


class UsersForward:
    """The user's own forward of a model on another thread, which pauses inside until a thread of ours is at the gate.

    seen: the experts' form that it found there; logits: what it gave.
    """

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: str | None = None
        self.logits = torch.empty(0)
        self._model, self._inside, self._waited_for = model, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        enter = ForwardGate.enter

        def noticed(gate: ForwardGate, users: bool) -> None:
            if not users:
                self._waited_for.set()
            enter(gate, users)

        monkeypatch.setattr(ForwardGate, "enter", noticed)

    def while_inside(self, run: Callable[[], Any]) -> Any:
        """`run`, begun while the forward is in the model's second layer."""

        def pause(module: torch.nn.Module, args: Any) -> None:
            self._pause()

        pause.__module__ = "transformers"  # a hook that may change something would be refused
        hook = self._model.model.layers[1].register_forward_pre_hook(pause)
        self._waited_for.clear()
        self._thread.start()
        assert self._inside.wait(60)
        result = run()
        self._thread.join(60)
        hook.remove()
        return result

    def _run(self) -> None:
        with torch.no_grad():
            self.logits = self._model(torch.tensor([PROMPTS[0]])).logits

    def _pause(self) -> None:
        if threading.current_thread() is self._thread:
            self._inside.set()
            assert self._waited_for.wait(60), "nobody came to the gate"
            self.seen = experts_form(self._model)


def own_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPTS[0]])).logits


@pytest.mark.slow
@pytest.mark.parametrize("when", ["at the start", "in a round"])
@pytest.mark.cases(1)
def test_a_forward_of_the_users_never_sees_the_experts_in_the_form_of_a_capture(
    when: str,
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, _ = mla_mixture_pair()
    own, form = own_logits(target), experts_form(target)
    captured: list[str | None] = []
    record = specdec.execution.ragged.record_segments

    def noted(launch: Callable[[Any], Any], *args: Any) -> Any:
        captured.append(experts_form(target))
        return record(launch, *args)

    if when == "at the start":
        with backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
            model = wrap(target, None, cuda_graphs=False, **SIZES)

        def run() -> Any:
            return GraphExecutor(model.target, None, model.config).capture()
    else:
        graphed = with_graphs(None, target, **SIZES)

        def run() -> Any:
            return graphed.generate(PROMPTS, SamplingParams(max_new_tokens=2))

    monkeypatch.setattr(specdec.execution.ragged, "record_segments", noted)
    forward = UsersForward(target, monkeypatch)
    forward.while_inside(run)
    assert captured and set(captured) == {CAPTURABLE}
    assert forward.seen == form != CAPTURABLE
    assert torch.equal(forward.logits, own) and experts_form(target) == form
