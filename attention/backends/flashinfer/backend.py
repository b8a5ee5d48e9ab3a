"""The FlashInfer backend (0.7.2 tested; supported: >=0.7.2,<0.8): builders, plans, and which kernel serves what.

Everything that a plan needs on the device came with the round's own transfer. So planning is FlashInfer's C++ planner
over the host arrays plus its own copy of the plan. Two rules keep that sound:

- FlashInfer copies the plan from the wrapper's pinned buffer without an event. A wrapper is planned again only after a
  CUDA event that specdec records shows that its last copy is done; until then another wrapper is used.
- Wrappers share only the float workspace, which is used only inside one launch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attention.backends.building import Builds
from attention.backends.flashinfer.mla import (
    PAGE_SIZES,
    FixedMlaBuilder,
    MlaBuilder,
    MlaKernel,
    MlaPlan,
    building_latent,
    check_mla_supported,
)
from attention.backends.flashinfer.short_queries import (
    PackedKernel,
    PackedKernels,
    check_both_ways,
    is_packed,
    split_batch,
    whole_batch,
)
from attention.backends.flashinfer.trtllm import (
    WORKSPACE_BYTES,
    FixedTrtllmBuilder,
    TrtllmBuilder,
    TrtllmKernel,
    TrtllmPlan,
    is_blackwell,
    serves,
    serves_key,
)
from attention.backends.flashinfer.wrapper import (
    LEAST_BYTES,
    Kernel,
    Part,
    PlanShape,
    Route,
    building,
    kernel_name,
    split_bytes,
    splits_kv,
)
from attention.backends.invariant import InvariantBuilder, InvariantPlan, own_kernel, run_invariant
from attention.backends.limits import HALF, HEAD_DIMS, check_heads, dtype_name, has_flashinfer_heads
from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import CacheGroup, KVLayout, LayerKV
from attention.checking import CHECKS, require
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec

FA3_QUERY = 128
"""Prompt chunks of at least this many tokens per row on average take fa3.

On an H200 it needs 93 % of fa2's time at 128 tokens, 31 % at 256, 22 % at 512, 57 % at 2,048 and 64 % at 8,192
(bench_attention); 16 rows of 128 tokens take as long, and its plan costs the host 16-420 µs more, once per batch. With
few query tokens it is up to 4 times slower than fa2.
"""
_HOPPER = (9, 0)

log = logging.getLogger("specdec")


@dataclass(frozen=True)
class FlashInferPlan:
    """A planned batch: kernels, the generation of the plan in each, and the first token row that it attends."""

    parts: tuple[tuple[Kernel | PackedKernel, int, int], ...]


class _Ring:
    """FlashInfer wrappers of one kernel; each is planned again only after the copy of its last plan is done."""

    def __init__(
        self, workspace: Tensor, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype, route: Route
    ) -> None:
        self.build = building(group.format.dtype_for(dtype), key, dtype, route)
        self._make = lambda: Kernel(workspace, group, key, dtype, route)
        self._kernels: list[Kernel] = []

    def next(self) -> Kernel:
        """The wrapper planned longest ago; a new one while its copy still waits in the stream."""
        if not self._kernels:
            self._kernels = [self._make(), self._make()]
        if self._kernels[0].ready:
            self._kernels.append(self._kernels.pop(0))
        else:
            self._kernels.append(self._make())
        return self._kernels[-1]


class FlashInferBuilder:
    """Plans any batch: rows with short queries first, prompt chunks separately, long chunks on fa3 if available.

    Short rows of equal length, as in a verification, use the packed kernel wherever CUDA graphs use it, so that a row
    is computed the same way in rounds of any shape.
    """

    def __init__(
        self,
        workspace: Tensor,
        group: CacheGroup,
        key: AttentionSpec,
        dtype: torch.dtype,
        packed: Callable[[int, int, HostBatch], PackedKernel],
    ) -> None:
        """Begins to build FlashInfer's kernels for `key`, all at once; the first batch that needs one waits for it.

        packed: (n, query_len, batch) -> a packed kernel for its first n rows, of query_len tokens each.
        """
        self._packs = partial(is_packed, group, key, dtype)
        self._packed = packed
        self._rings: dict[Route, _Ring] = {
            route: _Ring(workspace, group, key, dtype, route)
            for route in routes(key, dtype, group.format.dtype_for(dtype), workspace.device)
        }

    @property
    def builds(self) -> Builds:
        return tuple(ring.build for ring in self._rings.values())

    def build(self, metadata: CommonAttentionMetadata) -> FlashInferPlan:
        """Plan one batch from its host arrays. Never waits for the device."""
        planned = []
        for part in split_batch(metadata):
            kernel = self._kernel(part, metadata.host)
            kernel.plan(part)
            planned.append((kernel, kernel.generation, part.start))
        return FlashInferPlan(tuple(planned))

    def _kernel(self, part: Part, host: HostBatch) -> Kernel | PackedKernel:
        query_len = part.query_len
        if query_len is not None and self._packs(query_len):
            return self._packed(len(part.seq_lens), query_len, host)
        is_long = part.stop - part.start >= FA3_QUERY * len(part.seq_lens)
        return self._rings["fa3" if is_long and "fa3" in self._rings else "fa2"].next()


class BothWaysBuilder:
    """Plans batches of rows of one length, for layers that are not causal."""

    def __init__(self, packed: Callable[[int], PackedKernel]) -> None:
        """packed: query_len -> a packed kernel."""
        self._packed = packed
        self._kernels = dict[int, PackedKernel]()

    def build(self, metadata: CommonAttentionMetadata) -> FlashInferPlan:
        """Plan one batch.

        Raises:
            UnsupportedAttentionError: rows of several lengths, or of too many tokens.
        """
        part = whole_batch(metadata)
        if part.query_len is None:
            raise UnsupportedAttentionError("attention that is not causal has rows of one length on CUDA")
        if part.query_len not in self._kernels:
            self._kernels[part.query_len] = self._packed(part.query_len)
        kernel = self._kernels[part.query_len]
        kernel.plan(part)
        return FlashInferPlan(((kernel, kernel.generation, part.start),))


def start_building(key: AttentionSpec, dtype: torch.dtype, cache: torch.dtype, device: torch.device) -> Builds:
    """Begin to build the kernels that a group with this key will need; for callers that know the key in advance.

    The fa3 kernel comes first because nvcc takes twice as long for it.
    """
    if dtype not in HALF or not key.causal or (not key.value_in_key and not has_flashinfer_heads(key)):
        return ()
    if serves_key(key, dtype, cache, device):
        return ()
    if key.value_in_key:
        return (building_latent(dtype, device),)
    return tuple(building(cache, key, dtype, route) for route in reversed(routes(key, dtype, cache, device)))


def routes(key: AttentionSpec, dtype: torch.dtype, cache: torch.dtype, device: torch.device) -> tuple[Route, ...]:
    """The kernels that serve `key`: fa2 always, and fa3 where it was measured to win.

    That is Hopper, bfloat16 queries and cache, head dim 128, full attention without softcap or sinks: see FA3_QUERY.
    """
    measured = dtype == cache == torch.bfloat16 and key.head_dim_k == 128
    wins = measured and not key.features and torch.cuda.get_device_capability(device) == _HOPPER
    return ("fa2", "fa3") if wins else ("fa2",)


def check_supported(group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> None:
    """Refuse layers that this backend does not support, before anything is allocated.

    Raises:
        UnsupportedAttentionError: dtype, heads, or MLA; for heads that FlashInfer has a kernel for, page size and sinks
            with softcap as well.
    """
    if key.value_in_key and key.causal:
        check_mla_supported(group, key, dtype)
        return
    where = f"group {group.name}: FlashInfer"
    elsewhere = "; use backend='torch'"
    if dtype not in HALF:
        names = " and ".join(map(dtype_name, HALF))
        raise UnsupportedAttentionError(f"{where} has no {dtype} attention, only {names}{elsewhere}")
    check_heads(key, where, elsewhere)
    if not key.causal:
        check_both_ways(group, key, dtype)
        return
    if not has_flashinfer_heads(key):
        return  # specdec's kernel, which has no further limits
    if group.page_size not in PAGE_SIZES:
        raise UnsupportedAttentionError(f"{where} takes page sizes {PAGE_SIZES}; given {group.page_size}")
    if key.has_sinks and key.softcap is not None:
        raise UnsupportedAttentionError(f"{where} has no attention sinks together with a softcap{elsewhere}")


class FixedBuilder:
    """Plans batches of one fixed shape, always into the same buffers.

    A captured graph with the launches of one plan runs the plan that was made last. Two builders may share a kernel:
    its launches read pages and lengths at the addresses of the capture, and the plan only distributes the work.
    """

    def __init__(self, kernel: Kernel | PackedKernel, geometry: tuple[object, ...]) -> None:
        """geometry: all that a plan depends on except the page counts, and the rows' tokens where those vary."""
        self._kernel = kernel
        self.geometry = geometry
        self._part: Part | None = None

    def sharing(self) -> FixedBuilder:
        """Another builder over the same kernel."""
        return FixedBuilder(self._kernel, self.geometry)

    def build(self, metadata: CommonAttentionMetadata) -> FlashInferPlan:
        """Plan one batch from its host arrays."""
        self._part = part = whole_batch(metadata)
        self._kernel.plan(part)
        self._kernel.share(metadata.host)
        return FlashInferPlan(((self._kernel, self._kernel.generation, part.start),))

    def replan(self, host: HostBatch) -> None:
        """Plan another batch of this shape whose device arrays have the addresses of the last `build`'s."""
        assert self._part is not None
        if not self._kernel.keeps(host):
            self._kernel.plan(self._part.at(host))
        self._kernel.share(host)


class FlashInferBackend:
    """`AttentionBackend` of FlashInfer's kernels: GQA, sliding window, softcap, sinks, 8-bit caches, absorbed MLA.

    It is a `GraphBackend` and a `CascadeBackend`. Heads of widths that FlashInfer lacks take specdec's kernel, which
    does not split the KV of a row: padding heads to FlashInfer's next width would read up to 1.6 times the bytes.
    Layers that are not causal take specdec's packed kernel.
    """

    name = "flashinfer"
    batch_invariant = False
    both_ways = True
    """See `attention.backends.base.AttendsBothWays`."""

    def __init__(self, device: torch.device) -> None:
        self._workspace = torch.empty(LEAST_BYTES, dtype=torch.uint8, device=device)
        self._packed = PackedKernels(device)
        self._zeroed: Tensor | None = None

    def cascade(self) -> None:
        self._packed = PackedKernels(self._workspace.device, cascades=True)

    @property
    def preferred_layout(self) -> KVLayout:
        """The order inside a page that its kernels read best on this device."""
        return "HND" if is_blackwell(self._workspace.device) else "NHD"

    def builder(
        self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype
    ) -> FlashInferBuilder | MlaBuilder | InvariantBuilder | TrtllmBuilder | BothWaysBuilder:
        """A builder for `key`; see `check_supported` for what it raises."""
        check_supported(group, key, dtype)
        if not key.causal:
            return BothWaysBuilder(partial(self._packed.both_ways, key))
        if serves(group, key, dtype, self._workspace.device):
            return TrtllmBuilder(self._trtllm(group, key))
        if key.value_in_key:
            return MlaBuilder(MlaKernel(self._workspace, group, key, dtype))
        if not has_flashinfer_heads(key):
            return InvariantBuilder()
        packed = partial(self._packed.kernel, key, dtype)
        return FlashInferBuilder(self._workspace_for(key), group, key, dtype, packed)

    def route(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> str:
        served = has_flashinfer_heads(key) and not serves(group, key, dtype, self._workspace.device)
        return self._kernels(group, key, dtype) + self._packed.sharing_in_words(group, key, dtype, served)

    def _kernels(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> str:
        if not key.causal:
            return f"specdec's packed kernel, {dtype_name(dtype)}, not causal"
        if key.value_in_key:
            return f"FlashInfer MLA, {dtype_name(dtype)}"
        if not has_flashinfer_heads(key):
            return f"{own_kernel(group, key, dtype)} (FlashInfer has head dims {', '.join(map(str, HEAD_DIMS))})"
        if serves(group, key, dtype, self._workspace.device):
            return f"FlashInfer trtllm-gen, {dtype_name(dtype)}, head dim {key.head_dim_k}, {group.layout} pages"
        served = routes(key, dtype, group.format.dtype_for(dtype), self._workspace.device)
        chunks = f"; fa3 for prompt chunks of {FA3_QUERY} tokens or more" if "fa3" in served else ""
        kernel = kernel_name(group.format.dtype_for(dtype), key, dtype, "fa2")
        return f"FlashInfer {kernel}{chunks}{self._packed.in_words(group, key, dtype)}"

    def fixed_builder(
        self,
        group: CacheGroup,
        key: AttentionSpec,
        dtype: torch.dtype,
        rows: int,
        query_len: int,
        beside: object | None = None,
        tokens: int | None = None,
    ) -> FixedBuilder | FixedMlaBuilder | InvariantBuilder | FixedTrtllmBuilder:
        """A builder for CUDA graphs; see `attention.backends.base.GraphBackend`.

        Raises:
            UnsupportedAttentionError: no kernel serves the layer, or it is MLA and the batch is read in chunks.
        """
        check_supported(group, key, dtype)
        if not key.causal:
            return FixedBuilder(self._packed.both_ways(key, query_len), (key, dtype, rows, query_len))
        if tokens is not None and key.value_in_key:
            raise UnsupportedAttentionError(f"group {group.name}: MLA in chunks has no fixed plans for CUDA graphs")
        if tokens is None and serves(group, key, dtype, self._workspace.device):
            return FixedTrtllmBuilder(self._trtllm(group, key), rows, query_len)
        if not key.value_in_key and not has_flashinfer_heads(key):
            return InvariantBuilder(query_len)
        shape = PlanShape(rows, query_len, tokens)
        geometry = (group.page_size, group.layout, group.format, key, dtype, shape)
        if tokens is None and is_packed(group, key, dtype, query_len):
            return FixedBuilder(self._packed.kernel(key, dtype, rows, query_len), geometry)
        if isinstance(beside, (FixedBuilder, FixedMlaBuilder)) and beside.geometry == geometry:
            return beside.sharing()
        if key.value_in_key:
            return FixedMlaBuilder(MlaKernel(self._workspace, group, key, dtype), rows, query_len, geometry)
        splits = splits_kv(key, shape.least_busy_rows, self._workspace.device)
        workspace = self._workspace_for(key, shape) if splits else self._workspace
        return FixedBuilder(Kernel(workspace, group, key, dtype, "fa2", shape), geometry)

    def _trtllm(self, group: CacheGroup, key: AttentionSpec) -> TrtllmKernel:
        """The Blackwell kernels for `key`, with the workspace that they alone use."""
        if self._zeroed is None:
            self._zeroed = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._workspace.device)
        return TrtllmKernel(self._zeroed, group, key)

    def _workspace_for(self, key: AttentionSpec, shape: PlanShape | None = None) -> Tensor:
        """The shared float workspace, or a larger one from now on; wrappers made before keep theirs."""
        sms = torch.cuda.get_device_properties(self._workspace.device).multi_processor_count
        needed = split_bytes(key, sms, shape)
        if needed > len(self._workspace):
            log.info("attention workspace: %d MiB", needed >> 20)
            self._workspace = torch.empty(needed, dtype=torch.uint8, device=self._workspace.device)
        return self._workspace

    def run(
        self,
        plan: FlashInferPlan | MlaPlan | InvariantPlan | TrtllmPlan,
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
        from attention.kernels.cache_write import write_kv

        out = key.room(query, out)
        if isinstance(plan, InvariantPlan):
            return run_invariant(plan, key, query, key_states, value_states, layer_kv, metadata, sinks, out)
        if isinstance(plan, MlaPlan):
            if CHECKS.on:
                require(plan.work.generation == plan.generation, "a work buffer was planned anew before this plan ran")
            write_kv(layer_kv, key_states, key_states, metadata.slot_mapping)
            plan.kernel.run(plan, query, layer_kv, out)
            return out
        if isinstance(plan, TrtllmPlan):
            write_kv(layer_kv, key_states, value_states, metadata.slot_mapping)
            sinks = None if sinks is None else sinks.float()
            for launch in plan.launches:
                rows = slice(launch.start, launch.stop)
                plan.kernel.run(launch, query[rows], layer_kv, out[rows], sinks)
            return out
        if CHECKS.on:
            for kernel, generation, _ in plan.parts:
                require(kernel.generation == generation, "a wrapper was planned anew before this plan ran")
        write_kv(layer_kv, key_states, value_states, metadata.slot_mapping)
        for kernel, _, start in plan.parts:
            if start:  # its plan counts tokens from the part's first one
                kernel.run(query[start:], layer_kv, out[start:], sinks)
            else:
                kernel.run(query, layer_kv, out, sinks)
        return out
