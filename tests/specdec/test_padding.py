"""Rounds in a fixed shape give what ragged rounds give: the shapes of the CUDA graphs, run eagerly on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import eagle3_head, free_everywhere, hf_greedy, random_prompts, table_head, tiny_llama, wrap
from hypothesis import given
from hypothesis import strategies as st

from attention.batch import slots_of
from drafters.chain import Draft
from drafters.inputs import rows_batch
from specdec.executor import EagerExecutor, Verification
from specdec.fields import graph_bucket
from specdec.padding import (
    first_pass_fits,
    spread,
    uniform_batch,
    uniform_first,
    uniform_steps,
    uniform_target,
    uniform_verified,
)
from specdec.round import DeviceRound, send_round
from specdec.sampling import SamplingParams


class PaddedExecutor:
    """Greedy rounds of verifications in the shape [rows, K+1], all others as they are."""

    def __init__(self, eager: EagerExecutor, config: Any) -> None:
        self.eager, self.config = eager, config
        self.rows, self.query_len = config.max_num_seqs, config.num_speculative_tokens + 1
        self.padded_rounds = 0

    @property
    def transfers(self) -> int:
        return self.eager.transfers

    def verified(self, verified: Any, round_: tuple[DeviceRound, int | None]) -> Any:
        return verified if round_[1] is None else uniform_verified(verified, self.query_len)

    def send(self, draft: Any, target: Any, sampling: Any) -> tuple[DeviceRound, int | None]:
        roots = len(target.judged) == target.batch.num_reqs
        roots = roots and bool((target.batch.query_lens == target.num_drafts + 1).all())
        if sampling is not None or not roots or draft is None or not first_pass_fits(draft, self.query_len):
            return self.eager.send(draft, target, sampling), None
        self.padded_rounds += 1
        steps = uniform_steps(draft, self.rows, self.query_len - 2)
        first = uniform_first(steps, self.rows, self.query_len)
        padded = uniform_target(target, self.rows, self.query_len)
        bucket = graph_bucket(self.config, self.rows)
        return send_round(first, padded, None, self.eager.arena, bucket), target.batch.num_reqs

    def draft(self, round_: tuple[DeviceRound, int | None], tapped: Any) -> Draft | None:
        return self.eager.draft(round_[0], tapped)

    def verify(self, round_: tuple[DeviceRound, int | None], draft: Draft | None) -> Verification:
        verification = self.eager.verify(round_[0], draft)
        return Verification(verification.packed[: round_[1]], verification.tapped)


PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))


@pytest.mark.parametrize("kind", ["table", "eagle3"])
@pytest.mark.parametrize("options", [{}, {"kv_cache_tokens": 88}, {"page_size": 1}, {"max_model_len": 70}])
def test_tokens_and_drafts_do_not_depend_on_the_shape(kind: str, options: dict[str, int]) -> None:
    head = (table_head if kind == "table" else eagle3_head)(tiny_llama())
    params = SamplingParams(max_new_tokens=24, return_drafts=True)
    sizes = {"num_speculative_tokens": 3, "max_num_seqs": 5, **options}
    ragged = wrap(tiny_llama(), head, **sizes).generate(PROMPTS, params)
    wrapped = wrap(tiny_llama(), head, **sizes)
    wrapped._engine._executor = executor = PaddedExecutor(wrapped.executor, wrapped.config)
    padded = wrapped.generate(PROMPTS, params)
    most = options.get("max_model_len", 128)
    assert [c.token_ids for c in padded] == [hf_greedy(p, min(24, most - len(p))) for p in PROMPTS]
    assert [c.drafts for c in padded] == [c.drafts for c in ragged]
    assert executor.padded_rounds >= 10
    assert free_everywhere(wrapped)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4)), min_size=1, max_size=5),
    st.integers(0, 3),
    st.sampled_from([1, 3, 16]),
)
def test_real_tokens_keep_their_places_and_padding_stands_on_the_null_page(
    rows: list[tuple[int, int]], more: int, page_size: int
) -> None:
    start, lens = (np.array(column) for column in zip(*rows, strict=True))
    width = -(-44 // page_size)
    table = np.arange(1, len(rows) * width + 1, dtype=np.int32).reshape(len(rows), width)
    batch = rows_batch(np.concatenate([[0], np.cumsum(lens)]), start, table, page_size)
    fixed = uniform_batch(batch, len(rows) + more, 4)
    fixed.validate()
    slots = fixed.slot_mapping.reshape(-1, 4)
    positions = fixed.positions.reshape(-1, 4)
    for i, (first, n) in enumerate(rows):
        own = np.arange(first, first + n)
        assert positions[i, :n].tolist() == own.tolist()
        assert slots[i, :n].tolist() == slots_of(table, np.full(n, i), own, page_size).tolist()
        assert not slots[i, n:].any() and not positions[i, n:].any()
    assert not slots[len(rows) :].any() and not fixed.block_table[len(rows) :].any()


def test_worked_example() -> None:
    """A row at position 20 with 1 of 3 drafts: its two slots, then the null page; seq_len 24."""
    batch = rows_batch(np.array([0, 2]), np.array([20]), np.array([[7, 9]], np.int32), 16)
    fixed = uniform_batch(batch, 1, 4)
    assert fixed.slot_mapping.tolist() == [148, 149, 0, 0]
    assert fixed.seq_lens.tolist() == [24] and fixed.page_counts.tolist() == [2]
    assert spread(np.array([1, 2, 3]), np.array([2, 1]), 3, 2).tolist() == [1, 2, 3, 0, 0, 0]
