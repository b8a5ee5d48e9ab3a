"""FlexAttention as a function of one kind of layer: its masks, and how it is compiled. The batches: `flex`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as size_config
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from attention.cache.kv_cache import FP8
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec

LEAST_KEYS = 16
"""Fewest keys of Triton's matmuls."""
_TILE_BYTES = 16 << 10
"""Most bytes of a tile of keys, so that keys, values and two stages of loading fit any GPU's shared memory."""
_DIRECT = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
"""torch's switch for the eager form (torch 2.11 to 2.13)."""
Function = Callable[..., Any]
Compiler = str | Function
"""A backend of torch.compile."""
Attended = tuple[Tensor, Tensor | None]
Attend = Callable[..., Attended]


@dataclass(frozen=True)
class FlexKernel:
    """All that a compiled form depends on, but for sizes.

    Attributes:
        folded: KV heads whose blocks lie side by side in a page (HND), or 1.
        tile: packed queries of a program. compiler: see `FlexBackend`; None is the eager form.
    """

    key: AttentionSpec
    dtype: torch.dtype
    cache: torch.dtype
    page_size: int
    folded: int
    tile: int
    compiler: Compiler | None


@cache
def function_of(kernel: FlexKernel) -> Attend:
    """`attend_blocks` of one kernel: compiled at its first call, or in torch's eager form.

    Raises:
        UnsupportedAttentionError: when called while torch's compiler is switched off.
    """

    width = tile_width(kernel)  # here, because the compiler cannot trace a greatest common divisor

    def attend(*arguments: Tensor) -> Attended:
        if kernel.compiler is not None and not torch.compiler.is_compiling():
            raise UnsupportedAttentionError("FlexAttention is called where torch's compiler is switched off")
        return attend_blocks(kernel, width, *arguments)

    if kernel.compiler is None:
        return _uncompiled(attend)
    # A new code object: Dynamo's recompile limit counts compilations per code object, whatever closure it belongs to.
    code = attend.__code__.replace(co_name=f"flex_attention_{function_of.cache_info().misses}")
    own = FunctionType(code, attend.__globals__, code.co_name, None, attend.__closure__)
    return _set_up(torch.compile(own, backend=kernel.compiler, dynamic=True, fullgraph=True))


def attend_blocks(
    kernel: FlexKernel,
    keys_per_tile: int,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scale: Tensor,
    partly: Tensor,
    partly_blocks: Tensor,
    whole: Tensor,
    whole_blocks: Tensor,
    logical_page: Tensor,
    row_start: Tensor,
    position: Tensor,
    slopes: Tensor | None = None,
    head: Tensor | None = None,
) -> Attended:
    """Attention of packed queries, and the logarithm of their sums where a sink joins them.

    Args:
        keys_per_tile: keys that a program loads at once.
        query: [1, Hkv, N, Dk]; keys, values: [1, Hkv or 1, S, D], the cache as a sequence; key_scale: [2] float32.
        partly, whole: [1, H, n] int32 how many blocks of the cache a tile sees partly and wholly, and which: [1, H, n,
            W] int32.
        logical_page: [rows · pages] int32, the place of a page in a row's order; -1 where the row does not own it.
        row_start: [N] int32, the row of each query times the number of pages; position: [N] int32, -1 for padding.
        slopes, head: with ALiBi, [Hkv, G] float32, and [N] int32 the query head of its KV head that each query is.

    Returns:
        [1, Hkv, N, Dv] in the dtype of `query`, without the values' scale; [1, Hkv, N] float32 or None.
    """
    key, page_size, folded = kernel.key, kernel.page_size, kernel.folded
    window = key.window

    def place_of(m: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        page = logical_page[row_start[m] + n // (page_size * folded)]
        return page, page * page_size + n % page_size

    def biased(score: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        assert slopes is not None and head is not None
        return score + slopes[h, head[m]] * (place_of(m, n)[1] - position[m])

    def seen(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        page, place = place_of(m, n)
        visible = (page >= 0) & (place <= position[m])
        if folded > 1:
            visible = visible & (n // page_size % folded == h)
        if window is not None:
            visible = visible & (place > position[m] - window)
        return visible

    mask = BlockMask.from_kv_blocks(
        partly, partly_blocks, whole, whole_blocks, BLOCK_SIZE=(kernel.tile, page_size), mask_mod=seen,
        seq_lengths=(query.shape[2], keys.shape[2]), compute_q_blocks=False,
    )  # fmt: skip
    options: Any = {"BACKEND": "TRITON", "BLOCK_M": kernel.tile, "BLOCK_N": keys_per_tile}
    attended: Any = flex_attention(
        query,
        keys,
        values,
        score_mod=_modification(kernel, key_scale, None if slopes is None else biased),
        block_mask=mask,
        scale=key.scale,
        enable_gqa=folded > 1,
        kernel_options=options,
        return_aux=AuxRequest(lse=True) if key.has_sinks else None,
    )
    return (attended[0], attended[1].lse) if key.has_sinks else (attended, None)


def _modification(
    kernel: FlexKernel, key_scale: Tensor, biased: Callable[..., Tensor] | None
) -> Callable[..., Tensor] | None:
    """Modify a score before the softmax: apply the scale of 8-bit keys, the softcap, then a bias by distance."""
    eight_bits, softcap = kernel.cache == FP8, kernel.key.softcap
    if not eight_bits and softcap is None and biased is None:
        return None

    def modified(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        if eight_bits:
            score = score * key_scale[h * 0]
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if biased is None else biased(score, h, m, n)

    return modified


def _set_up(function: Function) -> Function:
    """The function; where a call compiles it, sizes of tensors are variables and all other numbers constants.

    Two sizes that happen to be equal at that call stay two. Any call may compile, not only the first.
    """

    def call(*arguments: Tensor) -> Any:
        sizes = size_config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        with sizes, torch._dynamo.config.patch(specialize_int=True, specialize_float=True):
            return function(*arguments)

    return call


def _uncompiled(function: Function) -> Function:
    """The function in torch's eager form, which otherwise compiles as well, only to run operator by operator."""

    def call(*arguments: Tensor) -> Any:
        before = vars(flex_module)[_DIRECT]
        # A module-level debug flag is torch's only switch: FlexAttention called eagerly compiles itself otherwise.
        setattr(flex_module, _DIRECT, True)
        try:
            return function(*arguments)
        finally:
            setattr(flex_module, _DIRECT, before)

    return call


def tile_width(kernel: FlexKernel) -> int:
    """Keys that a program loads at once: a power of two that divides the page, in at most _TILE_BYTES."""
    width = 1 << (max(kernel.key.head_dim_k, kernel.key.head_dim_v) - 1).bit_length()
    return math.gcd(kernel.page_size, max(LEAST_KEYS, _TILE_BYTES // (width * kernel.dtype.itemsize)))
