"""What of the round benchmark needs no GPU. Its acceptance is tested in test_synthetic."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.bench_round import Kind, Moments, floor, full_rounds
from benchmarks.shapes import COPY_BYTES_PER_S, random_pair
from specdec.acceptance.packed import Outcome


def test_every_read_is_noted_and_stays_as_it_is() -> None:
    read = Moments()
    real = Outcome(np.array([2, 0]), np.zeros((2, 4), np.int64), np.zeros((2, 3), np.int64))
    assert read.note(real, np.array([3, 0])) is real
    ((_, rows, tokens),) = read.found
    assert (rows, tokens) == (2, 4)


@pytest.mark.parametrize(
    ("kind", "sampled"),
    [
        (Kind(), [False] * 4),
        (Kind(True), [True] * 4),
        (Kind(True, 0.5), [True, False, True, False]),
        (Kind(True, 1.0), [False] * 4),
    ],
)
def test_sampled_rows_of_a_batch(kind: Kind, sampled: list[bool]) -> None:
    params = kind.params(4, 9)
    assert [not p.greedy for p in params] == sampled
    assert all((p.temperature, p.top_p) == (0.8, 0.95) for p in params if not p.greedy)
    assert all(p.ignore_eos and p.max_new_tokens == 9 for p in params)


class Rows:
    """A model whose rows take one and four tokens a round, with K = 3."""

    config = SimpleNamespace(num_speculative_tokens=3)

    def __init__(self, read: Moments) -> None:
        self.read = read

    def stream(self, ids: list[list[int]], params: list[Any]) -> Iterator[Any]:
        left = np.array([p.max_new_tokens for p in params])
        while left.any():
            rows = np.flatnonzero(left)
            self.read.found.append((0.0, len(rows), 0))
            for row in rows:
                took = min(4 if row else 1, left[row])
                left[row] -= took
                yield SimpleNamespace(index=row, token_ids=[0] * took)


@pytest.mark.parametrize(("new_tokens", "rounds"), [(256, 30), (128, 26), (60, 9)])
def test_rounds_end_before_a_row_comes_to_its_last_token(new_tokens: int, rounds: int) -> None:
    read = Moments()
    with full_rounds(Rows(read), read, [[1], [1]], Kind().params(2, new_tokens)) as go_on:  # type: ignore[arg-type]
        assert go_on(30) == rounds
    assert all(rows == 2 for _, rows, _ in read.found) and len(read.found) * 4 <= new_tokens


def test_too_few_tokens_for_full_rounds_are_refused() -> None:
    read = Moments()
    made = full_rounds(Rows(read), read, [[1], [1]], Kind().params(2, 40))  # type: ignore[arg-type]
    with made as go_on, pytest.raises(ValueError, match="40 new tokens leave 4 rounds of 2 decoding rows"):
        go_on(30)


def test_the_floor_of_uneven_rows_counts_every_key() -> None:
    """Of one long row beside short ones it is that of the weights, and of all rows' keys and values."""
    pair, drafts = random_pair("tiny", torch.float32, torch.device("cpu")), 3
    rows = [[1] * 9000, [1] * 37, [1] * 44]
    experts = pair.experts(rows, drafts, 20)
    of_target, of_head = pair.cache_bytes
    keys = sum(len(row) - 10 for row in rows)
    more = floor(pair, rows, drafts, 20)["floor_ms"] - pair.floor_ms(3, drafts, 0, experts)
    assert more == pytest.approx(1e3 * keys * (of_target + drafts * of_head) / COPY_BYTES_PER_S)
