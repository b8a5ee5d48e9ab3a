"""The batches that every attention backend is tested on, by name: `test_backends.py` runs them against an oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention.batch.host import HostBatch, rows_batch


@dataclass(frozen=True)
class Batch:
    """Rows of one batch: new tokens of each, and how many keys each had before."""

    query_lens: tuple[int, ...]
    computed: tuple[int, ...]

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Keys of each row, its new tokens included."""
        return tuple(q + c for q, c in zip(self.query_lens, self.computed, strict=True))

    @property
    def even(self) -> bool:
        """Whether all rows have equally many new tokens: only such batches are held by a CUDA graph."""
        return len(set(self.query_lens)) == 1

    def table(self, page_size: int, seed: int = 0) -> np.ndarray:
        """[B, P] int32: pages in random order from a pool one eighth larger than needed; 0 past a row's end."""
        counts = -(-np.array(self.seq_lens) // page_size)
        pool = self.num_pages(page_size)
        table = np.zeros((len(counts), counts.max()), np.int32)
        pages = np.random.default_rng(seed).permutation(np.arange(1, pool))[: counts.sum()]
        table[np.arange(counts.max()) < counts[:, None]] = pages
        return table

    def num_pages(self, page_size: int) -> int:
        """Pages of the pool that `table` draws from, the null page included."""
        used = sum(-(-n // page_size) for n in self.seq_lens)
        return used + used // 8 + 3

    def host(self, page_size: int, seed: int = 0) -> HostBatch:
        """The batch over `table`."""
        starts = np.concatenate([[0], np.cumsum(self.query_lens)])
        return rows_batch(starts, np.array(self.computed), self.table(page_size, seed), page_size)


def _rows(rows: int, query_len: int, least: int, most: int) -> Batch:
    """`rows` equal queries after contexts between `least` and `most`, evenly spread and in mixed order."""
    spread = np.linspace(least, most, rows).astype(int)
    return Batch((query_len,) * rows, tuple(np.random.default_rng(rows).permutation(spread).tolist()))


def full_size() -> dict[str, Batch]:
    """As they occur on a GPU; at most 280,000 keys each."""
    return {
        "decode, small": _rows(1, 1, 2047, 2047),
        "decode, medium": _rows(32, 1, 100, 4000),
        "decode, large": _rows(256, 1, 64, 2000),
        "prefill": Batch((512, 1500, 17, 128), (0, 0, 0, 2000)),
        "mixed": Batch((6, 6, 1, 700, 6, 33), (900, 15, 4000, 0, 80, 500)),
        **{f"verify, q = {q}": _rows(16, q, 30, 2000) for q in range(2, 9)},
        "verify, full batch": _rows(64, 6, 200, 2000),
        "single long": _rows(1, 1, 65_535, 65_535),
        "single long, q = 6": _rows(1, 6, 65_530, 65_530),
    }


def small_size() -> dict[str, Batch]:
    """The same for a CPU: lengths at the edges of pages, at most a few hundred keys a row."""
    return {
        "decode, small": Batch((1,), (40,)),
        "decode, medium": Batch((1,) * 5, (0, 15, 16, 63, 31)),
        "decode, large": _rows(24, 1, 0, 90),
        "prefill": Batch((33, 17, 1, 20), (0, 0, 0, 45)),
        "mixed": Batch((6, 6, 1, 40, 3), (90, 10, 31, 5, 0)),
        **{f"verify, q = {q}": Batch((q,) * 3, (0, 17 - q, 60)) for q in range(2, 9)},
        "verify, full batch": _rows(16, 6, 0, 60),
        "single long": Batch((1,), (520,)),
        "single long, q = 6": Batch((6,), (506,)),
    }
