"""Drafts with `sampling="keyed"`, round by round: those of the oracle without a cache, given the noise; and the tokens
are those of K = 0.

Eagerly and from graphs (those of tests/specdec/execution/test_graphs.py), greedy rows among sampled ones, prompts in
chunks beside rows that draft, preemption.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fakes import launch_ahead, wrap

from drafters.oracle import ChooseDraft, most_probable
from specdec.requests.noise import perturbed
from specdec.requests.sampling import SamplingArrays, SamplingParams, SamplingTensors
from specdec.rounds.randomness import Role, position_bits, request_key
from tests.drafters.test_conformance import PROMPTS, Pair, make, oracle_rounds  # noqa: F401
from tests.drafters.test_sampled_drafts import PARAMS, SIZES, check_execution, execution, pairs  # noqa: F401

KEYED = {"sampling": "keyed"}


def keyed_as(params: SamplingParams) -> ChooseDraft:
    """How the draft oracle chooses the drafts of a request. The head's vocabulary is the target's."""
    if params.greedy:
        return most_probable
    own = SamplingArrays.of([params])
    parts = (own.temperature, own.top_k, own.top_p, own.min_p)
    sampling = SamplingTensors(*(torch.from_numpy(part) for part in parts), filters=True)
    keys = np.array([request_key(params.seed or 0, 0)], np.uint64)

    def choose(position: int, logits: torch.Tensor) -> torch.Tensor:
        seeds = torch.from_numpy(position_bits(keys, np.array([position]), Role.TOKEN).view(np.int64))
        return perturbed(logits, sampling, seeds).argmax(1)

    return choose


@pytest.mark.parametrize(("name", "options", "execution"), pairs(), indirect=["execution"])
@pytest.mark.thorough
@pytest.mark.cases(1)
def test_tokens_are_those_without_drafts_and_drafts_the_oracles(
    name: str,
    options: dict[str, int],
    execution: dict[str, Any],  # noqa: F811
    make: Callable[[str], Pair],  # noqa: F811
) -> None:
    target, head = make(name)
    alone = wrap(target, max_num_seqs=5, **KEYED)
    right = [list(c.token_ids) for c in alone.generate(PROMPTS, PARAMS)]
    wrapped = wrap(target, head, **SIZES | KEYED | execution | options)
    launch_ahead(wrapped, bool(execution))
    check_execution(wrapped, execution)
    completions = wrapped.generate(PROMPTS, PARAMS)
    assert [list(c.token_ids) for c in completions] == right
    every = zip(PROMPTS, completions, PARAMS, strict=True)
    with torch.inference_mode():
        compared = [r for p, c, own in every for r in oracle_rounds(target, head, p, c, keyed_as(own))]
    assert len(compared) > 40 and [ours for ours, _ in compared] == [oracle for _, oracle in compared]
    assert (wrapped.engine_stats.preemptions > 0) == ("kv_cache_tokens" in options)
