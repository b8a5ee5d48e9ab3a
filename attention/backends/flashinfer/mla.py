"""Attention over MLA's latents by the kernels of FlashInfer's BatchMLAPagedAttentionWrapper (0.7.2 tested).

The kernel is fa3 on Hopper and fa2 on other GPUs from Ampere on. Its plan is made by `mla_plan` on the host: a few KB
from a pinned buffer that specdec owns. The wrapper's own `plan` stages 590 KB for any batch, clones its device buffers,
and reads lengths back when they are on the device. As in `backend`, a pinned buffer is rewritten only after an event
shows that its last copy is done, and plans share nothing but the float workspace.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.backends.building import Build, Builds, in_background
from attention.backends.flashinfer.mla_plan import LATENT_DIM, PlanLayout, SplitKV, Tiles, write_all, write_lengths
from attention.backends.limits import HALF, dtype_name
from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import CacheGroup, LayerKV
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec

ROPE_DIM = 64
QUERY_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
PAGE_SIZES = (1, 16, 32, 64)
_LIST_BYTES = 256 << 10
_CAUSAL = 1
"""FlashInfer's MaskMode.CAUSAL."""


def check_mla_supported(group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> None:
    """Refuse layers that these kernels do not support, before anything is allocated.

    Raises:
        UnsupportedAttentionError: dtype, widths, page size, number of heads, window, softcap or sinks.
    """
    where = f"group {group.name}: FlashInfer's MLA"
    elsewhere = "; use backend='torch'"
    widths = (key.head_dim_v, key.head_dim_k - key.head_dim_v)
    if dtype not in HALF:
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
    if key.features:
        raise UnsupportedAttentionError(f"{where} has no window, softcap or sinks{elsewhere}")


class WorkList:
    """The work items of one plan: a pinned host buffer and its copy on the device."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # made inside, it could not be written outside
            self._pinned = torch.zeros(nbytes // 4, dtype=torch.int32, pin_memory=True)
            self.remote = torch.zeros(nbytes // 4, dtype=torch.int32, device=device)
        self.host = self._pinned.numpy()
        self.generation = 0
        self._copied = torch.cuda.Event()
        self._copied.record()

    @property
    def ready(self) -> bool:
        """Whether the last copy has left the pinned buffer. Does not wait."""
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
class MlaPlan:
    """A planned batch: its work list and the generation of the plan in it, the launch's arguments, and the pages."""

    kernel: MlaKernel
    work: WorkList
    generation: int
    info: tuple[int, ...]
    page_indices: Tensor


def building_latent(dtype: torch.dtype, device: torch.device) -> Build:
    """The build of the kernel for `dtype`, begun at the first call."""
    return in_background(("MLA", dtype, device), f"MLA, {dtype_name(dtype)}", partial(_module, dtype, device))


def _module(dtype: torch.dtype, device: torch.device) -> Any:
    """FlashInfer's module, built or from its cache of modules."""
    from flashinfer.mla._batch_mla._backends._fa_common import get_batch_mla_module
    from flashinfer.utils import is_sm90a_supported

    backend = "fa3" if is_sm90a_supported(device) else "fa2"
    adapted: Any = get_batch_mla_module(backend, dtype, dtype, dtype, torch.int32, LATENT_DIM, ROPE_DIM, False)
    return adapted._module


class MlaKernel:
    """FlashInfer's kernel for one (CacheGroup, AttentionSpec, dtype)."""

    def __init__(self, workspace: Tensor, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> None:
        """Begins to build the kernel when it is not built yet; its first launch waits for it."""
        self.device = workspace.device
        self.building = building_latent(dtype, self.device)
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.num_heads = key.num_q_heads
        self._dtype = dtype
        self._module: Any = None
        self._workspace = workspace
        # Positional arguments of the module's run(): mask mode, heads, page size, softmax scale, return_lse_base_on_e,
        # scales of the latent and of its rotary part (1.0: the cache has the model's dtype), and an unused last
        # argument.
        self._tail = (_CAUSAL, key.num_q_heads, group.page_size, key.scale, False, 1.0, 1.0, None)

    def run(self, plan: MlaPlan, query: Tensor, layer_kv: LayerKV, out: Tensor) -> None:
        """query [T, Hq, 576], out [T, Hq, 512]."""
        latent, rope = layer_kv.latent_and_rope
        if self._module is None:
            self.building.wait()
            self._module = _module(self._dtype, self.device)
        self._module.run(
            self._workspace, plan.work.remote, plan.info, query[..., :LATENT_DIM], query[..., LATENT_DIM:], latent,
            rope, plan.page_indices, out, None, *self._tail,
        )  # fmt: skip


class MlaBuilder:
    """Plans batches of any shape, each into one of several work lists in turn."""

    def __init__(self, kernel: MlaKernel) -> None:
        self._kernel = kernel
        self._ring: list[WorkList] = []

    @property
    def builds(self) -> Builds:
        return (self._kernel.building,)

    def build(self, metadata: CommonAttentionMetadata) -> MlaPlan:
        """Plan one batch from its host arrays. Never waits for the device."""
        kernel = self._kernel
        host = metadata.host
        tiles = Tiles.of(host.query_start_loc, kernel.num_heads, kernel.sms)
        keys = tiles.keys(host.seq_lens)
        split = SplitKV.of(tiles, keys)
        layout = PlanLayout.of(tiles, len(split.tile), kernel.sms)
        # The list planned longest ago; a new one while its copy still waits in the stream, or where it is small.
        work = self._ring.pop(0) if len(self._ring) >= 2 and self._ring[0].ready else None
        if work is None or work.host.nbytes < layout.nbytes:
            work = WorkList(max(_LIST_BYTES, 2 * layout.nbytes), self._kernel.device)
        self._ring.append(work)
        write_all(layout.arrays(work.host), tiles, split, keys, host)
        work.send(layout.nbytes)
        return MlaPlan(kernel, work, work.generation, layout.info, metadata.page_indices)


class FixedMlaBuilder:
    """Plans batches of exactly `rows` rows with `query_len` tokens each, always into the same buffer."""

    def __init__(self, kernel: MlaKernel, rows: int, query_len: int, geometry: tuple[object, ...]) -> None:
        """geometry: everything that a plan depends on, except the lengths."""
        self.geometry = geometry
        self._kernel = kernel
        self._tiles = Tiles.of(np.arange(rows + 1) * query_len, kernel.num_heads, kernel.sms)
        self._layout = PlanLayout.of(self._tiles, self._tiles.most_items, kernel.sms)
        self._work = WorkList(self._layout.nbytes, kernel.device)
        self._arrays = self._layout.arrays(self._work.host)
        self._split: SplitKV | None = None
        self._planned = b""  # seq_lens [rows] as bytes: see `attention.backends.flashinfer.wrapper.Kernel`

    def sharing(self) -> FixedMlaBuilder:
        """Itself: a plan has offsets into the list of pages, not the pages, so other groups' builders may share it."""
        return self

    def build(self, metadata: CommonAttentionMetadata) -> MlaPlan:
        """Plan one batch from its host arrays."""
        self.replan(metadata.host)
        return MlaPlan(self._kernel, self._work, self._work.generation, self._layout.info, metadata.page_indices)

    def replan(self, host: HostBatch) -> None:
        """Plan rows of other lengths; the same lengths reuse the plan. Device arrays keep their addresses."""
        if host.seq_lens.tobytes() == self._planned:
            return
        keys = self._tiles.keys(host.seq_lens)
        self._planned = b""  # an interrupt from here on leaves no plan, not half of one
        self._work.wait()
        if self._split is not None and self._split.serves(self._tiles, keys):
            write_lengths(self._arrays, self._split, keys, host)
        else:
            self._split, split = None, SplitKV.of(self._tiles, keys)
            write_all(self._arrays, self._tiles, split, keys, host)
            self._split = split
        self._work.send(self._layout.nbytes)
        self._planned = host.seq_lens.tobytes()
