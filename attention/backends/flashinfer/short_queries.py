"""Short queries of one length, as in a verification: attended by specdec's packed kernel, apart from prompt chunks.

FlashInfer's fa2 gives the query heads of a KV head, times the tokens of a row, a tile of 16, 64 or 128: Llama-3.1-8B's
verification with K = 5 has 24 such queries, so almost two thirds of a tile of 64 are padding, which costs time on a GPU
at its power limit. Here the tile is 16 or 32, and nothing is planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention.backends.flashinfer.wrapper import Part, first_long_row
from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import CacheGroup, LayerKV
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec

if TYPE_CHECKING:
    from attention.cascade.page_sharing import BatchShared, SharedRows, Sharing
    from attention.kernels.packed_kernel import Scratch

MOST_QUERIES = 32
"""Query heads of a KV head times tokens of a row: beyond it FlashInfer's tile of 64 is well used."""
MOST_BOTH_WAYS = 128
"""The same of layers that are not causal, which no other kernel serves."""
HEAD_DIMS = (64, 128)
PACKED_IN_WORDS = f"; verifications packed (up to {MOST_QUERIES} queries a KV head)"


def is_packed(group: CacheGroup, key: AttentionSpec, dtype: torch.dtype, query_len: int) -> bool:
    """Whether `PackedKernel` serves rows of `query_len` tokens."""
    fits = key.head_dim_k == key.head_dim_v in HEAD_DIMS and group.format.dtype_for(dtype) == dtype
    return fits and not key.features and not key.value_in_key and query_len * key.group_size <= MOST_QUERIES


def check_both_ways(group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> None:
    """Raises UnsupportedAttentionError: a layer that is not causal, and that `PackedKernel` does not serve."""
    where = f"group {group.name}: attention that is not causal"
    if not key.head_dim_k == key.head_dim_v in HEAD_DIMS or key.value_in_key:
        dims = " and ".join(map(str, HEAD_DIMS))
        raise UnsupportedAttentionError(f"{where} has heads of {dims} numbers on CUDA; use backend='torch'")
    if group.format.dtype_for(dtype) != dtype:
        raise UnsupportedAttentionError(f"{where} has no cache in 8 bits on CUDA; use kv_cache_dtype='auto'")
    if key.softcap is not None or key.has_sinks:
        raise UnsupportedAttentionError(f"{where} has no softcap and no sinks on CUDA; use backend='torch'")


def packed_scratch(device: torch.device, most_queries: int = MOST_QUERIES) -> Scratch:
    """The buffers and sizes of a device that all of its packed kernels share. most_queries: see `MOST_QUERIES`."""
    from attention.kernels.packed_kernel import Scratch

    return Scratch.on(device, most_queries, max(HEAD_DIMS))


class PackedKernel:
    """The packed kernel over one batch at a time, in place of a FlashInfer wrapper (`Kernel`), with nothing to plan.

    It reads pages and lengths at the device addresses of the last planned batch. Pages that rows share are attended
    once if that is estimated to be faster; see `sharing`.
    """

    def __init__(self, key: AttentionSpec, scratch: Scratch, sharing: SharedRows | BatchShared | None = None) -> None:
        """sharing: shared pages of the batches that it serves; None if sharing is never looked for."""
        self.generation = 0
        self.sharing = sharing
        self._scratch = scratch
        self._key = key
        self._part: Part | None = None

    def plan(self, part: Part) -> None:
        """Attend over this part's pages from now on."""
        self._part = part
        self.generation += 1

    def share(self, batch: HostBatch) -> None:
        """Find the pages that rows of the planned batch, `batch`, share; for a kernel of a fixed shape."""
        if self.sharing is not None:
            self.sharing.update(batch)

    def keeps(self, host: object) -> bool:
        """See `Kernel.keeps`: any lengths will do."""
        return True

    def run(self, query: Tensor, layer_kv: LayerKV, out: Tensor, sinks: Tensor | None) -> None:
        """See `Kernel.run`; without sinks."""
        from attention.kernels.packed_kernel import launch_packed

        assert self._part is not None and sinks is None
        part = self._part
        places = (part.device_page_indptr, part.device_page_indices, part.device_last_page_len)
        query_len = (part.stop - part.start) // len(part.device_last_page_len)
        shared = None if self.sharing is None else self.sharing.shared
        if shared is not None and self.sharing is not None and self.sharing.launches:
            from attention.cascade.kernel import launch_prefix

            launch_prefix(query, layer_kv, self._key, *places[:2], shared, query_len)
        launch_packed(query, layer_kv, self._key, *places, out, self._scratch, query_len, shared)


class PackedKernels:
    """The packed kernels of a device: their common memory, and whether they look for pages that rows share."""

    def __init__(self, device: torch.device, cascades: bool = False) -> None:
        """cascades: look for them, and attend them once where that pays."""
        self._device = device
        self._scratch: Scratch | None = None
        self._scratches: dict[int, Scratch] = {}
        self.sharing: Sharing | None = None
        if cascades:
            from attention.cascade.page_sharing import Sharing

            self.sharing = Sharing(device)

    def kernel(
        self, key: AttentionSpec, dtype: torch.dtype, rows: int, query_len: int, batch: HostBatch | None = None
    ) -> PackedKernel:
        """The kernel for all batches of this shape, or for the first rows (`query_len` tokens each) of one `batch`."""
        if self._scratch is None:
            self._scratch = packed_scratch(self._device)
        if self.sharing is None or self.sharing.limit(key, eight_bits=False):
            return PackedKernel(key, self._scratch)
        shape = (key, dtype, (rows, query_len), self._scratch)
        found = self.sharing.fixed(*shape) if batch is None else self.sharing.of_batch(*shape, batch)
        return PackedKernel(key, self._scratch, found)

    def both_ways(self, key: AttentionSpec, query_len: int) -> PackedKernel:
        """The kernel of a layer that is not causal.

        Raises:
            UnsupportedAttentionError: too many queries a KV head.
        """
        queries = query_len * key.group_size
        if queries > MOST_BOTH_WAYS:
            raise UnsupportedAttentionError(
                f"attention that is not causal: {query_len} tokens of a row and {key.group_size} query heads of a KV "
                f"head are {queries} queries; at most {MOST_BOTH_WAYS} are served on CUDA; use backend='torch'"
            )
        if queries not in self._scratches:
            self._scratches[queries] = packed_scratch(self._device, queries)
        return PackedKernel(key, self._scratches[queries])

    def in_words(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> str:
        """A description of the batches that they serve, to follow another kernel's name; "" for none."""
        return PACKED_IN_WORDS if is_packed(group, key, dtype, 1) and key.chunk_size is None else ""

    def sharing_in_words(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype, served: bool) -> str:
        """Where shared pages are attended once, or why never; "" if not looked for. served: whether heads allow it."""
        if self.sharing is None:
            return ""
        eight_bits = group.format.dtype_for(dtype) != dtype
        return self.sharing.in_words(key, eight_bits, served and is_packed(group, key, dtype, 1))


def whole_batch(metadata: CommonAttentionMetadata) -> Part:
    """All rows as one part."""
    host = metadata.host
    return Part(
        host.query_start_loc, host.page_indptr, host.seq_lens, metadata.query_start_loc, metadata.page_indptr,
        metadata.last_page_len, metadata.page_indices, 0, host.num_tokens,
    )  # fmt: skip


def split_batch(metadata: CommonAttentionMetadata) -> tuple[Part, ...]:
    """The batch in up to two parts: the leading rows with short queries, then everything from the first long one on."""
    host = metadata.host
    cut = first_long_row(host)
    if cut in (0, host.num_reqs):
        return (whole_batch(metadata),)
    token = int(host.query_start_loc[cut])
    return _part(metadata, 0, cut, 0, token), _part(metadata, cut, host.num_reqs, token, host.num_tokens)


def _part(metadata: CommonAttentionMetadata, first: int, last: int, token: int, stop: int) -> Part:
    """Rows first … last - 1 of a batch, whose tokens are token … stop - 1."""
    host = metadata.host
    rows = slice(first, last)
    starts = slice(first, last + 1)
    own = host.query_start_loc[starts]
    on_device = metadata.query_start_loc[starts]
    return Part(
        own - token if token else own, host.page_indptr[starts], host.seq_lens[rows],
        on_device - token if token else on_device, metadata.page_indptr[starts], metadata.last_page_len[rows],
        metadata.page_indices, token, stop,
    )  # fmt: skip
