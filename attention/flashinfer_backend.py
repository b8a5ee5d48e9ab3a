"""FlashInfer over the paged cache (0.7.2 tested; supported: >=0.7.2,<0.8). Latent attention: `flashinfer_mla`.

Everything a plan needs on the device already lies there: the metadata travelled with the round's own transfer, so a
plan is FlashInfer's C++ planner over the host arrays plus its own copy of the work list. Two rules keep that sound:

- The work list is copied from the wrapper's pinned buffer without an event. A wrapper is planned anew only after an
  event of ours shows that its last copy is done; until then another wrapper is taken.
- Wrappers share the float workspace (used only inside one launch) and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from attention.backend import PlanKey
from attention.batch import HostBatch
from attention.checking import checking, require
from attention.errors import UnsupportedAttentionError
from attention.flashinfer_mla import (
    FixedLatentBuilder,
    LatentBuilder,
    LatentKernel,
    LatentPlan,
    check_latent_supported,
    run_latent,
)
from attention.kv_cache import CacheGroup, LayerKV
from attention.metadata import CommonAttentionMetadata

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (1, 16, 32, 64)
DTYPES = (torch.float16, torch.bfloat16)
_FLOAT_WORKSPACE_BYTES = 256 << 20
_INT_WORKSPACE_BYTES = 2 << 20
_SHORT_QUERY = 16
"""Rows with at most this many query tokens are planned apart from prompt chunks: the kernel takes one tile size a plan,
from the mean query length."""


def check_supported(group: CacheGroup, key: PlanKey, dtype: torch.dtype) -> None:
    """Refuse what this backend does not offer, before anything is allocated.

    Raises:
        UnsupportedAttentionError: dtype, head dim, page size, head counts, sinks or latent attention.
    """
    if key.value_in_key:
        check_latent_supported(group, key, dtype)
        return
    where = f"group {group.name}: FlashInfer"
    elsewhere = "; use backend='torch'"
    if dtype not in DTYPES:
        names = " and ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise UnsupportedAttentionError(f"{where} has no {dtype} attention, only {names}{elsewhere}")
    if key.num_q_heads % key.num_kv_heads:
        raise UnsupportedAttentionError(
            f"{where} needs the {key.num_q_heads} query heads to be a multiple of the {key.num_kv_heads} KV heads"
        )
    if key.head_dim_k != key.head_dim_v or key.head_dim_k not in HEAD_DIMS:
        raise UnsupportedAttentionError(
            f"{where} takes head dims {HEAD_DIMS}, equal for keys and values; "
            f"given {key.head_dim_k} and {key.head_dim_v}{elsewhere}"
        )
    if group.page_size not in PAGE_SIZES:
        raise UnsupportedAttentionError(f"{where} takes page sizes {PAGE_SIZES}; given {group.page_size}")
    if key.has_sinks:
        raise UnsupportedAttentionError(f"{where} is not used with attention sinks{elsewhere}")


@dataclass(frozen=True)
class _Part:
    """Rows planned together: host arrays for the planner, device arrays for the kernel; token rows [start, stop)."""

    query_start_loc: np.ndarray
    page_indptr: np.ndarray
    seq_lens: np.ndarray
    device_query_start_loc: torch.Tensor
    device_page_indptr: torch.Tensor
    device_last_page_len: torch.Tensor
    device_page_indices: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True)
class FlashInferPlan:
    """A planned batch: which kernel attends which token rows."""

    parts: tuple[tuple[_Kernel, int, slice], ...]


class _Kernel:
    """One FlashInfer wrapper: holds one plan at a time.

    Built for any batch, or for `rows` rows of `query_len` tokens each (then a captured graph may hold its launches).
    """

    def __init__(
        self,
        workspace: torch.Tensor,
        group: CacheGroup,
        key: PlanKey,
        dtype: torch.dtype,
        fixed: tuple[int, int] | None = None,
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.generation = 0
        rows, query_len = fixed or (1, 1)
        ones = torch.arange(rows + 1, dtype=torch.int32)
        buffers = (ones * query_len, ones, torch.zeros(rows, dtype=torch.int32), torch.ones(rows, dtype=torch.int32))
        names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
        fixed_buffers = dict(zip(names, (b.to(workspace.device) for b in buffers), strict=True)) if fixed else {}
        self._wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(
            workspace, group.layout, use_cuda_graph=fixed is not None, backend="fa2", **fixed_buffers
        )
        work_list = torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=workspace.device)
        self._wrapper.reset_workspace_buffer(workspace, work_list)
        self._wrapper.plan(
            *buffers[:2],
            buffers[2].to(workspace.device),
            buffers[3],
            key.num_q_heads,
            key.num_kv_heads,
            key.head_dim_k,
            group.page_size,
            causal=True,
            sm_scale=key.scale,
            window_left=-1 if key.window is None else key.window - 1,
            logits_soft_cap=key.softcap,
            q_data_type=dtype,
            kv_data_type=dtype,
            uniform_q_len=query_len if fixed else None,
        )
        self._tokens = rows * query_len if fixed else None
        self._uniform = query_len if fixed else 0
        self._plan_tail = (
            key.num_q_heads,
            key.num_kv_heads,
            group.page_size,
            fixed is not None,
            key.head_dim_k,
            key.head_dim_v,
            True,
            -1 if key.window is None else key.window - 1,
            -1,
            False,
            0,
            self._uniform,
        )
        self._copied = torch.cuda.Event()
        self._copied.record()

    @property
    def ready(self) -> bool:
        """Whether the last plan's copy has left the pinned buffer. Asks, never waits."""
        return self._copied.query()

    def plan(self, part: _Part) -> None:
        """Plan a part: FlashInfer's planner over the host arrays, and the device arrays as they are.

        Source: the same short cut as sgl-project/sglang, python/sglang/srt/layers/attention/flashinfer_backend.py
        (fast_decode_plan): set the wrapper's index buffers and call the module's planner.
        """
        if not self.ready:
            self._copied.synchronize()
        wrapper = self._wrapper
        wrapper._qo_indptr_buf = part.device_query_start_loc
        wrapper._paged_kv_indptr_buf = part.device_page_indptr
        wrapper._paged_kv_last_page_len_buf = part.device_last_page_len
        wrapper._paged_kv_indices_buf = part.device_page_indices
        tokens = part.stop - part.start
        wrapper._qo_indptr_last = tokens
        before = wrapper._plan_info
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            torch.from_numpy(part.query_start_loc),
            torch.from_numpy(part.page_indptr),
            torch.from_numpy(part.seq_lens),
            tokens,
            len(part.seq_lens),
            *self._plan_tail,
        )
        if self._tokens is not None:
            require(list(before) == list(wrapper._plan_info), "a plan changed the launch that a graph has captured")
        self._copied.record()
        self.generation += 1

    def run(self, query: torch.Tensor, layer_kv: LayerKV, out: torch.Tensor) -> None:
        """query, out: [tokens of the part, Hq, D]."""
        self._wrapper.run(query, (layer_kv.keys, layer_kv.values), out=out)


class FlashInferBuilder:
    """Plans any batch: rows with short queries first, prompt chunks apart."""

    def __init__(self, workspace: torch.Tensor, group: CacheGroup, key: PlanKey, dtype: torch.dtype) -> None:
        """Builds FlashInfer's kernel for `key` when it is not built yet (tens of seconds)."""
        self._make = lambda: _Kernel(workspace, group, key, dtype)
        self._ring = [self._make(), self._make()]

    def build(self, metadata: CommonAttentionMetadata) -> FlashInferPlan:
        """Plan one batch from its host arrays. Never waits for the device."""
        planned = []
        for part in _split(metadata):
            kernel = self._next_kernel()
            kernel.plan(part)
            planned.append((kernel, kernel.generation, slice(part.start, part.stop)))
        return FlashInferPlan(tuple(planned))

    def _next_kernel(self) -> _Kernel:
        """The wrapper planned longest ago; a new one while its copy still waits in the stream."""
        if self._ring[0].ready:
            self._ring.append(self._ring.pop(0))
        else:
            self._ring.append(self._make())
        return self._ring[-1]


class FixedBuilder:
    """Plans batches of exactly `rows` rows with `query_len` tokens each, always into the same buffers.

    A captured graph that holds the launches of one plan attends whatever was planned last.
    """

    def __init__(
        self, workspace: torch.Tensor, group: CacheGroup, key: PlanKey, dtype: torch.dtype, rows: int, query_len: int
    ) -> None:
        self._kernel = _Kernel(workspace, group, key, dtype, (rows, query_len))
        self._part: _Part | None = None

    def build(self, metadata: CommonAttentionMetadata) -> FlashInferPlan:
        """Plan one batch from its host arrays."""
        self._part = part = _whole(metadata)
        self._kernel.plan(part)
        return FlashInferPlan(((self._kernel, self._kernel.generation, slice(part.start, part.stop)),))

    def replan(self, host: HostBatch) -> None:
        """Plan another batch of the shape; its device arrays lie where those of the last `build` did."""
        assert self._part is not None
        self._kernel.plan(
            replace(
                self._part,
                query_start_loc=host.query_start_loc,
                page_indptr=host.page_indptr,
                seq_lens=host.seq_lens,
            )
        )


def _whole(metadata: CommonAttentionMetadata) -> _Part:
    host = metadata.host
    return _Part(
        host.query_start_loc,
        host.page_indptr,
        host.seq_lens,
        metadata.query_start_loc,
        metadata.page_indptr,
        metadata.last_page_len,
        metadata.page_indices,
        0,
        host.num_tokens,
    )


def _split(metadata: CommonAttentionMetadata) -> tuple[_Part, ...]:
    """Decode first: the leading rows with short queries, then everything from the first long one on."""
    host = metadata.host
    is_long = host.query_lens > _SHORT_QUERY
    cut = int(is_long.argmax()) if is_long.any() else host.num_reqs
    if cut in (0, host.num_reqs):
        return (_whole(metadata),)
    token = int(host.query_start_loc[cut])
    first, rest = slice(0, cut), slice(cut, host.num_reqs)
    starts, rest_starts = slice(0, cut + 1), slice(cut, host.num_reqs + 1)
    short = _Part(
        host.query_start_loc[starts],
        host.page_indptr[starts],
        host.seq_lens[first],
        metadata.query_start_loc[starts],
        metadata.page_indptr[starts],
        metadata.last_page_len[first],
        metadata.page_indices,
        0,
        token,
    )
    long = _Part(
        host.query_start_loc[rest_starts] - token,
        host.page_indptr[rest_starts],
        host.seq_lens[rest],
        metadata.query_start_loc[rest_starts] - token,
        metadata.page_indptr[rest_starts],
        metadata.last_page_len[rest],
        metadata.page_indices,
        token,
        host.num_tokens,
    )
    return short, long


class FlashInferBackend:
    """FlashInfer's paged attention on tensor cores (fa2): GQA, sliding window, softcap, NHD and HND pages; and latent
    attention in absorbed form (fa3 on Hopper)."""

    name = "flashinfer"

    def __init__(self, device: torch.device) -> None:
        self._workspace = torch.empty(_FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def builder(self, group: CacheGroup, key: PlanKey, dtype: torch.dtype) -> FlashInferBuilder | LatentBuilder:
        """A builder for `key`; see `check_supported` for what it raises."""
        check_supported(group, key, dtype)
        if key.value_in_key:
            return LatentBuilder(LatentKernel(self._workspace, group, key, dtype))
        return FlashInferBuilder(self._workspace, group, key, dtype)

    def fixed_builder(
        self, group: CacheGroup, key: PlanKey, dtype: torch.dtype, rows: int, query_len: int
    ) -> FixedBuilder | FixedLatentBuilder:
        """A builder for CUDA graphs; see `attention.backend.GraphBackend`."""
        check_supported(group, key, dtype)
        if key.value_in_key:
            return FixedLatentBuilder(LatentKernel(self._workspace, group, key, dtype), rows, query_len)
        return FixedBuilder(self._workspace, group, key, dtype, rows, query_len)

    def run(
        self,
        plan: FlashInferPlan | LatentPlan,
        key: PlanKey,
        query: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_kv: LayerKV,
        metadata: CommonAttentionMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write K and V, then attend; see `AttentionBackend.run`."""
        from attention.triton_write import write_kv

        if isinstance(plan, LatentPlan):
            return run_latent(plan, query, key_states, layer_kv, metadata)
        if checking():
            metadata.staged.ensure_fresh()
            for kernel, generation, _ in plan.parts:
                require(kernel.generation == generation, "a wrapper was planned anew before this plan ran")
        write_kv(layer_kv, key_states, value_states, metadata.slot_mapping)
        out = query.new_empty(query.shape[0], key.num_q_heads, key.head_dim_v)
        for kernel, _, tokens in plan.parts:
            kernel.run(query[tokens], layer_kv, out[tokens])
        return out
