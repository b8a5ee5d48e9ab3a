"""The trtllm-gen kernels of FlashInfer (0.7.2) for data-center Blackwell: no plan, only device arrays and host maxima.

Chosen by compute capability; **not tested on hardware** here: the contract of the two functions is tested with a fake
of the same signatures (tests/attention/backends/flashinfer/test_trtllm.py). They take block tables and lengths on the
device, and upper bounds of query and key lengths on the host. FlashInfer loads them as binaries (`flashinfer-cubin`, or
from the network at the first use).

Source: flashinfer-ai/flashinfer 0.7.2.post1, flashinfer/decode.py (trtllm_batch_decode_with_kv_cache) and prefill.py
(trtllm_batch_context_with_kv_cache).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.backends.flashinfer.wrapper import first_long_row
from attention.backends.limits import HALF, has_flashinfer_heads
from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import CacheGroup, LayerKV
from attention.checking import CHECKS, require
from attention.spec import AttentionSpec

CAPABILITIES = ((10, 0), (10, 3))
PAGE_SIZES = (16, 32, 64)
WORKSPACE_BYTES = 128 << 20


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU; None of anything else."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_blackwell(device: torch.device) -> bool:
    """Whether these kernels run on a device."""
    return capability(device) in CAPABILITIES


def serves_key(key: AttentionSpec, dtype: torch.dtype, cache: torch.dtype, device: torch.device) -> bool:
    """Whether these kernels serve a layer on a device: no softcap, no MLA, a cache in the model's dtype."""
    plain = has_flashinfer_heads(key) and key.softcap is None and not key.value_in_key
    return plain and dtype in HALF and cache == dtype and is_blackwell(device)


def serves(group: CacheGroup, key: AttentionSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether these kernels serve a group's layers on a device; other layers run on FlashInfer's planned kernels."""
    return group.page_size in PAGE_SIZES and serves_key(key, dtype, group.format.dtype_for(dtype), device)


@dataclass(frozen=True)
class Launch:
    """Rows attended together; all tensors are on the device.

    Attributes:
        start, stop: their token rows in the batch. tables: [b, W] int32; seq_lens: [b] int32.
        most_queries, most_keys: upper bounds of the rows' query tokens and keys.
        query_start: [b+1] int32, from 0; None where every row has `most_queries` tokens.
        key_start: [b+1] int32 for prompt chunks; None for the decode kernels.
    """

    start: int
    stop: int
    tables: Tensor
    seq_lens: Tensor
    most_queries: int
    most_keys: int
    query_start: Tensor | None = None
    key_start: Tensor | None = None


@dataclass(frozen=True)
class TrtllmPlan:
    """A planned batch: the launches of its rows with short queries and of its prompt chunks."""

    kernel: TrtllmKernel
    launches: tuple[Launch, ...]


class TrtllmKernel:
    """FlashInfer's decode and prompt functions for one AttentionSpec, with the buffers they work in."""

    def __init__(self, workspace: Tensor, group: CacheGroup, key: AttentionSpec) -> None:
        """workspace: zeros at first, used by these kernels only."""
        self.device = workspace.device
        self.group = group
        self._workspace = workspace
        self._key = key
        self._sms = multiprocessors(workspace.device)
        self._counters = self._zeros(1)

    def _zeros(self, rows: int) -> Tensor:
        """Counters of the CTAs that share a row's KV; each launch leaves them at zero.

        Source: flashinfer/utils.py (get_trtllm_gen_multi_ctas_kv_counter_bytes).
        """
        counters = max(rows * self._key.num_q_heads, self._sms)
        return torch.zeros(-(-counters // 8) * 8 * 4, dtype=torch.uint8, device=self.device)

    def reserve(self, rows: int) -> None:
        """Make room for the counters of a batch; before a graph is captured."""
        if len(self._counters) < 4 * rows * self._key.num_q_heads:
            self._counters = self._zeros(rows)

    def run(self, launch: Launch, query: Tensor, layer: LayerKV, out: Tensor, sinks: Any) -> None:
        """query [b's tokens, Hq, D], out: the same, contiguous; sinks [Hq] float32 or None."""
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache

        key = self._key
        common: dict[str, Any] = {
            "query": query,
            "kv_cache": (layer.keys, layer.values),
            "workspace_buffer": self._workspace,
            "block_tables": launch.tables,
            "seq_lens": launch.seq_lens,
            "bmm1_scale": key.scale,
            "bmm2_scale": 1.0,
            "window_left": -1 if key.window is None else key.window - 1,
            "out": out,
            "sinks": sinks,
            "kv_layout": layer.layout,
            "multi_ctas_kv_counter_buffer": self._counters,
            "backend": "trtllm-gen",
        }
        if launch.key_start is not None:
            trtllm_batch_context_with_kv_cache(
                **common,
                max_q_len=launch.most_queries,
                max_kv_len=launch.most_keys,
                batch_size=len(launch.seq_lens),
                cum_seq_lens_q=launch.query_start,
                cum_seq_lens_kv=launch.key_start,
            )
        elif launch.query_start is not None:
            several = {"q_len_per_req": None, "max_q_len": launch.most_queries, "cum_seq_lens_q": launch.query_start}
            trtllm_batch_decode_with_kv_cache(**common, max_seq_len=launch.most_keys, **several)
        else:
            trtllm_batch_decode_with_kv_cache(**common, max_seq_len=launch.most_keys, q_len_per_req=launch.most_queries)


class TrtllmBuilder:
    """Plans any batch: the leading rows with short queries run on the decode kernels, all rows from the first long one
    on run on the prompt kernels. The host computes only maxima."""

    def __init__(self, kernel: TrtllmKernel) -> None:
        self._kernel = kernel

    def build(self, metadata: CommonAttentionMetadata) -> TrtllmPlan:
        """Plan one batch. Never waits for the device."""
        host = metadata.host
        self._kernel.reserve(host.num_reqs)
        tables = metadata.block_table
        lens = metadata.seq_lens
        if tables is None:
            tables, lens = tables_of(metadata), keys_of(metadata)
        cut = first_long_row(host)
        parts = [(first, last) for first, last in ((0, cut), (cut, host.num_reqs)) if first < last]
        return TrtllmPlan(self._kernel, tuple(self._launch(metadata, tables, lens, *part, cut) for part in parts))

    @staticmethod
    def _launch(
        metadata: CommonAttentionMetadata, tables: Tensor, lens: Tensor, first: int, last: int, cut: int
    ) -> Launch:
        host = metadata.host
        rows = slice(first, last)
        start = int(host.query_start_loc[first])
        stop = int(host.query_start_loc[last])
        query_start = metadata.query_start_loc[first : last + 1]
        seq_lens = lens[rows]
        key_start = None
        if first == cut:
            query_start = query_start - start
            key_start = torch.zeros(last - first + 1, dtype=torch.int32, device=seq_lens.device)
            torch.cumsum(seq_lens, 0, dtype=torch.int32, out=key_start[1:])
        most = int(host.query_lens[rows].max()), int(host.seq_lens[rows].max())
        return Launch(start, stop, tables[rows], seq_lens, *most, query_start, key_start)


class FixedTrtllmBuilder:
    """Batches of exactly `rows` rows with `query_len` tokens: one launch; block tables are sent when they change."""

    def __init__(self, kernel: TrtllmKernel, rows: int, query_len: int) -> None:
        self._kernel = kernel
        self._rows = rows
        self._query_len = query_len
        kernel.reserve(rows)
        shape = (rows, kernel.group.num_pages)
        on_gpu = kernel.device.type == "cuda"
        with torch.inference_mode(False):  # made inside, it could not be written outside
            self._pinned = torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu)
            self._tables = torch.zeros(shape, dtype=torch.int32, device=kernel.device)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._sent = b""

    def build(self, metadata: CommonAttentionMetadata) -> TrtllmPlan:
        """Plan one batch."""
        if CHECKS.on:
            even = bool((metadata.host.query_lens == self._query_len).all()) and metadata.num_reqs == self._rows
            require(even, f"a batch of another shape than {self._rows} rows of {self._query_len} tokens")
        self.replan(metadata.host)
        most_keys = self._kernel.group.num_pages * self._kernel.group.page_size  # of every batch that is to come
        tokens = self._rows * self._query_len
        launch = Launch(0, tokens, self._tables, metadata.seq_lens, self._query_len, most_keys)
        return TrtllmPlan(self._kernel, (launch,))

    def replan(self, host: HostBatch) -> None:
        """Plan another batch of this shape whose device lengths have the addresses of the last `build`'s."""
        used = int(host.page_counts.max())
        table = host.block_table[:, :used]
        sent = table.tobytes()
        if sent == self._sent:
            return
        self._sent = b""  # an interrupt from here on leaves no table, not half of one
        if self._copied is not None:
            self._copied.synchronize()
        np.copyto(self._pinned.numpy()[:, :used], table)
        self._tables[:, :used].copy_(self._pinned[:, :used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._sent = sent


def tables_of(metadata: CommonAttentionMetadata) -> Tensor:
    """[B, W] int32 block tables on the device from the flat list of pages; 0 past a row's end."""
    width = int(metadata.host.page_counts.max(initial=1))
    starts = metadata.page_indptr
    pages = metadata.page_indices
    at = starts[:-1, None] + torch.arange(width, dtype=torch.int32, device=pages.device)
    own = at < starts[1:, None]
    return torch.where(own, pages[torch.where(own, at, 0)], 0)


def keys_of(metadata: CommonAttentionMetadata) -> Tensor:
    """[B] int32 keys on each row's list of pages, on the device; fewer than the row has in a windowed group."""
    starts = metadata.page_indptr
    return (starts[1:] - starts[:-1] - 1) * metadata.host.page_size + metadata.last_page_len
