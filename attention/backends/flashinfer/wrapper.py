"""One FlashInfer paged-attention wrapper: its kernel, the build of the kernel, and planning from host arrays.

FlashInfer builds a module of eight large files, of which specdec launches one: causal, paged. Here a module has that
file, unchanged, and the host code without the other kernels (a call for one raises), under a different name.

Source: flashinfer-ai/flashinfer, flashinfer/jit/attention/modules.py (gen_batch_prefill_module), csrc/batch_prefill.cu,
csrc/batch_prefill_sm90.cu.

Two routes: "fa2" splits the KV of a row over the GPU (split-KV), for few query tokens against many keys, and supports
8-bit caches and sinks; "fa3" is Hopper's own pipeline, for long prompt chunks.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from attention.backends.building import ASIDE, Build, in_background
from attention.backends.limits import dtype_name
from attention.batch.host import HostBatch
from attention.cache.kv_cache import CacheGroup, LayerKV
from attention.checking import CHECKS, require
from attention.spec import AttentionSpec

log = logging.getLogger("specdec")
_RAGGED = re.compile(r"(cudaError_t BatchPrefillWithRaggedKVCacheDispatched\([^;{}]*\));")
"""The host code's declaration of the kernels over contiguous keys."""
_KERNEL = re.compile(r"batch_prefill_paged(_sm90)?_kernel_mask_1\.cu")
_OTHER_KERNEL = re.compile(r"batch_prefill_(paged|ragged)(_sm90)?_kernel_mask_\d\.cu")
_CAUSAL_ONLY = """
#include <flashinfer/utils.cuh>
#undef DISPATCH_MASK_MODE
#define DISPATCH_MASK_MODE(mask_mode, MASK_MODE, ...)                    \\
  if (mask_mode != MaskMode::kCausal) {                                  \\
    FLASHINFER_ERROR("this module was built for causal attention only"); \\
  } else {                                                               \\
    constexpr MaskMode MASK_MODE = MaskMode::kCausal;                    \\
    __VA_ARGS__                                                          \\
  }
"""


def causal_module(route: str, *arguments: Any) -> Any:
    """FlashInfer's get_batch_prefill_module, same arguments, with causal paged kernels only; built if need be."""
    from flashinfer import prefill

    # __wrapped__: without FlashInfer's functools.cache, which must keep returning full modules for the same arguments.
    made = prefill.get_batch_prefill_module.__wrapped__
    # The same function over other generators of sources: it finds them among its globals.
    generators = ("gen_batch_prefill_module", "_gen_batch_prefill_primary_module")
    own = {name: _causal(getattr(prefill, name)) for name in generators}
    function = FunctionType(made.__code__, made.__globals__ | own, made.__name__, made.__defaults__, made.__closure__)
    return function(route, *arguments)


def _causal(generate: Any) -> Any:
    def generated(*arguments: Any) -> Any:
        whole = generate(*arguments)
        if whole.is_compiled:  # by somebody else, or it came with FlashInfer
            return whole
        name = f"specdec_causal_{hashlib.sha256(whole.name.encode()).hexdigest()[:16]}"
        folder = Path(whole.sources[0]).parent
        try:
            sources = write_causal(map(Path, whole.sources), folder.with_name(name))
        except ValueError as error:
            log.info("%s: the whole module is built, which takes longer", error, extra=ASIDE)
            return whole
        return replace(whole, name=name, sources=sources)

    return generated


def write_causal(sources: Iterable[Path], folder: Path) -> list[Path]:
    """Write the sources of a causal-only module, made from FlashInfer's full module and its headers, into `folder`.

    Files with the right content are left untouched. Returns the sources to compile.

    Raises:
        ValueError: the sources differ from the FlashInfer version that this function edits.
    """
    sources = list(sources)
    kept = [path for path in sources if _KERNEL.fullmatch(path.name) or not _OTHER_KERNEL.fullmatch(path.name)]
    texts = {path.name: path.read_text(encoding="utf-8") for path in kept}
    headers = {
        path.name: path.read_text(encoding="utf-8")
        for path in sources[0].parent.iterdir()
        if path.suffix in (".inc", ".cuh")
    }
    hosts = [name for name, text in texts.items() if _RAGGED.search(text)]
    configs = [name for name, text in headers.items() if "DISPATCH_MASK_MODE" in text]
    # 7: of the eight kernel files, paged or ragged with four mask modes each, only the causal paged file is kept.
    if len(kept) != len(sources) - 7 or len(hosts) != 1 or len(configs) != 1:
        raise ValueError(f"FlashInfer's sources in {sources[0].parent} are not of the form that is known")
    texts[hosts[0]] = _RAGGED.sub(r"\1 { return cudaErrorNotSupported; }", texts[hosts[0]])
    headers[configs[0]] += _CAUSAL_ONLY
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (texts | headers).items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # a file that changes is compiled again
            path.write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


Route = Literal["fa2", "fa3"]
_INT_WORKSPACE_BYTES = 2 << 20
_SPLIT_SHARE = 0.9
"""Share of the most tiles with split-KV, see `splits_kv`, above which it gains almost nothing."""


@dataclass(frozen=True)
class PlanShape:
    """The shape of every batch that a captured launch serves: `rows` rows of `query_len` tokens each.

    tokens: token count of the batch if rows have varying lengths 0 … query_len; None: rows·query_len.
    """

    rows: int
    query_len: int
    tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return self.rows * self.query_len if self.tokens is None else self.tokens

    @property
    def least_busy_rows(self) -> int:
        """The fewest rows that the tokens lie in."""
        return self.num_tokens // self.query_len


@dataclass(frozen=True)
class Part:
    """Rows planned together: host arrays for the planner, device arrays for the kernel; token rows [start, stop)."""

    query_start_loc: ndarray
    page_indptr: ndarray
    seq_lens: ndarray
    device_query_start_loc: Tensor
    device_page_indptr: Tensor
    device_last_page_len: Tensor
    device_page_indices: Tensor
    start: int
    stop: int

    @property
    def query_len(self) -> int | None:
        """Tokens of each row; None where rows have different numbers of them."""
        lens = np.diff(self.query_start_loc)
        return int(lens[0]) if len(lens) and (lens == lens[0]).all() else None

    def at(self, host: HostBatch) -> Part:
        """The same part for rows of other lengths from a whole batch whose device arrays have the same addresses."""
        return Part(
            host.query_start_loc, host.page_indptr, host.seq_lens, self.device_query_start_loc, self.device_page_indptr,
            self.device_last_page_len, self.device_page_indices, self.start, self.stop,
        )  # fmt: skip


_SHORT_QUERY = 16
"""Rows with more query tokens count as prompt chunks: a plan has one tile size, chosen from the mean query length."""


def first_long_row(host: HostBatch) -> int:
    """The first row that counts as a prompt chunk; the number of rows where none does."""
    is_long = host.query_lens > _SHORT_QUERY
    return int(is_long.argmax()) if is_long.any() else host.num_reqs


def splits_kv(key: AttentionSpec, rows: int, device: torch.device) -> bool:
    """Whether so few rows leave the GPU partly idle, so that FlashInfer's fa2 planner would use split-KV.

    It does so up to two tiles of queries per multiprocessor in all.
    Source: flashinfer-ai/flashinfer, include/flashinfer/attention/scheduler.cuh (PrefillPlanImpl).
    """
    most_tiles = 2 * torch.cuda.get_device_properties(device).multi_processor_count // key.num_kv_heads
    return rows < math.ceil(_SPLIT_SHARE * most_tiles)


LEAST_BYTES = 256 << 20
"""Twice what FlashInfer's documentation recommends; MLA's partial results need 18 MB of it on 132 multiprocessors."""
_SHORT_TILE = 64
_LONG_TILE = 128
_WIDE_HEAD = 256
"""From this head dimension on, tiles have 64 queries at most."""
_ALIGNMENT = 16


def split_bytes(key: AttentionSpec, sms: int, shape: PlanShape | None = None) -> int:
    """Most bytes that the partial results of one plan take.

    Where the planner splits a row's KV, each chunk writes a partial output and its log-sum-exp to the float workspace,
    in float32, and planning fails when it is too small.
    Source: flashinfer-ai/flashinfer 0.7.2, include/flashinfer/attention/scheduler.cuh (PrefillSplitQOKVIndptr,
    PrefillPlanImpl) and utils.cuh (FA2DetermineCtaTileQ).

    Args:
        key: heads and head dimensions; sms: multiprocessors.
        shape: of a batch for CUDA graphs, whose grid has at least two blocks per multiprocessor, and one per tile;
            default any batch outside graphs, with at most two split tiles per multiprocessor. If its rows have 0 …
            query_len tokens each, the planner counts with one row of all the tokens that the others leave.

    A verification of Llama-3.1-8B, eight rows of six tokens, and of a model with 71 query heads for one KV head:

    >>> llama, falcon = AttentionSpec(32, 8, 128, 128, 1.0), AttentionSpec(71, 1, 64, 64, 1.0)
    >>> [split_bytes(key, 132, PlanShape(8, 6)) >> 20 for key in (llama, falcon)], split_bytes(llama, 132) >> 20
    ([8, 8], 16)
    >>> split_bytes(AttentionSpec(128, 1, 128, 128, 1.0), 132, PlanShape(200, 32)) >> 20
    403
    """
    group = key.group_size
    blocks = 2 * sms // key.num_kv_heads
    tile = _LONG_TILE if key.head_dim_v < _WIDE_HEAD else _SHORT_TILE
    if shape is not None:
        rows = shape.rows
        tokens = shape.tokens
        queries = (shape.query_len if tokens is None else tokens - rows + 1) * group
        tile = tile if queries > _SHORT_TILE else _SHORT_TILE
        tiles = rows * math.ceil(queries / tile) if tokens is None else math.ceil(tokens * group / tile) + rows - 1
        blocks = max(blocks, tiles)
    chunks = math.ceil(blocks * tile / group)  # of one token row, all its heads
    outputs, sums = (4 * key.num_q_heads * chunks * width for width in (key.head_dim_v, 1))
    return _aligned(outputs) + _aligned(sums)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _rows_of_a_page(fixed: PlanShape | None, device: torch.device) -> dict[str, Tensor]:
    """The index arrays of rows with one page each, by which a wrapper is planned when it is made."""
    rows, query_len = (1, 1) if fixed is None else (fixed.rows, fixed.query_len)
    ones = torch.arange(rows + 1, dtype=torch.int32)
    return {
        "qo_indptr": ones * query_len if fixed is None else (ones * query_len).clamp(max=fixed.num_tokens),
        "paged_kv_indptr": ones,
        "paged_kv_indices": torch.zeros(rows, dtype=torch.int32, device=device),  # not copied: that would wait
        "paged_kv_last_page_len": torch.ones(rows, dtype=torch.int32),
    }


class Kernel:
    """One FlashInfer wrapper: holds one plan at a time.

    A plan with split-KV depends on lengths. A fixed batch with enough rows that the planner would not split gets a
    kernel without split-KV and its reduction, planned once.

    It serves any batch, or batches of one shape (then a captured graph may hold its launches).
    """

    def __init__(
        self,
        workspace: Tensor,
        group: CacheGroup,
        key: AttentionSpec,
        dtype: torch.dtype,
        route: Route = "fa2",
        fixed: PlanShape | None = None,
    ) -> None:
        """Waits for FlashInfer's kernel where it is being built; see `building`."""
        cache = group.format.dtype_for(dtype)
        module = building(cache, key, dtype, route).wait()
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.route = route
        self.generation = 0
        self._planned: bytes | None = None
        self._scale = key.scale if key.has_sinks else None
        uniform = None if fixed is None or fixed.tokens is not None else fixed.query_len
        self._is_uneven = fixed is not None and uniform is None
        self._splits = fixed is None or route != "fa2" or splits_kv(key, fixed.least_busy_rows, workspace.device)
        buffers = _rows_of_a_page(fixed, workspace.device)
        fixed_buffers = {f"{name}_buf": x.to(workspace.device) for name, x in buffers.items()} if fixed else {}
        variant = _sink_variant(cache, key, dtype) if key.has_sinks else {}
        self._wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(
            workspace, group.layout, use_cuda_graph=fixed is not None, backend=route, **fixed_buffers, **variant
        )
        int_workspace = torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=workspace.device)
        self._wrapper.reset_workspace_buffer(workspace, int_workspace)
        window_left = -1 if key.window is None else key.window - 1
        if not key.has_sinks:
            self._wrapper._jit_module = module  # plan() then uses this module instead of building one
        self._wrapper.plan(
            *buffers.values(), key.num_q_heads, key.num_kv_heads, key.head_dim_k, group.page_size, causal=True,
            sm_scale=key.scale, window_left=window_left, logits_soft_cap=key.softcap, q_data_type=dtype,
            kv_data_type=cache, uniform_q_len=uniform, disable_split_kv=not self._splits,
        )  # fmt: skip
        if not key.has_sinks:
            self._wrapper._jit_module = None  # which would be called with other arguments
        self._is_fixed = fixed is not None
        heads, dims = (key.num_q_heads, key.num_kv_heads), (key.head_dim_k, key.head_dim_v)
        # The end of the C++ planner's positional arguments, in its order: heads, page size, CUDA graph, head dims,
        # causal, window; for fa2 also fixed_split_size (-1: none), disable_split_kv, num_colocated_ctas and the uniform
        # length.
        self._plan_tail: tuple[object, ...] = (*heads, group.page_size, fixed is not None, *dims, True, window_left)
        if route == "fa2":
            self._plan_tail += (-1, not self._splits, 0, uniform or 0)
        self._copied = torch.cuda.Event()
        self._copied.record()

    @property
    def ready(self) -> bool:
        """Whether the last plan's copy has left the pinned buffer. Does not wait."""
        return self._copied.query()

    def plan(self, part: Part) -> None:
        """Plan a part: FlashInfer's planner over the host arrays, and the device arrays as they are.

        Source: the same short cut as sgl-project/sglang, python/sglang/srt/layers/attention/flashinfer_backend.py
        (fast_decode_plan): set the wrapper's index buffers and call the module's planner.
        """
        if not self.ready:
            self._copied.synchronize()
        self._planned = None  # an interrupt from here on leaves no plan, not half of one
        wrapper = self._wrapper
        wrapper._qo_indptr_buf = part.device_query_start_loc
        wrapper._paged_kv_indptr_buf = part.device_page_indptr
        wrapper._paged_kv_last_page_len_buf = part.device_last_page_len
        wrapper._paged_kv_indices_buf = part.device_page_indices
        before = wrapper._plan_info
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer,
            torch.from_numpy(part.query_start_loc), torch.from_numpy(part.page_indptr), torch.from_numpy(part.seq_lens),
            part.stop - part.start, len(part.seq_lens), *self._plan_tail,
        )  # fmt: skip
        if self._is_fixed and CHECKS.on:
            require(list(before) == list(wrapper._plan_info), "a plan changed the launch that a graph has captured")
        self._copied.record()
        self._planned = self._decisive(part.query_start_loc, part.page_indptr)
        self.generation += 1

    def share(self, batch: HostBatch) -> None:
        """Does nothing: every row is attended separately here, even if rows of the planned batch share pages."""

    def keeps(self, host: HostBatch) -> bool:
        """Whether the last plan serves this batch as well as the batch that it was made for.

        The fa2 planner divides work by page counts and ignores exact lengths (flashinfer-ai/flashinfer,
        csrc/batch_prefill.cu: kv_len_arr is not read). A plan without split-KV serves any lengths of the keys.
        """
        return self._decisive(host.query_start_loc, host.page_indptr) == self._planned

    def _decisive(self, query_start_loc: ndarray, page_indptr: ndarray) -> bytes:
        """What a plan of a fixed shape depends on: a comparison of so few numbers costs numpy ten times more."""
        pages = page_indptr.tobytes() if self._splits else b""
        return pages + query_start_loc.tobytes() if self._is_uneven else pages

    def run(self, query: Tensor, layer_kv: LayerKV, out: Tensor, sinks: Tensor | None) -> None:
        """query, out: [tokens of the part and after, Hq, D]; sinks: [Hq] for an AttentionSpec with sinks, else None.

        The plan bounds the attended tokens. FlashInfer requires that the query ends with the last planned row, so its
        record of that end is set to the query's length.
        """
        # FlashInfer's run() raises unless the query has exactly `_qo_indptr_last` rows, and this query may have
        # padding.
        self._wrapper._qo_indptr_last = len(query)
        pages, scales = (layer_kv.keys, layer_kv.values), (layer_kv.key_scale, layer_kv.value_scale)
        if self._scale is None:
            self._wrapper.run(query, pages, out=out, k_scale=scales[0], v_scale=scales[1])
        else:
            assert sinks is not None
            # float32, as `_sink_variant` declares the sinks; the keys' scale is part of the softmax scale here.
            self._wrapper.run(query, pages, sinks.float(), self._scale * scales[0], out=out, v_scale=scales[1])


def building(cache: torch.dtype, key: AttentionSpec, dtype: torch.dtype, route: Route) -> Build:
    """The build of the kernel for queries of `dtype` and a cache of dtype `cache`, begun at the first call.

    The result is the module that a wrapper is planned with. With sinks the module lands in FlashInfer's module cache,
    which has no lock: await the build before making a wrapper, because the wrapper looks into that cache with the same
    arguments.
    """
    kind = (route, dtype, cache, key.head_dim_k, key.head_dim_v, *key.features)

    def make() -> Any:
        if key.has_sinks:
            from flashinfer.prefill import get_customize_batch_prefill_module

            variant = _sink_variant(cache, key, dtype)
            return get_customize_batch_prefill_module(route, *variant["jit_args"], **variant["jit_kwargs"])
        dtypes, dims = (dtype, cache, dtype, torch.int32), (key.head_dim_k, key.head_dim_k)
        limits = (key.window is not None, key.softcap is not None)
        return causal_module(route, *dtypes, *dims, 0, *limits, False)  # 0: positions; False: half reduction

    return in_background(kind, kernel_name(cache, key, dtype, route), make)


def kernel_name(cache: torch.dtype, key: AttentionSpec, dtype: torch.dtype, route: Route) -> str:
    """What a kernel is compiled for, in words.

    >>> kernel_name(torch.bfloat16, AttentionSpec(8, 2, 128, 128, 1.0, window=9), torch.bfloat16, "fa2")
    'fa2, bfloat16, head dim 128, window'
    """
    words = [route, dtype_name(dtype), f"head dim {key.head_dim_k}"]
    words += [f"cache {dtype_name(cache)}"] if cache != dtype else []
    return ", ".join((*words, *key.features))


def _sink_variant(cache: torch.dtype, key: AttentionSpec, dtype: torch.dtype) -> dict[str, Any]:
    """Constructor arguments for FlashInfer's fa2 kernel with attention sinks.

    Source: flashinfer-ai/flashinfer, flashinfer/attention/_core.py (BatchAttentionWithAttentionSinkWrapper). specdec
    names the built kernel itself, because FlashInfer's name omits head dim and cache dtype.
    """
    from flashinfer.jit.attention.variants import attention_sink_decl

    windowed = key.window is not None
    q_name = dtype_name(dtype)
    kv_name = dtype_name(cache)
    name = f"specdec_sink_fa2_q_{q_name}_kv_{kv_name}_d{key.head_dim_k}_window_{windowed}"
    dims = (key.head_dim_k, key.head_dim_v)
    tensors = (["sink"], ["float"])
    scalars = (["sm_scale"], ["double"])
    declared = ("AttentionSink", attention_sink_decl["fa2"])
    return {
        "jit_args": [name, dtype, cache, dtype, torch.int32, *dims, *tensors, *scalars, *declared],
        "jit_kwargs": {"use_sliding_window": windowed, "paged_kv_stride_mode": "equal", "module_surface": "full"},
    }
