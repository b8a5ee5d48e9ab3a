"""The paged KV cache: which layers share block tables, how their keys and values are stored, and the tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from attention.cached import cached_property
from attention.errors import InvalidInputError, UnsupportedAttentionError
from attention.spec import AttentionSpec

KVLayout = Literal["NHD", "HND"]
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


@dataclass(frozen=True)
class KVFormat:
    """How keys and values are stored.

    In 8 bits (e4m3) x is stored as x / scale, clamped to ±448 and rounded to nearest even, and read as stored · scale.
    Scales are static. With 1.0 values beyond ±448 are cut off and those below 2^-6 lose precision; a calibrated scale
    is the largest magnitude that occurs over 448.

    Attributes:
        dtype: None for the dtype of the model, or torch.float8_e4m3fn.
        scales: (scale of keys, scale of values) of each layer in layer order; empty is 1.0 everywhere.
        source: origin of the scales, for messages; "" without scales.
    """

    dtype: torch.dtype | None = None
    scales: tuple[tuple[float, float], ...] = ()
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Raises InvalidInputError for another dtype, for scales without 8 bits, and for scales that are no scales."""
        if self.dtype not in (None, FP8):
            raise InvalidInputError(f"a KV cache of {self.dtype}: allowed are the model's dtype and {FP8}")
        if self.scales and self.dtype is None:
            raise InvalidInputError("KV cache scales are for an fp8 cache; this one has the dtype of the model")
        for layer, pair in enumerate(self.scales):
            if len(pair) != 2 or not all(math.isfinite(scale) and scale > 0 for scale in pair):
                raise InvalidInputError(
                    f"KV cache scales of layer {layer}: {pair}; allowed are two positive numbers (keys, values)"
                )

    def of_layer(self, layer: int) -> tuple[float, float]:
        """(scale of keys, scale of values) of one layer."""
        return self.scales[layer] if self.scales else (1.0, 1.0)

    def dtype_for(self, model: torch.dtype) -> torch.dtype:
        """The dtype of the cache tensors for a model of dtype `model`."""
        return model if self.dtype is None else self.dtype


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share page ownership (one set of block tables). A draft head always has its own group.

    Attributes:
        name: used in messages. attention_specs: one per layer, in layer order. format: how keys and values are stored.
        num_pages: pages of the group's pool, page 0 (the null page) included. page_size: tokens per page.
        layout: order inside a page: NHD = [page_size, Hkv, D], HND = [Hkv, page_size, D].
    """

    name: str
    attention_specs: tuple[AttentionSpec, ...]
    num_pages: int
    page_size: int
    layout: KVLayout = "NHD"
    format: KVFormat = KVFormat()

    def __post_init__(self) -> None:
        """Raises InvalidInputError: another layout, scales of other layers; UnsupportedAttentionError: 8-bit MLA."""
        if self.layout not in get_args(KVLayout):
            raise InvalidInputError(
                f"group {self.name}: KV cache layout {self.layout!r}; allowed are {', '.join(get_args(KVLayout))}"
            )
        scales = len(self.format.scales)
        layers = len(self.attention_specs)
        if scales not in (0, layers):
            raise InvalidInputError(f"KV cache scales of {scales} layers were given; group {self.name} has {layers}")
        if self.format.dtype is not None and any(key.value_in_key for key in self.attention_specs):
            raise UnsupportedAttentionError(
                f"group {self.name}: MLA has no cache in 8 bits, only one in the dtype of the model; use "
                "kv_cache_dtype='auto'"
            )


@dataclass(frozen=True)
class LayerKV:
    """Cache tensors of one layer, NHD: keys [num_pages, page_size, Hkv, Dk], values [num_pages, page_size, Hkv, Dv].

    `values` is a view of `keys` when `value_in_key` (MLA), which then share one tensor. A key is the stored value times
    `key_scale`, see `KVFormat`; both scales are 1.0 when the cache has the dtype of the model.
    """

    keys: Tensor
    values: Tensor
    layout: KVLayout
    value_in_key: bool = False
    key_scale: float = 1.0
    value_scale: float = 1.0

    @cached_property
    def latent_and_rope(self) -> tuple[Tensor, Tensor]:
        """[num_pages, page_size, c_kv] and [num_pages, page_size, d_rope] of an MLA layer's keys, in either layout."""
        pages = self.keys.squeeze(self.slot_and_head[1])
        width = self.values.shape[-1]
        return pages[..., :width], pages[..., width:]

    @property
    def slot_and_head(self) -> tuple[int, int]:
        """The axes of `keys` and `values` along which the slots of a page and its heads are."""
        return (1, 2) if self.layout == "NHD" else (2, 1)


def bytes_per_token(attention_specs: tuple[AttentionSpec, ...], dtype: torch.dtype) -> int:
    """Cache bytes of one token over all layers, in a cache of `dtype`."""
    elements = sum(k.num_kv_heads * (k.head_dim_k + (0 if k.value_in_key else k.head_dim_v)) for k in attention_specs)
    return elements * dtype.itemsize


def allocate(group: CacheGroup, dtype: torch.dtype, device: torch.device) -> tuple[LayerKV, ...]:
    """Allocate the group's tensors for a model of `dtype`, one LayerKV per layer, zeroed.

    Zeros, not garbage: masked-out slots of a page are multiplied by a probability of 0, and 0 · NaN is NaN.
    """

    def tensor(heads: int, dim: int) -> Tensor:
        inner = (group.page_size, heads) if group.layout == "NHD" else (heads, group.page_size)
        shape = (group.num_pages, *inner, dim)
        stored = group.format.dtype_for(dtype)
        if device.type != "cpu":
            return torch.zeros(shape, dtype=stored, device=device)
        # Each page takes memory when it is first written, where `torch.zeros` writes all of them.
        memory = torch.from_numpy(np.zeros(math.prod(shape) * stored.itemsize, np.uint8)).untyped_storage()
        # A tensor of its own and no view, whose base compilers would look at.
        return torch.empty(0, dtype=stored).set_(memory, 0, shape)  # type: ignore[call-overload]

    def layer(number: int, k: AttentionSpec) -> LayerKV:
        keys = tensor(k.num_kv_heads, k.head_dim_k)
        values = keys[..., : k.head_dim_v] if k.value_in_key else tensor(k.num_kv_heads, k.head_dim_v)
        return LayerKV(keys, values, group.layout, k.value_in_key, *group.format.of_layer(number))

    return tuple(layer(number, k) for number, k in enumerate(group.attention_specs))


def write(layer: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Write key [T, Hkv, Dk] and value [T, Hkv, Dv] of T tokens to their slots [T] int64, in place."""
    both = ((layer.keys, key, layer.key_scale), (layer.values, value, layer.value_scale))
    for pages, states, scale in both[:1] if layer.value_in_key else both:
        stored = states.to(pages.dtype) if pages.dtype != FP8 else to_stored(states, FP8, scale)
        if pages.dtype == FP8:  # torch cannot index FP8 tensors, so pages are copied as bytes
            pages = pages.view(torch.uint8)
            stored = stored.view(torch.uint8)
        if layer.layout == "NHD":
            pages.view(-1, *pages.shape[2:]).index_copy_(0, slot_mapping, stored)
        else:
            page_size = pages.shape[2]
            pages[slot_mapping // page_size, :, slot_mapping % page_size] = stored


def gather(pages: Tensor, slots: Tensor | slice, layout: KVLayout, scale: float = 1.0) -> Tensor:
    """Read slots (any shape, int64) -> [*slots.shape, Hkv, D], in float32 from a cache in 8 bits; of a slice a view."""
    raw = pages.view(torch.uint8) if pages.dtype == FP8 else pages
    if isinstance(slots, slice) and layout == "HND":
        slots = torch.arange(slots.start, slots.stop, device=pages.device)
    if isinstance(slots, slice):
        found = raw.view(-1, *pages.shape[2:])[slots]
    elif layout == "NHD":
        rows = raw.view(-1, *pages.shape[2:]).index_select(0, slots.reshape(-1))
        found = rows.view(*slots.shape, *rows.shape[1:])
    else:
        page_size = pages.shape[2]
        found = raw[slots // page_size, :, slots % page_size]
    return from_stored(found.view(FP8), scale) if pages.dtype == FP8 else found


def to_stored(states: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values as the cache of `dtype` holds them; the rule is in `KVFormat`.

    >>> to_stored(torch.tensor([1.0, 1.06, 500.0, -9.0]), FP8, 0.5).float().tolist()
    [2.0, 2.0, 448.0, -18.0]
    """
    if dtype != FP8:
        return states.to(dtype)
    return (states.float() * (1 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def from_stored(stored: Tensor, scale: float) -> Tensor:
    """The inverse of `to_stored`, float32 from 8 bits; other dtypes stay as they are."""
    return stored.float() * scale if stored.dtype == FP8 else stored
