"""The logits that a benchmark records are those by which the engine decided, eager rounds or from graphs."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import random_prompts, table_head, tiny_llama, wrap

from benchmarks.decided_logits import recorded_logits
from specdec.requests.sampling import SamplingParams
from tests.specdec.execution.test_graphs import graphs_on_cpu, recorded_on_cpu, with_graphs  # noqa: F401 (fixtures)

PROMPTS = random_prompts((5, 33, 17))


def check(model: Any) -> None:
    first = model.engine.next_id
    with recorded_logits(model) as found:
        completions = model.generate(PROMPTS, SamplingParams(max_new_tokens=12, ignore_eos=True))
    for index, (prompt, completion) in enumerate(zip(PROMPTS, completions, strict=True)):
        decided = [int(found[first + index, len(prompt) + i].argmax()) for i in range(12)]
        assert decided == completion.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_of_eager_rounds(num_drafts: int) -> None:
    head = table_head(tiny_llama()) if num_drafts else None
    check(wrap(tiny_llama(), head, num_speculative_tokens=num_drafts))


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_of_rounds_from_graphs(graphs_on_cpu: list[Any], num_drafts: int) -> None:  # noqa: F811
    model = with_graphs(table_head(tiny_llama()) if num_drafts else None, num_speculative_tokens=num_drafts)
    check(model)
    assert sum(graph.replays for graph in graphs_on_cpu) > 10
