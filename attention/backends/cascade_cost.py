"""When attending shared pages once pays: the times of flat attention and of two levels, as an H200 takes them.

The constants are fitted to 54 measured cases (`tests/attention/backends/test_cascade_cost.py` holds them: 8, 32 and 128
rows, prefixes of 512 to 8,192 keys, 64 and 256 own keys, 1, 4 and 6 tokens; Llama-3.1-8B's heads in bfloat16), by least
squares of the logarithms. They give cascade attention's time within 20 % (6 % on average) and flat attention's within
25 % (11 %; it takes longer with six tokens, which the rule leaves out). On another GPU all times are others, but only
their ratio decides.
"""

from __future__ import annotations

from dataclasses import dataclass

LAUNCH_US, PREFIX_LAUNCH_US = 7.7, 2.0
"""Of the packed kernel, from its begin to its end over few keys; of the prefix kernel before it."""
OWN_US_PER_MB, SHARED_US_PER_MB = 0.241, 0.187
"""Reading keys: those that one row has, from memory (4.1 TB/s); those that flat attention reads for many rows, which
are in the L2 cache after the first (5.3 TB/s)."""
SUM_US_PER_MB = 2 * OWN_US_PER_MB
"""Partial sums are read where a row begins, before anything else of it can be done."""
LEAST_GAIN = 1.15
"""Flat attention's time over that of two levels from which on these are taken. Of the measured cases all with a gain
below 1.05 come out below 0.91, and all with one above 1.2 above 1.36."""


@dataclass(frozen=True)
class PrefixWork:
    """What the kernel over the shared pages does at once; see `attention.kernels.cascade.PrefixTiling`.

    Attributes:
        tile_queries: of a program. parts, least_keys: how the shared keys are split.
        programs: that the device runs at the same time. key_ns: that one takes for a key, loaded and computed.
    """

    tile_queries: int
    parts: int
    least_keys: int
    programs: int
    key_ns: float


@dataclass(frozen=True)
class CascadeCost:
    """Times of one layer's attention, in µs, over rows that share their first keys.

    Flat attention reads every row's keys. In two levels every program of the prefix kernel goes through its part of the
    shared keys, for a tile of queries; programs that the device has no room for wait for the others. Then each row
    reads the sums over the parts, D + 2 numbers a query head in float32, and its own keys.

    Llama-3.1-8B in bfloat16 on an H200, 32 rows with 2,048 shared keys and 256 of their own, 6 tokens: 73.6 and 47.3 µs
    were measured (1.56); with 512 shared keys 28.3 and 34.2, so flat attention is taken.

    >>> cost = CascadeCost(32, 8, 128, 2, PrefixWork(128, 2, 512, 132, 22.6))
    >>> [(round(cost.flat_us(32, keys, 256), 1), round(cost.cascade_us(32, 6, keys, 256), 1)) for keys in (2048, 512)]
    [(66.0, 47.1), (28.3, 32.4)]
    >>> cost.pays(32, 6, 2048, 256), cost.pays(32, 6, 512, 256)
    (True, False)

    Attributes:
        num_q_heads, num_kv_heads, head_dim: of a layer. item_bytes: of a number in the cache.
        work: of the prefix kernel.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    item_bytes: int
    work: PrefixWork

    def _key_megabytes(self, keys: int) -> float:
        return keys * 2 * self.num_kv_heads * self.head_dim * self.item_bytes / 1e6

    def flat_us(self, rows: int, prefix_keys: int, own_keys: int) -> float:
        """Of flat attention over `rows` rows; own_keys: of each row after the prefix, on average."""
        shared, own = self._key_megabytes(rows * prefix_keys), self._key_megabytes(rows * own_keys)
        return LAUNCH_US + shared * SHARED_US_PER_MB + own * OWN_US_PER_MB

    def cascade_us(self, rows: int, query_len: int, prefix_keys: int, own_keys: int) -> float:
        """In two levels; query_len: tokens of each row."""
        work, tokens = self.work, rows * query_len
        part_keys = max(-(-prefix_keys // work.parts), work.least_keys)
        parts = -(-prefix_keys // part_keys)
        tiles = -(-tokens * (self.num_q_heads // self.num_kv_heads) // work.tile_queries)
        turns = -(-tiles * self.num_kv_heads * parts // work.programs)
        prefix = PREFIX_LAUNCH_US + turns * part_keys * work.key_ns / 1e3
        sums = 2 * parts * tokens * self.num_q_heads * (self.head_dim + 2) * 4 / 1e6  # written and read
        own = self._key_megabytes(rows * own_keys)
        return LAUNCH_US + prefix + sums * SUM_US_PER_MB + own * OWN_US_PER_MB

    def reading_us(self, keys: int) -> float:
        """Of flat attention for so many shared keys, counted once a row."""
        return self._key_megabytes(keys) * SHARED_US_PER_MB

    def saved_us(self, rows: int, query_len: int, prefix_keys: int, own_keys: int) -> float:
        """Flat attention's time less that of two levels: less than 0 where these take longer."""
        return self.flat_us(rows, prefix_keys, own_keys) - self.cascade_us(rows, query_len, prefix_keys, own_keys)

    def gain(self, rows: int, query_len: int, prefix_keys: int, own_keys: int) -> float:
        """Flat attention's time over that of two levels."""
        return self.flat_us(rows, prefix_keys, own_keys) / self.cascade_us(rows, query_len, prefix_keys, own_keys)

    def pays(self, rows: int, query_len: int, prefix_keys: int, own_keys: int) -> bool:
        """Whether rows that share `prefix_keys` keys are attended in two levels."""
        return self.gain(rows, query_len, prefix_keys, own_keys) >= LEAST_GAIN
