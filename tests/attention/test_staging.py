"""One copy a send, addresses that depend on the bucket only, and stale views that raise."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from fakes import check_mode
from hypothesis import given
from hypothesis import strategies as st

from attention.errors import InvalidInputError, StaleMetadataError
from attention.staging import Field, StagingArena, bucket_of, layout_of

CPU = torch.device("cpu")
FIELDS = [Field("ids", np.int64, ("tokens",)), Field("table", np.int32, ("rows", "pages")), Field("p", np.float32, ())]
BIG = bucket_of(tokens=40, rows=6, pages=5)


def arrays(tokens: int, rows: int, pages: int, start: int = 0) -> dict[str, np.ndarray]:
    table = np.arange(start, start + rows * pages, dtype=np.int32).reshape(rows, pages)
    return {"ids": np.arange(start, start + tokens), "table": table}


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
def test_what_is_sent_arrives(tokens: int, rows: int, pages: int) -> None:
    arena = StagingArena(FIELDS, BIG, CPU)
    sent = arrays(tokens, rows, pages, start=3)
    staged = arena.send(BIG, sent)
    assert {name: staged[name].tolist() for name in sent} == {name: a.tolist() for name, a in sent.items()}
    assert staged["ids"].dtype == torch.int64 and staged["table"].dtype == torch.int32
    assert "p" not in staged


def test_addresses_depend_on_the_bucket_not_on_the_batch() -> None:
    arena = StagingArena(FIELDS, BIG, CPU)
    bucket = bucket_of(tokens=16, rows=4, pages=5)
    pointers = []
    for tokens, rows, pages in ((16, 4, 5), (3, 1, 2), (9, 4, 1), (1, 2, 5)):
        views = arena.send(bucket, arrays(tokens, rows, pages)).views
        pointers.append({name: view.data_ptr() for name, view in views.items()})
    assert pointers[0] == pointers[2] and pointers[1] == pointers[3], "the same place every second send"
    assert pointers[0]["ids"] != pointers[1]["ids"], "the ring has two buffers"
    other = arena.send(BIG, arrays(3, 1, 2)).views
    assert other["table"].data_ptr() != pointers[0]["table"]


def test_fields_do_not_overlap_and_are_aligned() -> None:
    layout = layout_of(FIELDS, BIG)
    assert all(offset % 64 == 0 for offset in layout.offsets.values())
    ends = {
        f.name: layout.offsets[f.name] + int(np.prod(layout.shapes[f.name])) * np.dtype(f.dtype).itemsize
        for f in FIELDS
    }
    spans = sorted((layout.offsets[name], end) for name, end in ends.items())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= layout.nbytes


def test_everything_of_a_send_lies_in_one_buffer() -> None:
    """One contiguous span, so one transfer carries it."""
    arena = StagingArena(FIELDS, BIG, CPU)
    views = arena.send(BIG, arrays(40, 6, 5)).views
    starts = [view.data_ptr() for view in views.values()]
    assert max(starts) - min(starts) < layout_of(FIELDS, BIG).nbytes


def test_an_array_that_does_not_fit_is_refused() -> None:
    arena = StagingArena(FIELDS, BIG, CPU)
    with pytest.raises(InvalidInputError, match=r"field ids: array \(41,\) does not fit the bucket's \(40,\)"):
        arena.send(BIG, arrays(41, 1, 1))
    with pytest.raises(InvalidInputError, match="field ids"):
        arena.send(BIG, {"ids": np.zeros((2, 2), np.int64)})


@pytest.mark.slow
def test_what_is_kept_for_later_rounds_is_bounded() -> None:
    """Whatever buckets and shapes come; and what has gone is laid out again where it was."""
    largest = bucket_of(tokens=300, rows=12, pages=12)
    arena = StagingArena(FIELDS, largest, CPU)
    small = bucket_of(tokens=4, rows=1, pages=1)
    first = arena.send(small, arrays(3, 1, 1))["ids"].data_ptr()
    kept = []
    for rows in range(1, 13):
        for tokens in range(20, 300):
            bucket = bucket_of(tokens=tokens, rows=rows, pages=12)
            arena.send(bucket, arrays(tokens - 7, rows, 1 + tokens % 12))
        kept.append(vars(arena)["_window"].cache_info().currsize)
    assert kept[-1] == kept[4] == max(kept) > 500, "full, and no more"
    assert arena.generation % 2, "an odd number of sends: the ring's other buffer is next"
    arena.send(small, arrays(1, 1, 1))
    again = arena.send(small, arrays(3, 1, 1, start=5))["ids"]
    assert again.data_ptr() == first and again.tolist() == [5, 6, 7]


def test_a_bucket_larger_than_the_arena_is_refused() -> None:
    arena = StagingArena(FIELDS, BIG, CPU)
    with pytest.raises(InvalidInputError, match="the arena has"):
        arena.send(bucket_of(tokens=4000, rows=6, pages=5), arrays(1, 1, 1))
    most = dict(BIG)
    with pytest.raises(InvalidInputError, match="the arena has"):
        arena.send(bucket_of(**{**most, "tokens": most["tokens"] + 64}), arrays(1, 1, 1))


def test_views_are_stale_once_the_ring_came_around() -> None:
    arena = StagingArena(FIELDS, BIG, CPU)
    first = arena.send(BIG, arrays(5, 1, 1))
    first.ensure_fresh()
    arena.send(BIG, arrays(5, 1, 1, start=9))
    first.ensure_fresh()
    assert first["ids"].tolist() == [0, 1, 2, 3, 4]
    arena.send(BIG, arrays(5, 1, 1, start=20))
    assert first["ids"].tolist() != [0, 1, 2, 3, 4], "the view shows another round's data by now"
    with pytest.raises(StaleMetadataError, match="send 1 is used after send 3"):
        first.ensure_fresh()
    with check_mode(False):
        first.ensure_fresh()
