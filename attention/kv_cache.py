"""The paged KV cache: which layers share block tables, and their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from attention.backend import PlanKey
from attention.errors import InvalidInputError

KVLayout = Literal["NHD", "HND"]


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share page ownership (one set of block tables). A draft head always has its own group.

    Attributes:
        name: for messages.
        plan_keys: one per layer, in layer order.
        num_pages: pages of the group's pool, page 0 (the null page) included.
        page_size: tokens a page.
        layout: order inside a page: NHD = [page_size, Hkv, D], HND = [Hkv, page_size, D].
    """

    name: str
    plan_keys: tuple[PlanKey, ...]
    num_pages: int
    page_size: int
    layout: KVLayout = "NHD"


@dataclass(frozen=True)
class LayerKV:
    """Cache tensors of one layer, NHD: keys [num_pages, page_size, Hkv, Dk], values [num_pages, page_size, Hkv, Dv].

    `values` is a view of `keys` when `value_in_key` (latent attention): there is one tensor only.
    """

    keys: torch.Tensor
    values: torch.Tensor
    layout: KVLayout
    value_in_key: bool = False


def bytes_per_token(plan_keys: tuple[PlanKey, ...], dtype: torch.dtype) -> int:
    """Cache bytes of one token over all layers."""
    elements = sum(k.num_kv_heads * (k.head_dim_k + (0 if k.value_in_key else k.head_dim_v)) for k in plan_keys)
    return elements * dtype.itemsize


def allocate(group: CacheGroup, dtype: torch.dtype, device: torch.device) -> tuple[LayerKV, ...]:
    """Allocate the group's tensors, one LayerKV a layer, zeroed.

    Zeros, not garbage: masked-out slots of a page take part in 0·value products, and NaN there would spread.
    """

    def tensor(heads: int, dim: int) -> torch.Tensor:
        inner = (group.page_size, heads) if group.layout == "NHD" else (heads, group.page_size)
        return torch.zeros((group.num_pages, *inner, dim), dtype=dtype, device=device)

    def layer(k: PlanKey) -> LayerKV:
        keys = tensor(k.num_kv_heads, k.head_dim_k)
        values = keys[..., : k.head_dim_v] if k.value_in_key else tensor(k.num_kv_heads, k.head_dim_v)
        return LayerKV(keys, values, group.layout, k.value_in_key)

    return tuple(layer(k) for k in group.plan_keys)


def slots_view(pages: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """View [num_pages, …] cache pages as [num_slots, Hkv, D].

    Raises:
        InvalidInputError: the layout is HND, where the rows of a slot are not contiguous.
    """
    if layout != "NHD":
        raise InvalidInputError(f"slots_view needs the NHD layout, not {layout}")
    return pages.view(-1, *pages.shape[2:])


def write(layer: LayerKV, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write key [T, Hkv, Dk] and value [T, Hkv, Dv] of T tokens to their slots [T] int64, in place."""
    both = ((layer.keys, key), (layer.values, value))
    for pages, states in both[:1] if layer.value_in_key else both:
        if layer.layout == "NHD":
            slots_view(pages, "NHD").index_copy_(0, slot_mapping, states.to(pages.dtype))
        else:
            page_size = pages.shape[2]
            page, offset = slot_mapping // page_size, slot_mapping % page_size
            pages[page, :, offset] = states.to(pages.dtype)


def gather(pages: torch.Tensor, slots: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Read slots (any shape, int64) -> [*slots.shape, Hkv, D]."""
    if layout == "NHD":
        rows = slots_view(pages, "NHD").index_select(0, slots.reshape(-1))
        return rows.view(*slots.shape, *rows.shape[1:])
    page_size = pages.shape[2]
    return pages[slots // page_size, :, slots % page_size]
