"""Ways to attend one layer, for bench_attention: the batch, the caches, and every kernel behind one interface."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from attention.backends.flashinfer.short_queries import PackedKernel, is_packed, packed_scratch, whole_batch
from attention.backends.flashinfer.wrapper import FixedShape, Kernel, Route
from attention.backends.reference import TorchBackend
from attention.batch.host import rows_batch
from attention.batch.metadata import CommonAttentionMetadata, single_batch_arena, stage
from attention.cache.kv_cache import FP8, CacheGroup, KVFormat, LayerKV, allocate
from attention.errors import UnsupportedAttentionError
from attention.kernels.cache_write import write_kv
from attention.spec import AttentionSpec

CUDA = torch.device("cuda")
KEY = AttentionSpec(32, 8, 128, 128, scale=128**-0.5)
PAGE_SIZE = 16
_CACHES_BYTES = 256 << 20


@dataclass(frozen=True)
class Case:
    """One batch: `rows` rows with `query` new tokens each and `context` keys in all; dtypes of queries and of cache;
    what the layer is."""

    rows: int
    query: int
    context: int
    dtype: torch.dtype
    cache: torch.dtype
    key: AttentionSpec = KEY

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all rows in one layer."""
        return self.rows * self.context * 2 * self.key.num_kv_heads * self.key.head_dim_k * self.cache.itemsize

    @property
    def operations(self) -> int:
        """Of both matmuls over what causal attention sees."""
        seen = self.query * self.context - self.query * (self.query - 1) // 2
        return 4 * self.rows * seen * self.key.num_q_heads * self.key.head_dim_k


@dataclass(frozen=True)
class Scene:
    """A case on the device: its batch, one cache a layer, queries [T, Hq, D], keys and values [T, Hkv, D]."""

    case: Case
    group: CacheGroup
    metadata: CommonAttentionMetadata
    layers: tuple[LayerKV, ...]
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Configuration(Protocol):
    """One way to attend."""

    def plan(self) -> None:
        """Plan the scene's batch."""

    def run(self, layer: LayerKV) -> None:
        """Launch one layer."""


class OfKernel:
    """A kernel of ours over the whole batch."""

    def __init__(self, scene: Scene, kernel: Kernel | PackedKernel) -> None:
        self._kernel, self._part = kernel, whole_batch(scene.metadata)
        self._query = scene.states[0]
        self._out = torch.empty_like(self._query)

    def plan(self) -> None:
        """See Configuration."""
        self._kernel.plan(self._part)

    def run(self, layer: LayerKV) -> None:
        """See Configuration."""
        self._kernel.run(self._query, layer, self._out, None)


class FlashInferConfiguration(OfKernel):
    """A FlashInfer kernel of ours, planned from host arrays; `fixed` is the form that CUDA graphs hold."""

    def __init__(self, scene: Scene, workspace: torch.Tensor, route: Route, fixed: bool) -> None:
        shape = FixedShape(scene.case.rows, scene.case.query) if fixed else None
        super().__init__(scene, Kernel(workspace, scene.group, scene.case.key, scene.case.dtype, route, shape))


class DecodeConfiguration:
    """FlashInfer's own decode wrapper, in graph form, planned by its own method from host arrays."""

    def __init__(self, scene: Scene, workspace: torch.Tensor, tensor_cores: bool = True) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        host, views, key = scene.metadata.host, scene.metadata, scene.case.key
        self._wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            backend="fa2" if tensor_cores else "auto",
            paged_kv_indptr_buffer=views.page_indptr.clone(),
            paged_kv_indices_buffer=views.page_indices.clone(),
            paged_kv_last_page_len_buffer=views.last_page_len.clone(),
        )
        indptr, last = torch.from_numpy(host.page_indptr), torch.from_numpy(host.last_page_len)
        sizes = (key.num_q_heads, key.num_kv_heads, key.head_dim_k, PAGE_SIZE)
        self._arguments = (indptr, views.page_indices[: len(host.page_indices)], last, *sizes)
        self._dtypes = {"q_data_type": scene.case.dtype, "kv_data_type": scene.case.cache, "sm_scale": key.scale}
        self._query = scene.states[0]
        self._out = torch.empty_like(self._query)

    def plan(self) -> None:
        """See Configuration."""
        self._wrapper.plan(*self._arguments, **self._dtypes)

    def run(self, layer: LayerKV) -> None:
        """See Configuration."""
        self._wrapper.run(self._query, (layer.keys, layer.values), out=self._out)


class PackedConfiguration(OfKernel):
    """Our kernel of short queries, for any number of rows; nothing to plan."""

    def __init__(self, scene: Scene) -> None:
        if not is_packed(scene.group, scene.case.key, scene.case.dtype, scene.case.query):
            raise UnsupportedAttentionError(f"the packed kernel is not for {scene.case.key}")
        super().__init__(scene, PackedKernel(scene.case.key, packed_scratch(CUDA)))


class TorchConfiguration:
    """The reference backend; its run writes the batch's keys and values as well."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._backend = TorchBackend(CUDA)
        self._builder = self._backend.builder(scene.group, scene.case.key, scene.case.dtype)
        self._plan = self._builder.build(scene.metadata)

    def plan(self) -> None:
        """See Configuration."""
        self._plan = self._builder.build(self._scene.metadata)

    def run(self, layer: LayerKV) -> None:
        """See Configuration."""
        self._backend.run(self._plan, self._scene.case.key, *self._scene.states, layer, self._scene.metadata)


class WriteConfiguration:
    """The cache write alone."""

    def __init__(self, scene: Scene) -> None:
        self._states, self._slots = scene.states[1:], scene.metadata.slot_mapping

    def plan(self) -> None:
        """Nothing to plan."""

    def run(self, layer: LayerKV) -> None:
        """See Configuration."""
        write_kv(layer, *self._states, self._slots)


def make_scene(case: Case) -> Scene:
    """Random caches and states; enough layers that a replay does not find them in the L2 cache."""
    pages = -(-case.context // PAGE_SIZE)
    count = max(1, min(128, _CACHES_BYTES // case.cache_bytes))
    format = KVFormat(FP8 if case.cache == FP8 else None)
    key = case.key
    group = CacheGroup("bench", (key,) * count, case.rows * pages + 1, PAGE_SIZE, "NHD", format)
    layers = allocate(group, case.dtype, CUDA)
    for tensor in (t for layer in layers for t in (layer.keys, layer.values)):
        _fill(tensor)
    table = np.random.default_rng(0).permutation(np.arange(1, group.num_pages)).reshape(case.rows, pages)
    starts = np.arange(case.rows + 1) * case.query
    first = np.full(case.rows, case.context - case.query)
    batch = rows_batch(starts, first, table.astype(np.int32), PAGE_SIZE)
    metadata = stage(batch, *single_batch_arena(batch.num_reqs, batch.num_tokens, pages, CUDA))
    heads = (key.num_q_heads, key.num_kv_heads, key.num_kv_heads)
    query, key, value = (torch.randn(batch.num_tokens, n, key.head_dim_k, device=CUDA).to(case.dtype) for n in heads)
    return Scene(case, group, metadata, layers, (query, key, value))


def _fill(tensor: torch.Tensor) -> None:
    if tensor.dtype == FP8:
        tensor.view(torch.uint8).random_(256).bitwise_and_(0xBF)  # without the top exponent bit: below 2, never NaN
    else:
        tensor.normal_()


def configurations(scene: Scene, workspace: torch.Tensor, prompt: bool) -> Iterator[tuple[str, Configuration]]:
    """The ways to attend that fit a scene."""
    yield "fa2", FlashInferConfiguration(scene, workspace, "fa2", fixed=not prompt)
    if scene.case.dtype != torch.bfloat16 or scene.case.cache == FP8:
        return
    yield "fa3", FlashInferConfiguration(scene, workspace, "fa3", fixed=False)
    if scene.case.query == 1:
        yield "flashinfer decode, tensor cores", DecodeConfiguration(scene, workspace)
    if not prompt:
        yield "torch", TorchConfiguration(scene)
        yield "write", WriteConfiguration(scene)
