"""Counter-based uniforms: a function of key, position and role, and as good as random."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from specdec.rounds.randomness import Role, request_key, uniforms

KEYS = np.array([request_key(seed, index) for seed in range(40) for index in range(5)], np.uint64)
POSITIONS = np.arange(200)


def table(role: Role) -> np.ndarray:
    return uniforms(KEYS[:, None], POSITIONS, role)


def test_one_cell_depends_on_nothing_else() -> None:
    whole = table(Role.ACCEPT)
    assert uniforms(KEYS[7:8], np.array([33]), Role.ACCEPT)[0] == whole[7, 33]
    assert uniforms(KEYS[[9, 7]][:, None], np.array([2, 33]), Role.ACCEPT)[1, 1] == whole[7, 33]


@pytest.mark.parametrize("role", list(Role))
def test_uniform_on_the_half_open_interval(role: Role) -> None:
    u = table(role)
    assert u.dtype == np.float32 and u.min() >= 0 and u.max() < 1
    assert stats.kstest(u.reshape(-1), "uniform").pvalue > 1e-3
    assert min(stats.kstest(u[:, p], "uniform").pvalue for p in range(0, 200, 10)) > 1e-4
    assert min(stats.kstest(u[k], "uniform").pvalue for k in range(0, 200, 10)) > 1e-4


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_neighbouring_positions_are_independent(shift: int) -> None:
    u = table(Role.DRAFT)
    assert stats.pearsonr(u[:, :-shift].reshape(-1), u[:, shift:].reshape(-1)).pvalue > 1e-3


@pytest.mark.parametrize(
    "roles", [(Role.DRAFT, Role.ACCEPT), (Role.ACCEPT, Role.RESAMPLE), (Role.DRAFT, Role.RESAMPLE)]
)
def test_roles_are_independent(roles: tuple[Role, Role]) -> None:
    one, other = (table(role).reshape(-1) for role in roles)
    cells = np.histogram2d(one, other, bins=8)[0]
    assert stats.chi2_contingency(cells).pvalue > 1e-3


def test_keys_differ_by_seed_and_by_sample() -> None:
    keys = {request_key(seed, index) for seed in range(-50, 200) for index in range(8)}
    assert len(keys) == 250 * 8
    assert request_key(2**64 + 3, 1) == request_key(3, 1)
