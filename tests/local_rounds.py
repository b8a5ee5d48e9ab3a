"""Rounds of one shape over a fixed plan, as a CUDA graph holds it, beside the reference that plans each round anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from attention.backends.base import AttentionBackend
from attention.backends.reference import TorchBackend
from attention.batch.host import HostBatch, rows_batch
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup
from attention.runner import GroupRunner
from attention.spec import AttentionSpec

PAGE_SIZE, PAGES_EACH = 16, 40
Launch = Callable[[], torch.Tensor]


def rows_from(first: Sequence[int], query_len: int) -> HostBatch:
    """Rows of query_len tokens from these positions on, each on pages of its own in any order."""
    rows = len(first)
    pages = np.random.default_rng(1).permutation(np.arange(1, rows * PAGES_EACH + 1)).astype(np.int32)
    starts = np.arange(0, rows * query_len + 1, query_len)
    return rows_batch(starts, np.array(first), pages.reshape(rows, PAGES_EACH), PAGE_SIZE)


def fixed_rounds(
    backend: AttentionBackend,
    spec: AttentionSpec,
    dtype: torch.dtype,
    device: torch.device,
    firsts: Sequence[Sequence[int]],
    query_len: int,
    record: Callable[[Launch], Launch],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(attention of a recorded launch, that of the reference in float32) [T, Hq, D] of every round.

    Args:
        firsts: of each round the first position of every row; record: makes of a launch one that runs it again.
    """
    rows = len(firsts[0])
    group = CacheGroup("test", (spec,), rows * PAGES_EACH + 1, PAGE_SIZE)
    ours, reference = (GroupRunner(b, group, dtype, device) for b in (backend, TorchBackend(device)))
    tokens, heads = rows * query_len, (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
    arena, bucket = single_batch_arena(rows, tokens, PAGES_EACH, device)
    states = [torch.zeros(tokens, n, spec.head_dim_k, dtype=dtype, device=device) for n in heads]
    planner = ours.fixed_planner(rows, query_len)
    planned = planner.plan(stage(rows_from([0] * rows, query_len), arena, bucket))
    replay = record(lambda: ours.attend(planned, 0, *states))
    for mine, theirs in zip(ours.layers, reference.layers, strict=True):  # only now: recording wrote keys, too
        theirs.keys.copy_(mine.keys.normal_())
        theirs.values.copy_(mine.values.normal_())
    for first in firsts:
        for state in states:
            state.normal_()
        host = rows_from(first, query_len)
        metadata = stage(host, arena, bucket)
        planner.replan(host)
        own = replay()
        yield own, reference.attend(reference.plan(metadata), 0, states[0].float(), *states[1:])
