"""Tables of where an engine's keys and values lie, and the plan of which bytes one engine reads from another.

A **region** is the keys, the values or the latents (MLA) of one layer on one rank: pages of equal size at equal
distances. With T tokens a page, H heads on this rank, D elements a head of e bytes, head h of page b begins at

    base + b·block_stride + (h - head0)·T·D·e        HND: the heads of a page lie one after the other
    base + b·block_stride, every H·D·e bytes D·e     NHD: the heads of a token do, so a head is in T pieces

Ranks of a tensor-parallel engine hold ranges of the model's heads, [head0, head0 + heads); replicated heads have the
same range on several ranks, and a latent is head 0 on all of them. So the ranges alone decide who reads what (`plan`):
more ranks to fewer, fewer to more, replicated heads, and layers with other numbers of heads are one rule. Keys and
values are planned apart: the first half of a page's bytes would be all keys and no values.

NHD pages do not move between ranks that hold different heads: n of H heads of a page are T pieces of n·D·e bytes, and
one piece of T·n·D·e bytes there is T·n/H tokens of *all* heads: of the right length, and wrong. It is refused by name.

Source: github.com/vllm-project/vllm#18833 (HND for transfers), #20189 (ranks of different sizes).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.cache.kv_cache import CacheGroup, LayerKV
from attention.cached import cached_property
from attention.errors import HandoffMismatchError, named_error

JsonObject = Mapping[str, Any]
_DEVICE = re.compile(r"cpu|cuda:\d{1,3}")
VERSION = 5
"""Version of the tables. An engine that expects another one refuses them by name."""
_MOST = 2**63
"""Larger than every address, and than every integer of numpy and torch."""


@dataclass(frozen=True)
class Region:
    """Keys, values or latents of one layer on one rank.

    Attributes:
        name: the same in every engine of the model: "target/3/keys". group: whose page numbers are its blocks.
        base: address of block 0. num_blocks; block_stride: bytes from one block to the next; block_bytes: size of a
            block.
        head0, heads: the model's heads that this rank holds. head_bytes: size of one head in one block.
        layout: "HND" or "NHD"; with one head they are the same bytes, called "HND".
        dtype, page_size, head_dim: of the stored keys or values.
    """

    name: str
    group: str
    base: int
    num_blocks: int
    block_stride: int
    block_bytes: int
    head0: int
    heads: int
    head_bytes: int
    layout: str
    dtype: str
    page_size: int
    head_dim: int

    @property
    def head_range(self) -> range:
        """The heads that this rank holds."""
        return range(self.head0, self.head0 + self.heads)

    def offset_of(self, head: int) -> int:
        """Bytes from a block's beginning to a head of it, in HND."""
        return (head - self.head0) * self.head_bytes


@dataclass(frozen=True)
class RankTable:
    """The regions of one rank of an engine, in the order of groups, then layers, keys before values.

    rank: its number, from 0. device: "cpu" or "cuda:0". address: how a transport reaches it, in the transport's format.
    """

    rank: int
    device: str
    regions: tuple[Region, ...]
    address: JsonObject

    @cached_property
    def by_name(self) -> dict[str, int]:
        """The place of each region in `regions`."""
        return {region.name: place for place, region in enumerate(self.regions)}


@dataclass(frozen=True)
class EngineTable:
    """The description that an engine sends to the engines that read from it.

    Attributes:
        engine: a globally unique name. transport: the name of its ranks' transport. ranks: tables by rank.
        fingerprint: by name, the properties that must be equal in both engines: weights of the target and of the head,
            scales of an fp8 cache, how drafts are made.
    """

    engine: str
    transport: str
    fingerprint: JsonObject
    ranks: tuple[RankTable, ...]
    version: int = VERSION

    def to_json(self) -> str:
        """Plain JSON: no code runs when it is read."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineTable:
        """Raises HandoffMismatchError for another version, and for data that is no table."""
        try:
            given = json.loads(text)
            found = given.get("version") if isinstance(given, dict) else type(given).__name__
            if found != VERSION:
                raise HandoffMismatchError(
                    f"a region table of version {found!r}; this installation reads version {VERSION}: use the same "
                    "version of specdec on both sides"
                )
            ranks = tuple(map(_rank_of, given.pop("ranks")))
            _check_kinds(given, engine=str, transport=str, fingerprint=dict)
            if len({rank.rank for rank in ranks}) < len(ranks):
                raise ValueError(f"ranks {[rank.rank for rank in ranks]}, of which each is there once")
            return cls(**{**given, "ranks": ranks})
        except HandoffMismatchError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise HandoffMismatchError(f"this is no region table: {named_error(error)}") from error


def _rank_of(given: JsonObject) -> RankTable:
    _check_kinds(given, rank=int, device=str, regions=list, address=dict)
    regions = tuple(_checked(Region(**region)) for region in given["regions"])
    if not _DEVICE.fullmatch(given["device"]):
        raise ValueError(f"device {given['device']!r}; known are cpu and cuda:0, cuda:1, …")
    return RankTable(given["rank"], given["device"], regions, given["address"])


def _check_kinds(given: JsonObject, **kinds: type) -> None:
    """Check the types of some values. Raises TypeError: a value has another type."""
    for name, kind in kinds.items():
        if type(given[name]) is not kind:
            raise TypeError(f"{name} is {type(given[name]).__name__}, and has to be {kind.__name__}")


def _checked(region: Region) -> Region:
    """The region itself. Raises HandoffMismatchError if its values cannot describe a region."""
    given = vars(region)
    kinds = Region.__annotations__
    bad = {name: value for name, value in given.items() if type(value).__name__ != kinds[name]}
    counts = {name: value for name, value in given.items() if kinds[name] == "int"}
    bad |= {name: value for name, value in counts.items() if name not in bad and not 0 <= value < _MOST}
    whole = not bad and region.heads * region.head_bytes == region.block_bytes <= region.block_stride
    if whole and region.base + region.num_blocks * region.block_stride < _MOST:
        return region
    raise HandoffMismatchError(f"region {region.name!r} is impossible: {bad or counts}")


@dataclass(frozen=True)
class Bound:
    """A region of this process, and its bytes [num_blocks, block_bytes], a view."""

    region: Region
    bytes: Tensor


Bounds = tuple[Bound, ...]


def bind(group: CacheGroup, layers: Sequence[LayerKV], own_part: int = 0) -> Bounds:
    """The regions of a cache group on this rank: for every layer its keys, then its values; for MLA only the latents.

    Args:
        group: its name is the same in every engine of the model, and its page numbers are the regions' blocks.
        own_part: which part of each layer's heads this rank holds, in parts of equal size: with 2 heads a layer here,
            part 3 begins at head 6. Latents are whole on every rank.
    """
    found = []
    for number, layer in enumerate(layers):
        parts = {"latents": layer.keys} if layer.value_in_key else {"keys": layer.keys, "values": layer.values}
        for part, tensor in parts.items():
            first = 0 if layer.value_in_key else own_part * tensor.shape[layer.slot_and_head[1]]
            name = f"{group.name}/{number}/{part}"
            heads = tensor.shape[layer.slot_and_head[1]]
            if not tensor[0].is_contiguous():
                raise HandoffMismatchError(f"region {name}: a page's bytes do not lie together")
            raw = tensor.view(torch.uint8)
            blocks = raw.as_strided((len(raw), raw[0].numel()), (raw.stride(0), 1), raw.storage_offset())
            region = Region(
                name=name,
                group=group.name,
                base=tensor.data_ptr(),
                num_blocks=len(tensor),
                block_stride=raw.stride(0),
                block_bytes=blocks.shape[1],
                head0=first,
                heads=heads,
                head_bytes=blocks.shape[1] // heads,
                layout="HND" if heads == 1 else layer.layout,
                dtype=str(tensor.dtype).removeprefix("torch."),
                page_size=group.page_size,
                head_dim=tensor.shape[3],
            )
            found.append(Bound(region, blocks))
    return tuple(found)


@dataclass(frozen=True)
class CopyRange:
    """`length` bytes of every block, read from one place of a remote block to one of a local block.

    Attributes:
        rank: the source's rank. remote, local: indices of the regions in their tables.
        remote_offset, local_offset: bytes from the beginning of a block.
    """

    rank: int
    remote: int
    remote_offset: int
    local: int
    local_offset: int
    length: int


Segments = tuple[CopyRange, ...]


def plan(local: RankTable, sources: Sequence[RankTable]) -> Segments:
    """The bytes that a rank reads to fill its regions, head by head from the source rank that holds the head.

    If several source ranks hold a head, local ranks take turns among them, preferring ranks that hold exactly the same
    heads. Segments are in the order of the local regions.

    Raises:
        HandoffMismatchError: nothing was read; a region is missing, has another dtype, page size, head size or layout,
            a head is on no rank, or NHD pages have other heads on the other side.
    """
    segments = []
    for place, region in enumerate(local.regions):
        for start, stop, source, there in _sources(local.rank, region, sources):
            _check_layout(region, there)
            at = there.offset_of(start)
            own = region.offset_of(start)
            length = (stop - start) * region.head_bytes
            segments.append(CopyRange(source.rank, source.by_name[region.name], at, place, own, length))
    extra = sorted({name for source in sources for name in source.by_name} - set(local.by_name))
    if extra:
        raise HandoffMismatchError(f"the source has regions that this engine has not: {', '.join(extra[:4])}")
    return tuple(segments)


def _sources(rank: int, region: Region, sources: Sequence[RankTable]) -> Iterator[tuple[int, int, RankTable, Region]]:
    """(first head, head after the last, rank that has them, its region) for all heads of a local region, in as few
    pieces as there are source ranks. Raises HandoffMismatchError: no rank has one of them."""
    having = [(s, s.regions[s.by_name[region.name]]) for s in sources if region.name in s.by_name]
    if not having:
        raise HandoffMismatchError(f"region {region.name}: the source has none of that name")
    for _, there in having:
        # Both sides store the region alike.
        for name in ("dtype", "page_size", "head_dim", "head_bytes", "group"):
            ours = getattr(region, name)
            theirs = getattr(there, name)
            if ours != theirs:
                raise HandoffMismatchError(
                    f"region {region.name}: {name} is {theirs} in the engine that read the prompt and {ours} in this "
                    "one; load both models with the same options"
                )
    head = region.head0
    end = region.head_range.stop
    while head < end:
        owners = [own for own in having if head in own[1].head_range]
        if not owners:
            raise HandoffMismatchError(f"region {region.name}: head {head} is on no rank of the source")
        # One that holds just these heads has all of them, in any layout.
        owners = [own for own in owners if own[1].head_range == region.head_range] or owners
        source, there = owners[rank % len(owners)]
        stop = min(end, there.head_range.stop)
        yield head, stop, source, there
        head = stop


def _check_layout(here: Region, there: Region) -> None:
    if {here.layout, there.layout} == {"HND"} or (here.layout == there.layout and here.head_range == there.head_range):
        return
    if here.layout != there.layout:
        raise HandoffMismatchError(
            f"region {here.name}: {there.layout} pages there and {here.layout} pages here; load both models with "
            'kv_cache_layout="HND"'
        )
    raise HandoffMismatchError(
        f"region {here.name}: NHD pages of heads {_words(there)} there and {_words(here)} here, which lie in pieces of "
        'a token; load both models with kv_cache_layout="HND"'
    )


def _words(region: Region) -> str:
    return f"{region.head0} … {region.head0 + region.heads - 1}"


class Descriptors:
    """A plan's descriptors on one side in one order: segment after segment, for each all blocks of its region.

    Registration, the lists of a peer and the indices of a transfer's descriptors are all made here.
    """

    def __init__(self, segments: Sequence[CopyRange], table: RankTable, local: bool) -> None:
        """segments: reads from one source rank. table: the local rank's table, or the source rank's."""
        self._regions = [table.regions[s.local if local else s.remote] for s in segments]
        offsets = [s.local_offset if local else s.remote_offset for s in segments]
        self._starts = [region.base + offset for region, offset in zip(self._regions, offsets, strict=True)]
        self._lengths = [s.length for s in segments]
        self._device = int(table.device.partition(":")[2] or 0)
        self._first = np.concatenate([[0], np.cumsum([region.num_blocks for region in self._regions])])

    def rows(self) -> np.ndarray:
        """[segments · blocks, 3] int64: address, length, device."""
        found = np.empty((int(self._first[-1]), 3), np.int64)
        for i, region in enumerate(self._regions):
            own = found[self._first[i] : self._first[i + 1]]
            own[:, 0] = self._starts[i] + region.block_stride * np.arange(region.num_blocks)
            own[:, 1] = self._lengths[i]
            own[:, 2] = self._device
        return found

    def index(self, blocks: Mapping[str, Sequence[int]]) -> np.ndarray:
        """[n] int64 rows of a transfer of each group's blocks.

        Raises:
            HandoffMismatchError: a block is not in its region.
        """
        places = []
        for first, region in zip(self._first[:-1].tolist(), self._regions, strict=True):
            own = np.asarray(blocks[region.group], np.int64)
            if len(own) and not 0 <= own.min() <= own.max() < region.num_blocks:
                raise HandoffMismatchError(f"region {region.name} has blocks 0 … {region.num_blocks - 1}, not {own}")
            places.append(first + own)
        return np.concatenate(places) if places else np.zeros(0, np.int64)


def check_fingerprints(here: JsonObject, there: JsonObject) -> None:
    """Compare fingerprints. Raises HandoffMismatchError: something differs, so tokens might; names it."""
    for name in dict.fromkeys([*here, *there]):
        if here.get(name) != there.get(name):
            raise HandoffMismatchError(
                f"{name}: {there.get(name)} in the engine that read the prompt and {here.get(name)} in this one; a "
                "request moves between engines of one model only"
            )
