"""Sizes of a round's arrays: rounded up to buckets, at most, and in fixed shapes."""

from __future__ import annotations

from collections.abc import Sequence

from numpy import ndarray

from attention.batch.transforms.windowed import most_listed_pages
from drafters.loops.base import FixedShape, LoopSize
from specdec.config import EngineConfig
from specdec.requests.request import Request
from specdec.rounds.rows import Reads

TILE_TOKENS = 128
"""Tokens of a tile of the matmuls of many tokens: part of a tile takes as long as all of it."""


def prefill_budget(config: EngineConfig, decoding_tokens: int, others: bool = True) -> int:
    """The most prompt tokens of a round with `decoding_tokens` tokens of decoding rows. others: whether some of these
    rows are of other calls, which are not to wait long.

    A few less than `max_num_prefill_tokens` if those few would begin another tile. On an H200, at the Llama-3.1-8B
    shape, matmuls take as long with 576 tokens as with 640.

    >>> config = EngineConfig(3, 4096, 32, 2048, 16, 100, max_num_prefill_tokens=512)
    >>> [prefill_budget(config, tokens) for tokens in (0, 4, 64, 100, 128, 1800)]
    [2048, 508, 448, 512, 512, 248]
    >>> prefill_budget(config, 64, others=False)
    1984
    """
    left = config.max_num_batched_tokens - decoding_tokens
    if not decoding_tokens or not others:
        return left
    budget = min(left, config.max_num_prefill_tokens)
    begun = (decoding_tokens + budget) % TILE_TOKENS
    return budget - begun if begun <= 3 * min(TILE_TOKENS, budget // 2) // 4 else budget


class PromptBudget:
    """How many prompt tokens a round may read beside its rows that decode.

    A call that brings many requests waits for all of them: its prompts are read as fast as they can be, beside its own
    rows that decode. Rows of other calls wait for `max_num_prefill_tokens` at most.
    """

    def __init__(self, config: EngineConfig, running: Sequence[Request], reading: ndarray, num_tokens: int) -> None:
        """reading: [len(running)] which of them read prompts. num_tokens: of the other rows."""
        self._config = config
        self._num_tokens = num_tokens
        self._batches = {r.batch for r, reads in zip(running, reading, strict=True) if not reads}
        self._others = any(self._batches - {r.batch} for r, reads in zip(running, reading, strict=True) if reads)

    def of(self, request: Request, read: Reads) -> int:
        """Tokens of a prompt that the round may read beside them, and beside chunks `read` as (row, tokens).

        To be asked in the order of turns: what bounds one prompt bounds those after it.
        """
        self._others = self._others or bool(self._batches - {request.batch})
        return max(prefill_budget(self._config, self._num_tokens, self._others) - sum(chunk for _, chunk in read), 0)


def loop_limits(config: EngineConfig) -> LoopSize:
    """The largest draft loop that an engine may run."""
    tokens = config.max_num_batched_tokens
    return LoopSize(config.max_num_seqs, tokens, most_pages(config), config.num_speculative_tokens)


def rounded(size: LoopSize) -> LoopSize:
    """Rows and tokens rounded up to powers of two; pages and drafts are few numbers as they are.

    >>> rounded(LoopSize(5, 30, 8, 3))
    LoopSize(rows=8, tokens=32, pages=8, drafts=3)
    """
    return LoopSize(power_of_two(size.rows), power_of_two(size.tokens), size.pages, size.drafts)


def graph_rows(max_num_seqs: int, query_len: int) -> tuple[int, ...]:
    """Rows for which CUDA graphs are captured, largest first: powers of two and max_num_seqs.

    A batch of one token in all would be compiled once more (sizes 0 and 1 are special to the compiler): two rows at
    least then.

    >>> graph_rows(12, 6), graph_rows(4, 1), graph_rows(1, 1)
    ((12, 8, 4, 2, 1), (4, 2), (2,))
    """
    least = 2 if query_len == 1 else 1
    powers = {1 << i for i in range(max_num_seqs.bit_length()) if least <= 1 << i < max_num_seqs}
    return tuple(sorted(powers | {max(max_num_seqs, least)}, reverse=True))


def fixed_shape(config: EngineConfig, rows: int) -> FixedShape:
    """The shape of the rounds that CUDA graphs of so many rows read: fixed addresses, whatever the lengths.

    Rows that share pages each list them, so the lists together may be longer than the pool.
    """
    query_len = config.num_speculative_tokens + 1
    entries = rows * most_pages(config)
    if not config.enable_prefix_caching:
        padding = rows * (1 - (-query_len // config.page_size))  # entries of the null page, after every row
        entries = min(entries, config.num_head_pages + padding)
    return FixedShape(rows, query_len, config.page_size, entries)


def most_pages(config: EngineConfig) -> int:
    """Pages of the longest row, padding tokens after its own and a head's block included."""
    more = max(config.num_speculative_tokens + 1, config.block_size)
    return -(-(config.max_model_len + more) // config.page_size)


def group_entries(config: EngineConfig) -> tuple[int, ...]:
    """Most pages on the list of a round in each of the target's further cache groups."""
    rows = config.max_num_seqs
    size = config.page_size
    tokens = config.max_num_batched_tokens
    most = (rows * (most_listed_pages(pool.reach, 1, size) + 1) + tokens // size for pool in config.windowed)
    return tuple(min(rows * most_pages(config), entries) for entries in most)


def fixed_entries(config: EngineConfig, shape: FixedShape) -> tuple[int, ...]:
    """The same for rounds of one fixed shape."""
    listed = (most_listed_pages(pool.reach, shape.query_len, shape.page_size) for pool in config.windowed)
    return tuple(shape.rows * min(most_pages(config), pages) for pages in listed)


def power_of_two(n: int) -> int:
    """The smallest power of two >= n; 0 for 0."""
    return 1 << max(n - 1, 0).bit_length() if n else 0
