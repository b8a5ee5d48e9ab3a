"""Latent attention through FlashInfer's MLA kernels (those of BatchMLAPagedAttentionWrapper; 0.7.2 tested).

The kernel is fa3 on Hopper and fa2 on other GPUs from Ampere on. It walks a work list that FlashInfer's planner makes
on the host. The wrapper's own `plan` stages that list at its full capacity (about 590 KB a plan, whatever the batch),
clones its device buffers and reads lengths back where they are given on the device. Here the same planner runs over the
host arrays, and only the items that exist are moved together and sent: a few KB from a pinned buffer of ours. As in
`flashinfer_backend`, a work list is filled anew only after an event shows that its last copy is done, and the float
workspace, used inside one launch only, is all that plans share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from attention.backend import PlanKey
from attention.batch import HostBatch
from attention.checking import checking, require
from attention.errors import UnsupportedAttentionError
from attention.kv_cache import CacheGroup, LayerKV
from attention.metadata import CommonAttentionMetadata

LATENT_DIM, ROPE_DIM = 512, 64
QUERY_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
DTYPES = (torch.float16, torch.bfloat16)
PAGE_SIZES = (1, 16, 32, 64)
MOST_ITEMS = 16384
"""Capacity of the planner's arrays; it does not check it itself."""
_TILE = 64
_SCRATCH_BYTES = 1 << 20

_PER_ITEM = (2, 3, 4, 10, 11, 12, 13, 14)
_PER_SM = (5, 6, 7, 8, 9)
_ITEM_STARTS = 15
_ARRAYS = range(2, 16)
"""Places in the planner's answer: 0 and 1 are the grid, 2 … 15 are byte offsets of int32 arrays in the work list (one
entry a work item, one an SM, or one a cluster and one more), 16 and 17 offsets in the float workspace.
Source: flashinfer-ai/flashinfer, include/flashinfer/attention/scheduler.cuh (MLAPlanInfo, MLAPlan)."""


def check_latent_supported(group: CacheGroup, key: PlanKey, dtype: torch.dtype) -> None:
    """Refuse what these kernels do not offer, before anything is allocated.

    Raises:
        UnsupportedAttentionError: dtype, widths, page size, number of heads, window, softcap or sinks.
    """
    where, elsewhere = f"group {group.name}: FlashInfer's latent attention", "; use backend='torch'"
    widths = (key.head_dim_v, key.head_dim_k - key.head_dim_v)
    if dtype not in DTYPES:
        raise UnsupportedAttentionError(f"{where} has no {dtype}, only float16 and bfloat16{elsewhere}")
    if widths != (LATENT_DIM, ROPE_DIM) or key.num_kv_heads != 1:
        raise UnsupportedAttentionError(
            f"{where} takes latents of width {LATENT_DIM} (kv_lora_rank) and {ROPE_DIM} (qk_rope_head_dim); "
            f"given {widths[0]} and {widths[1]}{elsewhere}"
        )
    if key.num_q_heads not in QUERY_HEADS:
        raise UnsupportedAttentionError(
            f"{where} takes {', '.join(map(str, QUERY_HEADS))} query heads (others would miss keys at the edge of a "
            f"tile); given {key.num_q_heads}{elsewhere}"
        )
    if group.page_size not in PAGE_SIZES:
        raise UnsupportedAttentionError(f"{where} takes page sizes {PAGE_SIZES}; given {group.page_size}")
    if key.window is not None or key.softcap is not None or key.has_sinks:
        raise UnsupportedAttentionError(f"{where} has no window, softcap or sinks{elsewhere}")


def work_items(query_lens: Sequence[int] | np.ndarray, num_heads: int, sms: int) -> int:
    """The most work items that the planner makes of rows with these query lengths.

    A tile of 64 (token, head) pairs, 128 when rows have more than 64 on average, is one item, and splitting by keys
    adds at most one item a cluster.

    >>> work_items([4] * 32, 16, 132), work_items([300, 1], 16, 132)
    (164, 105)
    """
    packed = np.asarray(query_lens, np.int64) * num_heads
    cluster = 2 if int(packed.sum()) // len(packed) > _TILE else 1
    return int((-(-packed // (_TILE * cluster))).sum()) + sms // cluster


@lru_cache(maxsize=256)
def item_offsets(items: int, sms: int, clusters: int) -> tuple[tuple[int, ...], int]:
    """Byte offsets of the fourteen arrays for so many items, in the order of the planner's answer, and their size."""
    sizes = [-(-_entries(place, items, sms, clusters) * 4 // 16) * 16 for place in _ARRAYS]
    stops = np.cumsum(sizes).tolist()
    return (0, *stops[:-1]), stops[-1]


def _entries(place: int, items: int, sms: int, clusters: int) -> int:
    return items if place in _PER_ITEM else sms if place in _PER_SM else clusters + 1


@dataclass(frozen=True)
class Layout:
    """How plans of one grid are moved together.

    Attributes:
        answer: the planner's answer as it came; info: the same with the new offsets.
        items: room for work items; nbytes: of all arrays together.
        moves: (to, from) views of every array; used: the planner's count of work items, a view of one entry.
    """

    answer: tuple[int, ...]
    info: tuple[int, ...]
    items: int
    nbytes: int
    moves: tuple[tuple[np.ndarray, np.ndarray], ...]
    used: np.ndarray

    def move(self) -> None:
        """Copy the planner's arrays to their new places; entries past the last item are whatever stood there.

        Raises:
            InvariantError: there are more items than room.
        """
        used = int(self.used[0])
        require(used <= self.items, f"a plan has {used} work items, its work list room for {self.items}")
        for to, source in self.moves:
            np.copyto(to, source)


def lay_out(scratch: np.ndarray, answer: Sequence[int], out: np.ndarray, items: int, sms: int) -> Layout:
    """The layout of `out` for plans that the planner answers with `answer`.

    Args:
        scratch: the planner's buffer, int32; answer: [18] ints; out: int32, at least as large as `item_offsets` says.
        items: room for work items.
    """
    clusters = answer[1]
    offsets, nbytes = item_offsets(items, sms, clusters)
    moves = []
    for place, offset in zip(_ARRAYS, offsets, strict=True):
        count, start = _entries(place, items, sms, clusters), answer[place] // 4
        moves.append((out[offset // 4 :][:count], scratch[start:][:count]))
    used = scratch[answer[_ITEM_STARTS] // 4 + clusters :][:1]
    return Layout(tuple(answer), (*answer[:2], *offsets, *answer[16:]), items, nbytes, tuple(moves), used)


class WorkList:
    """One plan's work items: a pinned buffer and its copy on the device."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._pinned = torch.zeros(nbytes // 4, dtype=torch.int32, pin_memory=True)
        self.host = self._pinned.numpy()
        self.remote = torch.zeros(nbytes // 4, dtype=torch.int32, device=device)
        self.generation = 0
        self._copied = torch.cuda.Event()
        self._copied.record()

    @property
    def ready(self) -> bool:
        """Whether the last copy has left the pinned buffer. Asks, never waits."""
        return self._copied.query()

    def wait(self) -> None:
        """Make sure of `ready`; in a running round it is."""
        if not self.ready:
            self._copied.synchronize()

    def send(self, nbytes: int) -> None:
        """Copy the first bytes to the device."""
        self.remote[: nbytes // 4].copy_(self._pinned[: nbytes // 4], non_blocking=True)
        self._copied.record()
        self.generation += 1


@dataclass(frozen=True)
class LatentPlan:
    """A planned batch: whose work list, the how-manieth plan in it, what a launch is told, and the pages."""

    kernel: LatentKernel
    work: WorkList
    generation: int
    info: tuple[int, ...]
    page_indices: torch.Tensor


class LatentKernel:
    """FlashInfer's planner and kernel for one (CacheGroup, PlanKey, dtype)."""

    def __init__(self, workspace: torch.Tensor, group: CacheGroup, key: PlanKey, dtype: torch.dtype) -> None:
        """Builds the kernel when it is not built yet (tens of seconds)."""
        from flashinfer.mla._batch_mla._backends._fa_common import get_batch_mla_module
        from flashinfer.utils import MaskMode, is_sm90a_supported

        self.device = workspace.device
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.num_heads = key.num_q_heads
        backend = "fa3" if is_sm90a_supported(self.device) else "fa2"
        adapted: Any = get_batch_mla_module(backend, dtype, dtype, dtype, torch.int32, LATENT_DIM, ROPE_DIM, False)
        self._module = adapted._module
        self._workspace = workspace
        self._scratch = torch.zeros(_SCRATCH_BYTES, dtype=torch.uint8)
        self._scratch_entries = self._scratch.numpy().view(np.int32)
        self._tail = (MaskMode.CAUSAL.value, key.num_q_heads, group.page_size, key.scale, False, 1.0, 1.0, None)

    def work_list(self, items: int) -> WorkList:
        """Room for plans of so many items."""
        return WorkList(item_offsets(items, self.sms, self.sms)[1], self.device)

    def schedule(self, host: HostBatch) -> Sequence[int]:
        """Run FlashInfer's planner over the host arrays; what it answers. Its arrays stay in the scratch buffer."""
        arrays = (torch.from_numpy(a) for a in (host.query_start_loc, host.page_indptr, host.seq_lens))
        answer, _ = self._module.plan(
            self._workspace, self._scratch, self._scratch, *arrays, self.num_heads, LATENT_DIM, True
        )
        return answer

    def lay_out(self, answer: Sequence[int], work: WorkList, items: int) -> Layout:
        """The layout of a work list for plans with this answer."""
        return lay_out(self._scratch_entries, [int(n) for n in answer], work.host, items, self.sms)

    def run(self, plan: LatentPlan, query: torch.Tensor, layer_kv: LayerKV, out: torch.Tensor) -> None:
        """query [T, Hq, 576], out [T, Hq, 512]."""
        pages = layer_kv.keys.squeeze(2 if layer_kv.layout == "NHD" else 1)  # [num_pages, page_size, 576]
        self._module.run(
            self._workspace,
            plan.work.remote,
            plan.info,
            query[..., :LATENT_DIM],
            query[..., LATENT_DIM:],
            pages[..., :LATENT_DIM],
            pages[..., LATENT_DIM:],
            plan.page_indices,
            out,
            None,
            *self._tail,
        )


class LatentBuilder:
    """Plans any batch, into one of several work lists in turn."""

    def __init__(self, kernel: LatentKernel) -> None:
        self._kernel = kernel
        self._ring = [kernel.work_list(MOST_ITEMS) for _ in range(2)]

    def build(self, metadata: CommonAttentionMetadata) -> LatentPlan:
        """Plan one batch from its host arrays. Never waits for the device.

        Raises:
            UnsupportedAttentionError: the batch has more tokens than the planner has work items.
        """
        kernel, host = self._kernel, metadata.host
        items = work_items(host.query_lens, kernel.num_heads, kernel.sms)
        if items > MOST_ITEMS:
            raise UnsupportedAttentionError(
                f"{host.num_tokens} tokens of {kernel.num_heads} heads make {items} work items, FlashInfer's planner "
                f"has {MOST_ITEMS}; lower max_num_batched_tokens"
            )
        work = self._next_list()
        layout = kernel.lay_out(kernel.schedule(host), work, items)
        layout.move()
        work.send(layout.nbytes)
        return LatentPlan(kernel, work, work.generation, layout.info, metadata.page_indices)

    def _next_list(self) -> WorkList:
        """The list planned longest ago; a new one while its copy still waits in the stream."""
        if self._ring[0].ready:
            self._ring.append(self._ring.pop(0))
        else:
            self._ring.append(self._kernel.work_list(MOST_ITEMS))
        return self._ring[-1]


class FixedLatentBuilder:
    """Plans batches of exactly `rows` rows with `query_len` tokens each, always into the same work list.

    Two builders may share one: plans say where in the list of pages a row begins, not which pages they are.
    """

    def __init__(self, plans: FixedLatentPlans, geometry: tuple[object, ...]) -> None:
        """geometry: all that a plan depends on beside the lengths."""
        self._plans = plans
        self.geometry = geometry

    def sharing(self) -> FixedLatentBuilder:
        """Another builder over the same work list."""
        return FixedLatentBuilder(self._plans, self.geometry)

    def build(self, metadata: CommonAttentionMetadata) -> LatentPlan:
        """Plan one batch from its host arrays."""
        return self._plans.plan(metadata.host, metadata.page_indices)

    def replan(self, host: HostBatch) -> None:
        """Plan another batch of the shape; its device arrays lie where those of the last `build` did."""
        self._plans.replan(host)


class FixedLatentPlans:
    """The plans of one shape, one at a time. The grid depends on the shape alone, so one layout serves all."""

    def __init__(self, kernel: LatentKernel, rows: int, query_len: int) -> None:
        self._kernel = kernel
        self._items = work_items([query_len] * rows, kernel.num_heads, kernel.sms)
        self._work = kernel.work_list(self._items)
        self._layout: Layout | None = None
        self._planned = np.zeros(rows, np.int32)

    def plan(self, host: HostBatch, page_indices: torch.Tensor) -> LatentPlan:
        """Plan one batch over these pages."""
        if self._layout is None:
            self._layout = self._kernel.lay_out(self._kernel.schedule(host), self._work, self._items)
        self.replan(host)
        return LatentPlan(self._kernel, self._work, self._work.generation, self._layout.info, page_indices)

    def replan(self, host: HostBatch) -> None:
        """Plan rows of other lengths; for the same lengths the plan is kept."""
        assert self._layout is not None
        if (host.seq_lens == self._planned).all():
            return
        answer = self._kernel.schedule(host)
        if checking():
            same = tuple(int(n) for n in answer) == self._layout.answer
            require(same, "a plan changed the launch that a graph has captured")
        self._work.wait()
        self._layout.move()
        self._work.send(self._layout.nbytes)
        self._planned = host.seq_lens.copy()


def run_latent(
    plan: LatentPlan,
    query: torch.Tensor,
    key_states: torch.Tensor,
    layer_kv: LayerKV,
    metadata: CommonAttentionMetadata,
) -> torch.Tensor:
    """Write the latents, then attend: query [T, Hq, 576], key_states [T, 1, 576] -> [T, Hq, 512]."""
    from attention.triton_latent import write_latent

    if checking():
        metadata.staged.ensure_fresh()
        require(plan.work.generation == plan.generation, "a work list was planned anew before this plan ran")
    write_latent(layer_kv, key_states, metadata.slot_mapping)
    out = query.new_empty(query.shape[0], query.shape[1], LATENT_DIM)
    plan.kernel.run(plan, query, layer_kv, out)
    return out
