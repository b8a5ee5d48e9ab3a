"""Shared pages of a fixed shape: always those that rows do share, though they are not looked for in every batch."""

from __future__ import annotations

import doctest
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import attention.cascade.kernel
from attention.backends.flashinfer.short_queries import packed_scratch
from attention.batch.host import HostBatch, rows_batch
from attention.cascade import page_sharing as sharing
from attention.cascade.page_sharing import LEAST_ROWS, SharedRows, Sharing, worth_sharing
from attention.spec import AttentionSpec

ROWS, SIZE = 6, 4
KEY = AttentionSpec(4, 2, 64, 64, 0.125)
CPU = torch.device("cpu")
SCRATCH = packed_scratch(CPU)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> SharedRows:
    monkeypatch.setattr(sharing, "LEAST_GAIN", 0.0)
    found = Sharing(CPU).fixed(KEY, torch.float16, (ROWS, 1), SCRATCH)
    assert found is not None
    return found


def batch_of(table: np.ndarray, computed: np.ndarray) -> HostBatch:
    return rows_batch(np.arange(ROWS + 1), computed, table, SIZE)


def own_table() -> np.ndarray:
    return np.arange(1, 1 + ROWS * 8, dtype=np.int32).reshape(ROWS, 8)


def check(shared: SharedRows, table: np.ndarray, computed: np.ndarray) -> None:
    """What the kernels rely on."""
    pages = shared.shared.pages.numpy()
    rows = np.flatnonzero(pages)
    assert len(rows) != 1 and len(set(pages[rows].tolist())) <= 1
    for row in rows:
        assert (table[row, : pages[row]] == table[rows[0], : pages[row]]).all() and table[row, 0] != 0
        assert computed[row] >= pages[row] * SIZE


@pytest.mark.slow
def test_random_batches_one_after_the_other(shared: SharedRows) -> None:
    """Requests come and go, in place, as the engine's tables are written."""
    rng, table, computed, shares = np.random.default_rng(0), own_table(), np.full(ROWS, 9), 0
    fresh = table.copy()
    for _ in range(3000):
        row = rng.integers(ROWS)
        kind = rng.random()
        if kind < 0.1:  # a request with a prefix of 1 … 3 pages
            table[row] = fresh[row]
            table[row, :3] = np.where(np.arange(3) < rng.integers(4), [100, 101, 102], fresh[row, :3])
            computed[row] = rng.integers(0, 20)
        elif kind < 0.13:  # padding
            table[row], computed[row] = 0, 0
        else:
            computed += computed < 28
        shared.update(batch_of(table, computed))
        check(shared, table, computed)
        shares += int(shared.shared.pages.any())
    assert shares > 1000 and shared.num_copies > 100


def test_an_answer_that_holds_is_kept_and_looked_for_again(shared: SharedRows, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[HostBatch] = []

    def noting(batch: HostBatch, *args: object) -> np.ndarray:
        looked.append(batch)
        return worth_sharing(batch, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(sharing, "worth_sharing", noting)
    table, computed = own_table(), np.full(ROWS, 12)
    table[:4, :2] = [60, 61]
    for _ in range(10):
        shared.update(batch_of(table, computed))
        computed += 1
    assert len(looked) == 1 and shared.num_copies == 1
    table[:, 5] += 50  # behind what is shared
    shared.update(batch_of(table, computed))
    assert len(looked) == 1
    table[2, 1] = 70
    shared.update(batch_of(table, computed))
    assert len(looked) == 2 and shared.shared.pages.tolist() == [2, 2, 0, 2, 0, 0]
    computed[0] = 7  # another request on the same pages, which has computed less
    shared.update(batch_of(table, computed))
    assert len(looked) == 3 and shared.shared.pages.tolist()[0] < 2
    for _ in range(2 * sharing.LOOK_AGAIN + 2):
        shared.update(batch_of(table, computed))
    assert len(looked) == 5


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(attention.cascade.kernel)
    assert outcome.failed == 0 and outcome.attempted == 3


def test_the_rule_reckons_with_the_tiling_of_the_launch() -> None:
    """And with the device's multiprocessors; memory for tiles ahead is asked for only where there is some."""
    key, large = AttentionSpec(32, 8, 128, 128, 1.0), replace(SCRATCH, multiprocessors=132, shared_bytes=232_448)
    for scratch, stages in ((large, 5), (replace(large, shared_bytes=101_376), 3)):
        found = Sharing(CPU).fixed(key, torch.bfloat16, (20, 6), scratch)
        assert found is not None and found.shared.tiling.stages == stages
        assert (found.shared.tiling.parts, found.shared.tiling.least_keys) == (2, 512)
        assert found.cost.tiling is found.shared.tiling and found.cost.multiprocessors == 132


def test_few_rows_have_no_launch() -> None:
    found = Sharing(CPU)
    assert found.fixed(KEY, torch.float16, (LEAST_ROWS - 1, 6), SCRATCH) is None
    batch = batch_of(own_table(), np.full(ROWS, 9))
    assert found.of_batch(KEY, torch.float16, (LEAST_ROWS - 1, 1), SCRATCH, batch) is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"window": 8}, "a sliding window"),
        ({"has_sinks": True}, "attention sinks"),
        ({"value_in_key": True}, "MLA"),
        ({"chunk_size": 8}, "attention in chunks"),
        ({"softcap": 1.0}, "a softcap"),
        ({"head_dim_v": 4}, "different widths"),
    ],
)
def test_limits_are_named(change: dict[str, object], name: str) -> None:
    assert name in Sharing.limit(replace(KEY, **change), False)  # type: ignore[arg-type]
    assert "8-bit" in Sharing.limit(KEY, True) and not Sharing.limit(KEY, False)
