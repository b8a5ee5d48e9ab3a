"""Division of the KV cache's memory among the target's cache groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention.cache.kv_cache import KVFormat, bytes_per_token
from attention.cache.windowed import most_owned_pages
from attention.groups import layers_by_group, reaches_of
from attention.spec import Reach
from drafters.base import Head
from specdec.config import WindowedPool
from specdec.loading.memory import cache_room, check_cache_fits
from specdec.wrapped.probing import TargetProbe

_CPU_CACHE_BYTES = 1 << 30
_SHARE = 0.25
"""Of the memory, for windowed groups, where rows of max_model_len tokens need less and max_num_seqs rows need more:
most requests are shorter, so that more of them run at once."""
_TESTED_ROWS, _TESTED_TOKENS = 3, 64
"""The self-test's rows, which are read without freeing anything, and more tokens than each has."""


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of one token in the caches.

    Attributes:
        first: bytes in the target's first group and in the head's, which holds the same tokens.
        windowed: (reach, bytes) of each further group of the target's.
    """

    first: int
    windowed: tuple[tuple[Reach, int], ...] = ()

    @property
    def all(self) -> int:
        """Bytes in all layers."""
        return self.first + sum(size for _, size in self.windowed)

    def of_pools(self, pools: Sequence[WindowedPool], page_size: int) -> int:
        """Bytes of the windowed groups' pools."""
        pairs = zip(pools, self.windowed, strict=True)
        return sum(pool.num_pages * page_size * size for pool, (_, size) in pairs)


def token_bytes(
    probed: TargetProbe, head: Head | None, format: KVFormat, longest: int, grouped: bool = True
) -> TokenBytes:
    """Bytes of one token by cache group, where `grouped`; a reach that covers the `longest` request needs no group."""
    specs, dtype = tuple(call.attention_spec for call in probed.calls), format.dtype_for(probed.model.dtype)
    reaches = reaches_of(specs, longest) if grouped else ()
    groups = layers_by_group(specs, reaches)
    first, *others = (bytes_per_token(tuple(specs[layer] for layer in layers), dtype) for layers in groups)
    of_head = 0 if head is None else bytes_per_token(tuple(head.attention_specs), probed.model.dtype)
    return TokenBytes(first + of_head, tuple(zip(reaches, others, strict=True)))


@dataclass(frozen=True)
class Rows:
    """Sizes that decide how many pages rows need in a windowed group; see `EngineConfig` for each."""

    num_speculative_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int

    def tokens(self, reach: Reach, rows: int) -> int:
        """Tokens of a pool in which `rows` rows decode, the next round reserved, while a chunk of prompts is read."""
        size = self.page_size
        decoding = most_owned_pages(reach, 2 * (self.num_speculative_tokens + 1), size) * size
        alone = most_owned_pages(reach, self.max_num_batched_tokens, size) * size
        tested = _TESTED_ROWS * max(size, _TESTED_TOKENS)
        return max(rows * decoding + self.max_num_batched_tokens, alone, tested)


@dataclass(frozen=True)
class Division:
    """Tokens of the first group's pool, and of each windowed group's."""

    tokens: int
    windowed: tuple[int, ...] = ()

    def pools(self, sizes: TokenBytes, page_size: int) -> tuple[WindowedPool, ...]:
        """The windowed groups in pages."""
        reaches = (reach for reach, _ in sizes.windowed)
        return tuple(WindowedPool(r, -(-n // page_size) + 1) for r, n in zip(reaches, self.windowed, strict=True))


def divide_cache(
    asked: int | None,
    device: torch.device,
    sizes: TokenBytes,
    rows: Rows,
    utilization: float,
    state_bytes: int = 0,
    scores_bytes: int = 0,
) -> Division:
    """Tokens of the KV cache: `asked` in the first group; else max_num_seqs rows of max_model_len, or what fits.

    What fits is 1 GiB on a CPU; on a GPU the memory left after the recurrent states of all rows (`state_bytes`) and
    the scores of requests with options (`scores_bytes`). A model without attention has no KV cache, so all tokens fit.

    Raises:
        CacheTooSmallError: the device has no room for a cache, or not for the given size.
    """
    if asked is not None:
        division = _beside(asked, sizes, rows, rows.max_num_seqs)
        more = _windowed_bytes(division, sizes) + state_bytes
        check_cache_fits(device, asked, sizes.first, f"kv_cache_tokens={asked}", more)
        return division
    room = _CPU_CACHE_BYTES
    if device.type == "cuda":
        room = cache_room(device, utilization, sizes.all, state_bytes, scores_bytes)
    return divided(room, rows.max_num_seqs * rows.max_model_len, sizes, rows)


def divided(room: int, wanted: int, sizes: TokenBytes, rows: Rows) -> Division:
    """Divide `room` bytes, with at most `wanted` tokens in the first group.

    Windowed groups get what max_num_seqs rows need; if memory is scarce at most a quarter of it, or the share of those
    rows of max_model_len tokens that fit.
    """
    if not sizes.all:
        return Division(wanted)
    whole = _beside(wanted, sizes, rows, rows.max_num_seqs)
    if wanted * sizes.first + _windowed_bytes(whole, sizes) <= room:
        return whole
    pools = [sum(size * rows.tokens(r, n) for r, size in sizes.windowed) for n in range(1, rows.max_num_seqs + 1)]
    long = rows.max_model_len * sizes.first
    count = sum(taken <= _SHARE * room or taken + n * long <= room for n, taken in enumerate(pools, 1))
    count = max(count, 1)
    tokens = max((room - pools[count - 1]) // sizes.first, room // sizes.all)
    return _beside(min(wanted, tokens), sizes, rows, count)


def _beside(tokens: int, sizes: TokenBytes, rows: Rows, count: int) -> Division:
    """A first group of `tokens`, and the pools that `count` rows need besides, which are never larger."""
    return Division(tokens, tuple(min(tokens, rows.tokens(reach, count)) for reach, _ in sizes.windowed))


def _windowed_bytes(division: Division, sizes: TokenBytes) -> int:
    return sum(tokens * size for tokens, (_, size) in zip(division.windowed, sizes.windowed, strict=True))
