"""Drafts by lookup over CUDA graphs: rounds without drafts from graphs, launched ahead; the others by segments."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.gpu.test_logits_options import QUESTIONS
from tests.specdec.extras.test_lookup_drafts import replaced_drafts, wrong_drafts

NEW, K, LEAST = 96, 8, 2


@cache
def answers(backend: str, k: int, alone: bool = False, draft: str = "lookup") -> tuple[list[Any], int]:
    """Of questions, each with its answer before it; greedy and sampled. And rounds launched ahead, of no head."""
    load = SpeculativeModel.from_pretrained
    options: dict[str, Any] = {"max_num_seqs": 1 if alone else 16, "dtype": torch.float16, "backend": backend}
    with load("gsm-llama", draft, num_speculative_tokens=K, lookup_min=LEAST, **options) as model:
        executor, ahead = model.engine.executor, []
        launch = executor.launch_next  # type: ignore[attr-defined]
        executor.launch_next = lambda *given: (ahead.append(1), launch(*given))[1]  # type: ignore[attr-defined]
        asked = [f"Question: {question}\nAnswer:" for question in QUESTIONS[:8]]
        plain = SamplingParams(40, num_speculative_tokens=0)
        quotes = [f"{a}{c.text}\n\n{a}" for a, c in zip(asked, model.generate(asked, plain), strict=True)]
        params = [
            SamplingParams(NEW, num_speculative_tokens=k, temperature=0.3 * (i % 2), seed=i, return_drafts=True)
            for i in range(len(quotes))
        ]
        ahead.clear()
        return model.generate(quotes, params), len(ahead)


def test_drafts_change_no_bit_and_are_those_of_an_index_made_anew() -> None:
    found, ahead = answers("batch_invariant", K)
    plain, _ = answers("batch_invariant", 0)
    assert [c.token_ids for c in found[::2]] == [c.token_ids for c in plain[::2]]
    assert sum(r.accepted for c in found for r in c.stats.rounds) > 100 and ahead > 0
    assert [wrong_drafts(completion, K, LEAST, 32, NEW) for completion in found] == [[]] * len(found)


def test_sampled_requests_do_not_depend_on_the_batch() -> None:
    together, alone = answers("batch_invariant", K)[0], answers("batch_invariant", K, True)[0]
    assert [(c.token_ids, c.drafts) for c in together] == [(c.token_ids, c.drafts) for c in alone]


@pytest.mark.parametrize("backend", ["flashinfer"])
def test_with_other_kernels_most_tokens_agree(backend: str) -> None:
    """Half precision: rounds of other shapes round otherwise."""
    found, plain = answers(backend, K)[0], answers(backend, 0)[0]
    same = [a.token_ids[:16] == b.token_ids[:16] for a, b in zip(found[::2], plain[::2], strict=True)]
    assert sum(same) >= len(same) - 1


def test_beside_a_head() -> None:
    """Matches replace the drafts of greedy requests."""
    both, lookup = answers("batch_invariant", K, False, "auto,lookup")[0], answers("batch_invariant", K)[0]
    assert [c.token_ids for c in both[::2]] == [c.token_ids for c in lookup[::2]]
    rounds = [sum(len(c.stats.rounds) for c in found[::2]) for found in (both, lookup)]
    assert rounds[0] < rounds[1]
    assert sum(replaced_drafts(completion, K, LEAST, 32) for completion in both[::2]) > 5
