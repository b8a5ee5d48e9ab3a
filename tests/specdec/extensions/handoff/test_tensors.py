"""Requests that move to and from engines whose rounds run from graphs (launches that run again, on a CPU)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import free_everywhere, guests_of, random_prompts, table_head, tiny_llama, wrap

from attention.errors import HandoffMismatchError
from specdec.requests.sampling import SamplingParams
from tests.specdec.execution.test_graphs import graphs_on_cpu, recorded_on_cpu, with_graphs  # noqa: F401 (fixtures)
from tests.specdec.extensions.handoff.test_transfers import GREEDY, PARAMS, PROMPTS, lived, sent

pytestmark = pytest.mark.usefixtures("graphs_on_cpu")
SIZES: dict[str, Any] = {"num_speculative_tokens": 3, "max_model_len": 128, "kv_cache_tokens": 400}


def head() -> Any:
    return table_head(tiny_llama(), known=range(0, 64, 2), aux_layers=(1, 2, 3))


def graphs(**options: Any) -> Any:
    return with_graphs(head(), **SIZES | options)


def eager(**options: Any) -> Any:
    return wrap(tiny_llama(), head(), **SIZES | options)


ENGINES = {"graphs": graphs, "eager": eager}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("there", "here"),
    [
        pytest.param("graphs", "graphs", marks=pytest.mark.long),
        ("graphs", "eager"),
        ("eager", "graphs"),
    ],
)
@pytest.mark.thorough
def test_tokens_and_drafts_are_those_of_a_request_that_never_moved(there: str, here: str) -> None:
    """Greedy and sampled, alone and beside rows that run, which lose their rows meanwhile."""
    p, d, stays = ENGINES[there](), ENGINES[here](max_num_seqs=3), ENGINES[here]()
    expected = lived(stays.generate(PROMPTS, PARAMS))
    for prompt, params, own in zip(PROMPTS, PARAMS, expected, strict=True):
        before = d.engine_stats.rounds
        completions = d.resume(sent(p.prefill(prompt, params)))
        assert lived(completions) == [own]
        rounds = d.engine_stats.rounds - before
        assert rounds == len(completions[0].stats.rounds)  # and none in which it does not verify
    short = [replace(own, max_new_tokens=n) for own, n in zip(PARAMS, (7, 9, 11, 8), strict=True)]
    running = d.stream(PROMPTS, short)
    updates = [next(running) for _ in range(4)]
    completions = d.resume(sent(p.prefill(PROMPTS, PARAMS)))
    assert lived(completions) == expected
    done = {u.index: u.completion for u in [*updates, *running] if u.completion}
    assert lived([done[i] for i in range(4)]) == lived(stays.generate(PROMPTS, short))
    assert free_everywhere(p) and free_everywhere(d)


@pytest.mark.slow
@pytest.mark.thorough
def test_what_drafts_were_drawn_from_moves() -> None:
    """Planted defect: without it, rows are accepted by what the place held before."""
    p, d = graphs(), graphs()
    prompts = random_prompts([9] * 6, seed=8)
    params = [SamplingParams(12, temperature=1.5, seed=i, return_drafts=True) for i in range(6)]
    expected = lived(graphs().generate(prompts, params))
    assert lived(d.resume(p.prefill(prompts, params))) == expected
    spoiled = [replace(h, tensors={**h.tensors, "draft_logits": h.tensors["draft_logits"].flip(-1)})
               for h in p.prefill(prompts, params)]  # fmt: skip
    assert lived(d.resume(spoiled)) != expected


@pytest.mark.slow
def test_distributions_in_half_precision_are_refused() -> None:
    """They would be rounded: the drafts' acceptance would no longer be exact."""
    p, d = eager(), graphs()
    (handoff,) = p.prefill(PROMPTS[0], replace(GREEDY, temperature=1.0, seed=1))
    assert guests_of(d).tensors.refuses(handoff.tensors) == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.execution.sampled.SampledDrafts.in_half_precision", True)
        with pytest.raises(HandoffMismatchError, match="both with False"):
            d.resume(handoff)
    assert torch.equal(handoff.tensors["draft_probs"].sum(1).round(decimals=4), torch.ones(3))
