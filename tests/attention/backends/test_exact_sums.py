"""Exact sums: in float64, where each digit shows, a token's attention has the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.backends import reference
from attention.backends.reference import TorchBackend
from attention.batch.host import rows_batch, starts_of
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import FP8, CacheGroup, KVFormat
from attention.errors import UnsupportedAttentionError
from attention.runner import GroupRunner
from attention.spec import AttentionSpec

CPU = torch.device("cpu")
PLAIN = AttentionSpec(6, 2, 16, 16, 0.25)
VARIANTS = {
    "grouped": PLAIN,
    "window, sinks, softcap": replace(PLAIN, window=70, has_sinks=True, softcap=3.0),
    "ALiBi": replace(PLAIN, alibi=tuple(2.0**-i for i in range(6))),
    "wide values": replace(PLAIN, head_dim_v=40),
}
PAGE_SIZE, LONGEST = 4, 90


class Reader:
    """Rows of random states, read in pieces by one runner. Sizes of values and keys differ by 2**16 from token to
    token."""

    def __init__(self, key: AttentionSpec, dtype: torch.dtype, rows: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        pages = rows * -(-LONGEST // PAGE_SIZE)
        group = CacheGroup("target", (key,), pages + 1, PAGE_SIZE)
        self.runner = GroupRunner(TorchBackend(CPU, exact=True), group, dtype, CPU)
        order = torch.randperm(pages, generator=generator).numpy() + 1
        self.table = order.reshape(rows, -1).astype(np.int32)
        sizes = torch.exp2(torch.randint(-8, 9, (3, rows, LONGEST, 1, 1), generator=generator))
        sizes[:2] = sizes[:2].sqrt().sqrt()
        kv = key.num_kv_heads
        heads = ((key.num_q_heads, key.head_dim_k), (kv, key.head_dim_k), (kv, key.head_dim_v))
        self.states = [
            (torch.randn(rows, LONGEST, *shape, generator=generator, dtype=torch.float64) * size).to(dtype)
            for shape, size in zip(heads, sizes, strict=True)
        ]
        self.sinks = torch.randn(key.num_q_heads, generator=generator).to(dtype) if key.has_sinks else None

    def read(self, start: list[int], stop: list[int]) -> list[Tensor]:
        """Attention of tokens start … stop of each row, in one batch; rows without tokens are not in it."""
        rows = [row for row in range(len(start)) if stop[row] > start[row]]
        first, last = np.array(start)[rows], np.array(stop)[rows]
        host = rows_batch(starts_of(last - first).astype(np.int32), first, self.table[rows], PAGE_SIZE)
        arena, bucket = single_batch_arena(host.num_reqs, host.num_tokens, self.table.shape[1], CPU)
        given = [torch.cat([x[row, start[row] : stop[row]] for row in rows]) for x in self.states]
        found = self.runner.attend(self.runner.plan(stage(host, arena, bucket)), 0, *given, self.sinks)
        return list(found.split((last - first).tolist()))

    def one_by_one(self, rows: int) -> list[Tensor]:
        """Each row read token by token, alone."""
        return [
            torch.cat(
                [
                    self.read([t if i == row else 0 for i in range(3)], [t + 1 if i == row else 0 for i in range(3)])[0]
                    for t in range(LONGEST)
                ]
            )
            for row in range(rows)
        ]


def differing(reader: Reader, alone: list[Tensor], cuts: list[list[int]]) -> int:
    """Tokens with other bits when rows are read in these pieces together. cuts: by row, where pieces end."""
    found, at = 0, [0] * len(alone)
    for stop in zip(*cuts, strict=True):
        rows = [row for row in range(len(alone)) if stop[row] > at[row]]
        if rows:
            for row, own in zip(rows, reader.read(at, list(stop)), strict=True):
                found += int((own != alone[row][at[row] : stop[row]]).flatten(1).any(-1).sum())
        at = list(stop)
    return found


ALONE: dict[tuple[str, torch.dtype], tuple[Reader, list[Tensor]]] = {}


def made(variant: str, dtype: torch.dtype) -> tuple[Reader, list[Tensor]]:
    if (variant, dtype) not in ALONE:
        reader = Reader(VARIANTS[variant], dtype)
        ALONE[variant, dtype] = reader, reader.one_by_one(3)
    return ALONE[variant, dtype]


pieces = st.lists(st.lists(st.integers(0, LONGEST), min_size=4, max_size=4).map(sorted), min_size=3, max_size=3)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [*((variant, torch.float64) for variant in VARIANTS), ("grouped", torch.float32), ("grouped", torch.bfloat16)],
)
@settings(max_examples=examples(6))
@given(cuts=pieces)
def test_neighbours_and_cuts_change_no_bit(variant: str, dtype: torch.dtype, cuts: list[list[int]]) -> None:
    assert not differing(*made(variant, dtype), cuts)
    assert not differing(*made(variant, dtype), [[LONGEST] * 4] * 3)


CUTS = [[3, 4, 70, 90], [0, 1, 2, 80], [17, 60, 61, 62]]
DEFECTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "vectors are not rounded": lambda patch: patch.setattr(reference, "_rounded", lambda x: x),
    "too many digits of vectors": lambda patch: patch.setattr(reference, "_VECTOR", 2.0**-40),
    "too many digits of weights": lambda patch: patch.setattr(reference, "_WEIGHT", 2.0**-50),
    "too many digits of exponentials": lambda patch: patch.setattr(reference, "_EXPONENTIAL", 2.0**-60),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_change_bits(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DEFECTS[defect](monkeypatch)
    reader = Reader(PLAIN, torch.float64)
    assert differing(reader, reader.one_by_one(3), CUTS)


def test_the_reference_itself_is_not_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(PLAIN, torch.float32)
    reader.runner = GroupRunner(TorchBackend(CPU), reader.runner.group, torch.float32, CPU)
    assert differing(reader, reader.one_by_one(3), CUTS)


def test_values_of_zero_and_of_very_different_size() -> None:
    reader = Reader(PLAIN, torch.float64)
    reader.states[2][:, ::3] = 0
    reader.states[2][:, 1::3] *= 1e-30
    reader.states[1][:, ::5] = 0
    whole = reader.one_by_one(3)
    assert all(bool(row.isfinite().all()) for row in whole) and not differing(reader, whole, CUTS)


@pytest.mark.parametrize(
    ("key", "format"),
    [
        (replace(PLAIN, num_kv_heads=1, head_dim_v=8, value_in_key=True), KVFormat()),
        (PLAIN, KVFormat(FP8)),
        (replace(PLAIN, head_dim_k=576), KVFormat()),
    ],
)
def test_what_is_refused(key: AttentionSpec, format: KVFormat) -> None:
    group = CacheGroup("target", (key,), 4, 16, format=format)
    message = "group target: batch-invariant attention has no MLA, no cache in 8 bits, and head dims up to 512"
    with pytest.raises(UnsupportedAttentionError, match=message):
        TorchBackend(CPU, exact=True).builder(group, key, torch.float32)


def test_it_says_what_it_is() -> None:
    backend, group = TorchBackend(CPU, exact=True), CacheGroup("target", (PLAIN,), 4, 16)
    assert (backend.name, backend.batch_invariant) == ("batch_invariant", True)
    assert backend.route(group, PLAIN, torch.float32) == "torch by exact sums, cache float32"
