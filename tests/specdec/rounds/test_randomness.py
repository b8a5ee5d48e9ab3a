"""The uniforms of a round: by the key of the row, the position of the token that each decides, and its role."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from specdec.requests.sampling import SamplingParams
from specdec.rounds.randomness import Role, SamplingRound, request_key, sampling_round, uniforms
from specdec.rounds.rows import RowTable

KEYS = [request_key(seed, 0) for seed in range(3)]
TEMPERATURES = (0.5, 0.0, 2.0)
K = 3


def round_() -> SamplingRound:
    """Rows 2, 0 and 1 of a table: two decided, one of them with drafts."""
    table = RowTable(3, 32)
    for key, temperature in zip(KEYS, TEMPERATURES, strict=True):
        table.open(np.arange(4), 20, K, key, SamplingParams(temperature=temperature))
    decided = np.array([0, 1])
    start, num_new = np.array([9, 3, 0]), np.array([1, 1, 8])
    target: Any = SimpleNamespace(start=start, num_new=num_new, decided=decided, num_drafting=1, max_drafts=K)
    found = sampling_round(target, np.array([2, 0, 1]), table)
    assert found is not None
    return found


def right(role: Role, rows: list[int], first: list[int], offsets: range) -> list[list[float]]:
    """f(key, position, role), one by one."""
    every = [
        [float(uniforms(np.array([KEYS[row]], np.uint64), np.array([at + j]), role)[0]) for j in offsets]
        for row, at in zip(rows, first, strict=True)
    ]
    return every


def test_every_uniform_is_that_of_its_key_position_and_role() -> None:
    """Draft j+1 stands j+1 after the bonus token; so does the next token when j drafts were accepted."""
    own, rows, first = round_(), [2, 0, 1], [10, 4, 8]
    assert own.draft_uniforms().tolist() == right(Role.DRAFT, rows[:1], first[:1], range(K))
    assert own.accept_uniforms(K).tolist() == right(Role.ACCEPT, rows, first, range(K))
    assert own.next_uniforms(K + 1).tolist() == right(Role.RESAMPLE, rows, first, range(K + 1))
    assert own.ahead_uniforms(2 * K).tolist() == right(Role.DRAFT, rows, first, range(1, 2 * K + 1))


def test_decided_rows_are_the_first_ones() -> None:
    decided = round_().decided
    assert decided.accept_uniforms(K).tolist() == right(Role.ACCEPT, [2, 0], [10, 4], range(K))
    assert decided.arrays.temperature.tolist() == [2.0, 0.5] and decided.keys.tolist() == [KEYS[2], KEYS[0]]


def test_no_two_roles_share_a_uniform_at_any_two_positions() -> None:
    """One key: what draws a draft at a position draws nothing else anywhere near (24 bits: chance gives one in 10⁵)."""
    key, positions = np.array([KEYS[0]], np.uint64), np.arange(64)
    found = np.concatenate([uniforms(key, positions, role) for role in Role])
    assert len(np.unique(found)) >= len(found) - 1
