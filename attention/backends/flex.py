"""FlexAttention over the paged cache: torch's own kernels, for a GPU without FlashInfer and for score modifications.

The cache is the keys' sequence as it lies in memory, and the block mask names the pages that a tile of queries reads:
one block of keys is one page. The query heads of a KV head are folded into the queries, so that a tile reads a page
once for all of them; a tile holds queries of one row only. Pages that every query of a tile sees whole need no mask.

Compiled on CUDA (Triton, through torch's compiler); elsewhere, in tests, torch's eager form, which goes through every
slot of the cache: the mask alone decides there. Source: torch.nn.attention.flex_attention (2.11 to 2.13); Dong et al.
2024, "Flex Attention", arXiv 2412.05496. Paged caches are read as in vllm-project/vllm,
vllm/v1/attention/backends/flex_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from attention.backends.flex_kernel import LEAST_KEYS, Attend, Compiler, FlexKernel, function_of
from attention.backends.limits import check_causal, check_query_heads, dtype_name
from attention.batch.host import HostBatch, offsets_within, owners_of
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import FP8, CacheGroup, LayerKV, write
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec
from attention.staging import on_device

TILES = (16, 32, 64)
"""Packed queries of a tile. Each size is compiled separately."""
_WHOLE = 128
"""Packed queries of a plan are padded to a multiple of this: torch compiles another form for other lengths."""
_LEAST = 2
"""Least pages of a plan: the compiler specialises on a size of one."""


def tile_size(packed: int) -> int:
    """The smallest tile that holds the longest row's packed queries, or the largest tile.

    >>> [tile_size(n) for n in (1, 17, 24, 4000)]
    [16, 32, 32, 64]
    """
    return next((tile for tile in TILES if packed <= tile), TILES[-1])


@dataclass(frozen=True)
class QueryTiles:
    """Queries of a batch in tiles of one row each; a packed query is a token and one of the G heads of a KV head.

    Attributes:
        row: [n] row of each tile. begin, end: [n] logical pages of which some query sees some key.
        whole_begin, whole_end: [n] logical pages of which every query sees every key, within those.
        token, head, position: [n·tile] of each packed query; padding is token 0, head 0, position -1.
        query_row: [n·tile] row of each packed query. place: [T·G] index of the packed query of each token and head.
    """

    row: ndarray
    begin: ndarray
    end: ndarray
    whole_begin: ndarray
    whole_end: ndarray
    token: ndarray
    head: ndarray
    position: ndarray
    query_row: ndarray
    place: ndarray

    @classmethod
    def of(cls, host: HostBatch, groups: int, tile: int, window: int | None) -> QueryTiles:
        """The tiles of a batch with `groups` query heads a KV head."""
        packed = host.query_lens * groups
        counts = -(-packed // tile)
        counts[-1] += -int(counts.sum()) % (_WHOLE // tile)
        row = owners_of(counts)
        first = offsets_within(counts) * tile  # packed query of the row
        within = first[:, None] + np.arange(tile)
        real = within < packed[row][:, None]
        start = host.num_computed_tokens[row]
        oldest = start + np.minimum(first, packed[row] - 1) // groups
        newest = start + (np.minimum(first + tile, packed[row]) - 1) // groups
        pages = _pages(oldest, newest, window, host.page_size)
        begin, end, whole_begin, whole_end = (np.where(first < packed[row], at, 0) for at in pages)
        token = host.query_start_loc[:-1][row][:, None] + within // groups
        position = start[:, None] + within // groups
        place = np.empty(host.num_tokens * groups, np.int64)
        at = np.flatnonzero(real)
        token = np.where(real, token, 0).reshape(-1)
        head = np.where(real, within % groups, 0).reshape(-1)
        place[token[at] * groups + head[at]] = at
        return cls(
            row,
            begin,
            end,
            whole_begin,
            whole_end,
            token,
            head,
            np.where(real, position, -1).reshape(-1),
            np.repeat(row, tile),
            place,
        )

    def arrays(self, host: HostBatch, num_pages: int) -> list[ndarray]:
        """The arrays that the device needs, all int32: counts [n] and pages [n, W] of partly and of wholly visible
        blocks; for the rows' pages their place in [rows, num_pages] and their logical page; row start and position,
        token and head of each packed query; place. W is one number: torch 2.11's kernel reads both lists of pages by
        one's strides."""
        before = self.whole_begin - self.begin
        whole = self.whole_end - self.whole_begin
        partly = before + self.end - self.whole_end
        at = np.arange(max(_LEAST, int(partly.max(initial=0)), int(whole.max(initial=0))))
        logical = np.where(at < before[:, None], self.begin[:, None] + at, (self.whole_end - before)[:, None] + at)
        owners = owners_of(host.page_counts)
        found = [
            partly,
            self._physical(host, logical, at < partly[:, None]),
            whole,
            self._physical(host, self.whole_begin[:, None] + at, at < whole[:, None]),
            owners * num_pages + host.page_indices,
            offsets_within(host.page_counts),
            self.query_row * num_pages,
            self.position,
            self.token,
            self.head,
            self.place,
        ]
        return [array.astype(np.int32) for array in found]

    def _physical(self, host: HostBatch, logical: ndarray, used: ndarray) -> ndarray:
        return np.where(used, host.block_table[self.row[:, None], np.where(used, logical, 0)], 0)


def _pages(
    oldest: ndarray, newest: ndarray, window: int | None, page_size: int
) -> tuple[ndarray, ndarray, ndarray, ndarray]:
    """begin, end, whole_begin, whole_end of `QueryTiles`, for tiles of queries from position oldest to newest.

    Queries at 20 … 22 on pages of 8: all see pages 0 and 1 whole, page 2 partly; with a window of 12 page 0 is out of
    sight, and of page 1 the query at 22 no longer sees key 10:

    >>> [int(x[0]) for x in _pages(np.array([20]), np.array([22]), None, 8)]
    [0, 3, 0, 2]
    >>> [int(x[0]) for x in _pages(np.array([20]), np.array([22]), 12, 8)]
    [1, 3, 2, 2]
    """
    begin = whole_begin = np.zeros_like(oldest)
    if window is not None:
        begin = np.maximum(oldest - window + 1, 0) // page_size
        whole_begin = -(-np.maximum(newest - window + 1, 0) // page_size)
    end = newest // page_size + 1
    whole_begin = np.minimum(whole_begin, end)
    return begin, end, whole_begin, np.maximum((oldest + 1) // page_size, whole_begin)


_LEAST_DIM = 16
"""Fewest columns of Triton's matmuls."""
_WIDEST_HEAD = 256
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class FlexPlan:
    """One batch for one AttentionSpec; arrays: the inputs of the block mask, see `attend_blocks`.

    Attributes:
        kernel: takes query, keys, values, the scale of keys, and `arrays`.
        token, head: [N] int32, the token and the query head of its KV head that each packed query is (padding: 0).
        place: [T·G] int32, index of the packed query of each token and head.
    """

    kernel: Attend
    arrays: tuple[Tensor, ...]
    token: Tensor
    head: Tensor
    place: Tensor


class FlexBuilder:
    """Plans batches from their host arrays; one copy to the device each."""

    def __init__(
        self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype, device: torch.device, compiler: Compiler | None
    ) -> None:
        self._group, self._key, self._dtype, self._device, self._compiler = group, key, dtype, device, compiler
        self._folded = key.num_kv_heads if group.layout == "HND" else 1
        self._slopes: Tensor | None = None
        if key.alibi is not None:
            self._slopes = torch.tensor(key.alibi, dtype=torch.float32, device=device).view(key.num_kv_heads, -1)

    def build(self, metadata: CommonAttentionMetadata) -> FlexPlan:
        """Plan one batch. Never waits for the device. Raises InvariantError for a page that is not in the pool."""
        group = self._group
        key = self._key
        host = metadata.host
        host.validate_pages(group.num_pages)
        tile = tile_size(int(host.query_lens.max(initial=1)) * key.group_size)
        # The arrays on the device, in one copy.
        arrays = QueryTiles.of(host, key.group_size, tile, key.window).arrays(host, group.num_pages)
        flat = on_device(np.concatenate([array.reshape(-1) for array in arrays]), self._device)
        views = flat.split([array.size for array in arrays])
        sent = [view.view(array.shape) for view, array in zip(views, arrays, strict=True)]
        partly, pages, whole, whole_pages, owned, logical, row_start, position, token, head, place = sent
        logical_page = logical.new_full((max(2, host.num_reqs) * group.num_pages,), -1)
        logical_page[owned] = logical
        blocks = self._blocks(partly, pages) + self._blocks(whole, whole_pages)
        cache = group.format.dtype_for(self._dtype)
        kernel = FlexKernel(key, self._dtype, cache, group.page_size, self._folded, tile, self._compiler)
        bias = () if self._slopes is None else (self._slopes, head)
        return FlexPlan(function_of(kernel), (*blocks, logical_page, row_start, position, *bias), token, head, place)

    def _blocks(self, counts: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        """[n] counts and [n, W] pages of each tile as blocks of the cache: [1, H, n] and [1, H, n, W].

        An HND page holds one block for each head, one after the other.
        """
        if self._folded == 1:
            return counts[None, None], pages[None, None]
        heads = torch.arange(self._folded, dtype=torch.int32, device=pages.device)
        blocks = pages[None] * self._folded + heads[:, None, None]
        return counts.expand(1, self._folded, -1).contiguous(), blocks[None]


class FlexBackend:
    """`AttentionBackend` of torch's FlexAttention: all variants but values inside keys; 8-bit caches, float32."""

    name = "flex"
    batch_invariant = False

    def __init__(self, device: torch.device, compiler: Compiler | None = None) -> None:
        """compiler: default on CUDA "inductor", elsewhere none: the eager form."""
        self._device = device
        self._compiler = compiler or ("inductor" if device.type == "cuda" else None)

    def route(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> str:
        form = "eager" if self._compiler is None else "compiled"
        return f"torch FlexAttention, {form}, cache {dtype_name(group.format.dtype_for(dtype))}"

    def builder(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> FlexBuilder:
        """A builder for `key`; see `check_supported` for what it raises."""
        check_supported(group, key, dtype, self._device)
        return FlexBuilder(group, key, dtype, self._device, self._compiler)

    def run(
        self,
        plan: FlexPlan,
        key: AttentionSpec,
        query: Tensor,
        key_states: Tensor,
        value_states: Tensor,
        layer_kv: LayerKV,
        metadata: CommonAttentionMetadata,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Write K and V, then attend; see `AttentionBackend.run`."""
        tokens = len(metadata.slot_mapping)
        heads = key.num_kv_heads
        groups = key.group_size
        self._write(layer_kv, key_states[:tokens], value_states[:tokens], metadata.slot_mapping)
        split = query[:tokens].unflatten(1, (heads, groups))  # [T, Hkv, G, Dk]
        packed = split[plan.token, :, plan.head].transpose(0, 1)[None]  # [1, Hkv, N, Dk]
        scale = _on_device(layer_kv.key_scale, self._device)
        keys = _as_sequence(layer_kv.keys, layer_kv)
        values = _as_sequence(layer_kv.values, layer_kv)
        attended, log_sum = plan.kernel(packed, keys, values, scale, *plan.arrays)
        if sinks is not None:
            assert log_sum is not None
            own = sinks.float().view(heads, groups)[:, plan.head]  # [Hkv, N]
            attended = attended * torch.sigmoid(log_sum - own)[..., None]
        if layer_kv.value_scale != 1.0:
            attended = attended * layer_kv.value_scale
        found = attended[0].index_select(1, plan.place).unflatten(1, (tokens, groups))  # [Hkv, T, G, Dv]
        out = key.room(query, out)
        out[:tokens].unflatten(1, (heads, groups)).copy_(found.transpose(0, 1))
        return out

    @staticmethod
    def _write(layer_kv: LayerKV, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        if not keys.is_cuda or torch.version.hip is not None:  # Triton kernels are not tested on ROCm
            write(layer_kv, keys, values, slots)
            return
        from attention.kernels.cache_write import write_kv

        write_kv(layer_kv, keys, values, slots)


def _as_sequence(pages: Tensor, layer_kv: LayerKV) -> Tensor:
    """Cache pages as one sequence, no copy: NHD [1, Hkv, slots, D]; HND [1, 1, pages · Hkv · page_size, D]."""
    if layer_kv.layout == "NHD":
        return pages.flatten(0, 1).transpose(0, 1)[None]
    return pages.flatten(0, 2)[None, None]


@cache
def _on_device(scale: float, device: torch.device) -> Tensor:
    return torch.full((2,), scale, device=device)  # two elements: the compiler specialises on a size of one


def check_supported(group: CacheGroup, key: AttentionSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse layers that this backend does not support, before anything is allocated.

    Raises:
        UnsupportedAttentionError: MLA or head counts; on CUDA also head dims, page sizes, caches and GPUs that the
            compiled kernel does not take.
    """
    check_causal(key, group.name, "flex")
    where = f"group {group.name}: FlexAttention"
    elsewhere = "; use backend='torch'"
    if key.value_in_key:
        raise UnsupportedAttentionError(f"{where} does not serve MLA; use backend='flashinfer' or 'torch'")
    check_query_heads(key, where)
    if device.type != "cuda":
        return
    dims = (key.head_dim_k, key.head_dim_v)
    if min(dims) < _LEAST_DIM or max(dims) > _WIDEST_HEAD:
        raise UnsupportedAttentionError(
            f"{where} takes head dims from {_LEAST_DIM} to {_WIDEST_HEAD}; given {dims[0]} and {dims[1]}{elsewhere}"
        )
    if group.page_size % LEAST_KEYS:
        raise UnsupportedAttentionError(
            f"{where} takes page sizes that {LEAST_KEYS} divides; given {group.page_size}{elsewhere}"
        )
    elements = group.num_pages * group.page_size * key.num_kv_heads * max(dims)
    if elements >= 2**31:
        raise UnsupportedAttentionError(
            f"{where} addresses a layer's keys by 32 bits, at most {2**31 - 1:,} numbers; given {elements:,}: lower "
            "kv_cache_tokens"
        )
    if group.format.dtype == FP8 and (
        torch.version.hip is not None or torch.cuda.get_device_capability(device) < _FP8_CAPABILITY
    ):
        raise UnsupportedAttentionError(
            f"{where} reads caches in 8 bits on NVIDIA GPUs from compute capability 8.9 on; use kv_cache_dtype='auto'"
        )
