"""Cascade attention is flat attention, for any rows that begin with the same pages; found where it leaves out most."""

from __future__ import annotations

import doctest
import itertools

import numpy as np
import pytest
import torch
from fakes import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import attention.cascade.shared_pages
from attention.backends.reference import TorchBackend
from attention.batch.host import HostBatch, rows_batch
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup
from attention.cascade.shared_pages import shared_prefixes
from attention.errors import InvalidInputError
from attention.runner import GroupRunner
from attention.spec import AttentionSpec
from tests.attention.cascade.two_levels import CascadingBackend, cascade, shared_prefix

CPU = torch.device("cpu")
SPEC = AttentionSpec(4, 2, 8, 8, scale=8**-0.5)


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(attention.cascade.shared_pages)
    assert outcome.failed == 0 and outcome.attempted >= 2


def batch_of(rows: list[tuple[int, int, int]], page_size: int, seed: int) -> HostBatch:
    """Rows (pages shared with the other rows at most, keys computed, tokens) on pages in any order."""
    shared = max(n for n, _, _ in rows)
    seqs = np.array([computed + lens for _, computed, lens in rows])
    width = int(max(-(-seqs // page_size))) + 1
    own = np.random.default_rng(seed).permutation(np.arange(1, shared + len(rows) * width + 1)).astype(np.int32)
    table = own[shared:].reshape(len(rows), width).copy()
    for row, (n, _, _) in enumerate(rows):
        table[row, : min(n, width)] = own[: min(n, width)]
    table[np.arange(width) >= -(-seqs // page_size)[:, None]] = 0
    starts = np.concatenate([[0], np.cumsum([lens for *_, lens in rows])])
    return rows_batch(starts, np.array([computed for _, computed, _ in rows]), table, page_size)


@st.composite
def batches(draw: st.DrawFn) -> HostBatch:
    """Rows over up to five shared pages, some of which lie wholly inside them; writes to a shared page are allowed only
    to one row, so a row shares no more pages than it has computed or is alone on."""
    page_size = draw(st.sampled_from([1, 3, 4]))
    rows = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 24), st.integers(1, 20)), min_size=1, max_size=6))
    return batch_of([(min(n, computed // page_size), computed, lens) for n, computed, lens in rows], page_size, 3)


def attended(batch: HostBatch, cascades: bool, dtype: torch.dtype, spec: AttentionSpec = SPEC) -> torch.Tensor:
    group = CacheGroup("g", (spec,), int(batch.block_table.max()) + 1, batch.page_size)
    backend = CascadingBackend(CPU) if cascades else TorchBackend(CPU)
    runner = GroupRunner(backend, group, dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    for pages in (runner.layers[0].keys, runner.layers[0].values):
        pages.copy_(torch.randn(pages.shape, generator=generator, dtype=torch.float64))
    states = [
        torch.randn(batch.num_tokens, h, 8, generator=generator, dtype=torch.float64).to(dtype) for h in (4, 2, 2)
    ]
    metadata = stage(batch, *single_batch_arena(batch.num_reqs, batch.num_tokens, batch.block_table.shape[1], CPU))
    return runner.attend(runner.plan(metadata), 0, *states)


@settings(max_examples=examples(80), deadline=None)
@given(batches())
def test_two_levels_are_flat_attention(batch: HostBatch) -> None:
    """Short and long rows, with and without the prefix, in float32."""
    ours, flat = (attended(batch, cascades, torch.float32) for cascades in (True, False))
    assert (ours - flat).abs().max() <= 1e-5


@settings(max_examples=examples(80), deadline=None)
@given(batches())
def test_a_prefix_is_seen_by_all_of_its_rows(batch: HostBatch) -> None:
    prefix = shared_prefix(batch.block_table, batch.num_computed_tokens, batch.page_size)
    table = batch.block_table
    if prefix is None:
        usable = [tuple(row[: n // batch.page_size]) for row, n in zip(table, batch.num_computed_tokens, strict=True)]
        first = [pages[0] for pages in usable if pages and pages[0]]
        assert len(first) == len(set(first))
        return
    assert prefix.num_pages >= 1 and len(prefix.rows) >= 2
    assert (table[prefix.rows, : prefix.num_pages] == table[prefix.rows[0], : prefix.num_pages]).all()
    assert (batch.num_computed_tokens[prefix.rows] >= prefix.num_keys).all()
    two = cascade(batch, prefix)
    two.suffix.validate()
    assert two.suffix.slot_mapping is batch.slot_mapping and two.suffix.positions is batch.positions
    assert (two.suffix.seq_lens >= batch.query_lens).all(), "a row sees at least its own tokens after the prefix"


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows that go on from each other's pages at any place, with null pages and any number of computed keys."""
    width, page_size = draw(st.integers(0, 5)), draw(st.sampled_from([1, 3]))
    pages = st.lists(st.integers(0, 2), min_size=width, max_size=width)
    rows = draw(st.lists(pages, min_size=1, max_size=8))
    table = np.array(rows, np.int32).reshape(len(rows), width)
    computed = st.lists(st.integers(0, width * page_size + 2), min_size=len(table), max_size=len(table))
    return table, np.array(draw(computed), np.int32), page_size


def classes_by_hand(table: np.ndarray, computed: np.ndarray, page_size: int) -> set[tuple[int, tuple[int, ...]]]:
    """(pages, rows) of all that share exactly so many pages: compared page by page, for each row and each length."""
    usable = [
        list(itertools.takewhile(bool, row[: keys // page_size].tolist()))
        for row, keys in zip(table, computed, strict=True)
    ]
    found: dict[tuple[int, ...], int] = {}
    for row in usable:
        for n in range(1, len(row) + 1):
            rows = tuple(i for i, other in enumerate(usable) if len(other) >= n and other[:n] == row[:n])
            if len(rows) > 1:
                found[rows] = max(n, found.get(rows, 0))
    return {(n, rows) for rows, n in found.items()}


@settings(max_examples=examples(300), deadline=None)
@given(tables())
@pytest.mark.thorough
def test_every_class_of_equal_leading_pages_is_found_the_best_first(case: tuple[np.ndarray, np.ndarray, int]) -> None:
    right = classes_by_hand(*case)
    found = list(shared_prefixes(*case))
    assert {(each.num_pages, tuple(each.rows.tolist())) for each in found} == right and len(found) == len(right)
    left_out = [each.num_keys_left_out for each in found]
    assert left_out == sorted(left_out, reverse=True)
    best = shared_prefix(*case)
    most = max((n * (len(rows) - 1) * case[2] for n, rows in right), default=0)
    assert (0 if best is None else best.num_keys_left_out) == most


def test_a_longer_row_with_one_page_in_common_does_not_hide_what_others_share() -> None:
    """32 rows share 128 pages; another has computed more, and shares the first page alone."""
    table = np.arange(1, 33 * 200 + 1, dtype=np.int32).reshape(33, 200)
    table[:, 0], table[:32, :128] = table[0, 0], table[0, :128]
    prefix = shared_prefix(table, np.array([16 * 130] * 32 + [16 * 190]), 16)
    assert prefix is not None and prefix.num_pages == 128 and prefix.rows.tolist() == list(range(32))


def test_two_levels_are_found_where_they_are() -> None:
    """The comparison of flat attention with itself would always pass."""
    batch = batch_of([(3, 13, 2), (3, 12, 2), (0, 5, 2)], 4, 0)
    assert shared_prefix(batch.block_table, batch.num_computed_tokens, 4).rows.tolist() == [0, 1]  # type: ignore[union-attr]
    ours, flat = (attended(batch, cascades, torch.float32) for cascades in (True, False))
    assert not torch.equal(ours[:4], flat[:4]) and (ours - flat).abs().max() <= 1e-5


def test_a_row_inside_the_prefix() -> None:
    """Its queries stand on the second shared page: it shares the first, or nothing where that costs the others more."""
    table = np.array([[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 0, 0]], np.int32)
    two_rows = shared_prefix(table[1:], np.array([12, 5]), 4)
    assert two_rows is not None and two_rows.num_pages == 1 and two_rows.rows.tolist() == [0, 1]
    three = shared_prefix(table, np.array([12, 13, 5]), 4)
    assert three is not None and three.num_pages == 3 and three.rows.tolist() == [0, 1]
    assert shared_prefix(table, np.array([3, 2, 1]), 4) is None, "nothing is computed before these queries"
    batch = rows_batch(np.array([0, 1, 3]), np.array([12, 5]), table[1:], 4)
    ours, flat = (attended(batch, cascades, torch.float32) for cascades in (True, False))
    assert (ours - flat).abs().max() <= 1e-5


def test_padding_rows_share_nothing() -> None:
    """They stand on the null page, computed nothing, and do not keep the others from sharing."""
    table = np.array([[5, 1], [5, 2], [0, 0], [0, 0], [0, 0]], np.int32)
    prefix = shared_prefix(table, np.array([4, 4, 0, 0, 0]), 4)
    assert prefix is not None and prefix.rows.tolist() == [0, 1]
    assert prefix.pages_by_row(5).tolist() == [1, 1, 0, 0, 0]
    assert shared_prefix(table, np.array([0, 0, 4, 4, 4]), 4) is None
    assert shared_prefix(np.zeros((0, 0), np.int32), np.zeros(0, np.int32), 4) is None


SHARED = np.array([[7, 9, 3], [7, 9, 4], [7, 8, 5]], np.int32)


def test_what_is_refused() -> None:
    for computed, page_size in ((np.array([8, 9]), 4), (np.array([8, 9, 5]), 0)):
        with pytest.raises(InvalidInputError, match="as many lengths as rows, and pages of at least one token"):
            shared_prefix(SHARED, computed, page_size)
