"""Virtual rows of a fixed number are those of `local_attention`, and others without queries on the null page."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import PagedLayer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attention.batch.host import rows_batch
from attention.batch.metadata import ROW_FIELDS, single_batch_arena, stage
from attention.batch.transforms.local_attention import (
    FixedLocalRows,
    fixed_local_attention,
    local_attention,
    virtual_rows_of,
)
from attention.batch.transforms.windowed import windowed_batch
from attention.errors import InvalidInputError
from attention.spec import Reach

CPU = torch.device("cpu")


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(1, 7),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 4),
    st.integers(0, 9),
)
@example([7, 4], 3, 2, 2, 0)
def test_any_batch_of_a_shape(computed: list[int], query_len: int, page_size: int, pages: int, seed: int) -> None:
    """Its rows with queries are those of `local_attention`, and its attention is that of a dense chunked mask."""
    chunk, each = page_size * pages, virtual_rows_of(query_len, page_size * pages)
    layer = PagedLayer(computed, [query_len] * len(computed), page_size, seed)
    fixed, right = fixed_local_attention(layer.batch, chunk, each), local_attention(layer.batch, chunk)
    fixed.validate()
    assert fixed.num_reqs == each * len(computed) and each <= query_len
    used = fixed.query_lens > 0
    for name in ("seq_lens", "num_computed_tokens", "query_lens", "page_counts"):
        assert getattr(fixed, name)[used].tolist() == getattr(right, name).tolist(), name
    chunks = [(start + query_len - 1) // chunk - start // chunk + 1 for start in computed]
    assert np.flatnonzero(used).tolist() == [each * row + i for row, n in enumerate(chunks) for i in range(n)]
    spare = ~used
    assert (fixed.seq_lens[spare] == 1).all() and not fixed.block_table[spare].any()
    own = np.repeat(used, fixed.page_counts)
    assert fixed.page_indices[own].tolist() == right.page_indices.tolist() and not fixed.page_indices[~own].any()
    expected = layer.dense(lambda query, key: (key <= query) & (key // chunk == query // chunk))
    assert torch.allclose(layer.attend(fixed), expected, rtol=0, atol=1e-12)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=4),
    st.integers(1, 7),
    st.sampled_from([1, 3, 4]),
    st.integers(1, 9),
    st.sampled_from([1, 8, 128]),
)
def test_lists_of_a_windowed_group_give_the_virtual_rows_of_whole_rows(
    computed: list[int], query_len: int, page_size: int, pages: int, tile: int
) -> None:
    """Of fixed shapes and of any, whatever the tile that lists begin with."""
    rows, chunk = len(computed), page_size * pages
    table = np.arange(1, rows * 320 + 1, dtype=np.int32).reshape(rows, 320)
    whole = rows_batch(np.arange(0, rows * query_len + 1, query_len), np.array(computed), table, page_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attention.batch.transforms.windowed.TILE_KEYS", tile)
        near = windowed_batch(whole, table, np.arange(rows), Reach(chunk, chunk))
    each = virtual_rows_of(query_len, chunk)
    fixed = [fixed_local_attention(batch, chunk, each) for batch in (near, whole)]
    for ours, right in (fixed, [local_attention(batch, chunk) for batch in (near, whole)]):
        for name in (*ROW_FIELDS, "num_computed_tokens"):
            assert getattr(ours, name).tolist() == getattr(right, name).tolist(), name


def test_what_is_sent_lies_where_it_lay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a captured launch needs it; on a CPU the ring's buffer is the device's."""
    monkeypatch.setattr("attention.staging._RING", 1)
    table = np.arange(1, 13, dtype=np.int32).reshape(2, 6)
    batches = [rows_batch(np.array([0, 3, 6]), np.array(first), table, 2) for first in ([7, 4], [0, 0], [9, 6])]
    rows = FixedLocalRows(2, 3, 4, 2, 13, CPU)
    metadata = rows.metadata(stage(batches[0], *single_batch_arena(2, 6, 6, CPU)))
    addresses = [getattr(metadata, name).data_ptr() for name in ROW_FIELDS]
    assert metadata.block_table is None and metadata.host.query_lens.tolist() == [1, 2, 3, 0]
    for batch in batches:
        virtual, _ = rows.send(batch)
        for name, address in zip(ROW_FIELDS, addresses, strict=True):
            view, right = getattr(metadata, name), getattr(virtual, name)
            assert view.data_ptr() == address and view[: len(right)].tolist() == right.tolist()


def test_the_longest_rows_there_can_be_fit() -> None:
    """A whole chunk before, every token but one in the next, on every page size."""
    for chunk, page_size, query_len in ((8, 1, 5), (8, 8, 8), (16, 4, 17), (4, 2, 9)):
        first = chunk - 1
        width = -(-(first + query_len) // page_size)
        table = np.arange(1, 2 * width + 1, dtype=np.int32).reshape(2, width)
        batch = rows_batch(np.array([0, query_len, 2 * query_len]), np.array([first, first]), table, page_size)
        virtual, _ = FixedLocalRows(2, query_len, chunk, page_size, 2 * width + 1, CPU).send(batch)
        assert virtual.query_lens.sum() == 2 * query_len and (virtual.page_indices > 0).sum() == len(table.ravel())


def test_chunks_that_do_not_begin_on_a_page_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"chunks of 6 tokens .* given pages of 4"):
        FixedLocalRows(2, 3, 6, 4, 13, CPU)
