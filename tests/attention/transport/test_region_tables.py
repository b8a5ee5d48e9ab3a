"""Which bytes one engine reads from another: against slicing, byte by byte, everything else untouched."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.cache.kv_cache import CacheGroup, KVLayout, LayerKV
from attention.errors import HandoffMismatchError
from attention.spec import AttentionSpec
from attention.transport.region_tables import (
    VERSION,
    Bound,
    CopyRange,
    Descriptors,
    EngineTable,
    RankTable,
    bind,
    check_fingerprints,
    plan,
)

CANARY = 0xA5
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
T, PAGES = 4, 7


def heads_of(heads: int, ranks: int, rank: int) -> range:
    """The heads of a rank: divided, or replicated where there are more ranks than heads."""
    if ranks <= heads:
        return range(rank * heads // ranks, (rank + 1) * heads // ranks)
    return range(rank * heads // ranks, rank * heads // ranks + 1)


@dataclass
class Rank:
    """One rank's part of the model's keys and values, and its regions."""

    layers: list[LayerKV]
    bounds: tuple[Bound, ...]
    table: RankTable


class Whole:
    """Random keys and values of all heads: [layers, 2, PAGES, H, T, D]; MLA's latents: [layers, 1, PAGES, 1, T, D]."""

    def __init__(self, heads: int, dim: int, dtype: torch.dtype, layers: int = 2, mla: bool = False) -> None:
        generator = torch.Generator().manual_seed(heads * 97 + dim)
        shape = (layers, 1 if mla else 2, PAGES, 1 if mla else heads, T, dim * dtype.itemsize)
        self.raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        self.dtype, self.mla = dtype, mla

    def slice(self, own: range, layout: KVLayout) -> torch.Tensor:
        """[layers, 2, PAGES, …] bytes of some heads in a layout."""
        part = self.raw if self.mla else self.raw[:, :, :, own.start : own.stop]
        return part.contiguous() if layout == "HND" else part.transpose(3, 4).contiguous()

    def rank(
        self,
        number: int,
        own: range,
        layout: KVLayout = "HND",
        joint: bool = True,
        pages: int = PAGES,
        full: bool = True,
    ) -> Rank:
        """joint: keys and values of a layer in one tensor [pages, 2, …]. full: False for one that reads: canaries."""
        values = self.slice(own, layout)
        layers, parts = values.shape[:2]
        made, found = [], []
        for layer in range(layers):
            memory = torch.full((pages, parts, *values.shape[3:]), CANARY, dtype=torch.uint8)
            apart = [memory[:, part] if joint else memory[:, part].contiguous() for part in range(parts)]
            for part, tensor in enumerate(apart):
                if full:
                    tensor[:PAGES] = values[layer, part]
            keys, vals = apart[0].view(self.dtype), apart[-1].view(self.dtype)
            made.append(LayerKV(keys, keys[..., :4] if self.mla else vals, layout, self.mla))
        dim, heads = made[0].keys.shape[-1], 1 if self.mla else len(own)
        spec = AttentionSpec(heads, heads, dim, dim, 1.0, value_in_key=self.mla)
        found = bind(CacheGroup("target", (spec,) * layers, pages, T, layout), made, own.start // heads)
        if not self.mla:  # ranges that no equal division gives
            found = tuple(replace(b, region=replace(b.region, head0=own.start)) for b in found)
        return Rank(made, found, RankTable(number, "cpu", tuple(b.region for b in found), {}))


def run(segments: Sequence[CopyRange], local: RankTable, sources: Sequence[RankTable], here: Any, there: Any) -> int:
    """What NIXL does with the descriptors, address by address; returns how many there were."""
    count = 0
    for source in sources:
        own = [s for s in segments if s.rank == source.rank]
        ours, theirs = Descriptors(own, local, True), Descriptors(own, source, False)
        pairs = zip(ours.rows()[ours.index(here)], theirs.rows()[theirs.index(there)], strict=True)
        for (to, length, _), (start, same, _) in pairs:
            assert length == same
            ctypes.memmove(int(to), int(start), int(length))
            count += 1
    return count


def expected(
    whole: Whole, reader: Rank, own: range, layout: KVLayout, here: Sequence[int], there: Sequence[int]
) -> Any:
    """The reader's regions as they must be: slices in its blocks, canaries elsewhere."""
    values, found = whole.slice(own, layout), []
    for place, bound in enumerate(reader.bounds):
        layer, part = divmod(place, values.shape[1])
        right = torch.full_like(bound.bytes, CANARY)
        right[list(here)] = values[layer, part][list(there)].flatten(1)
        found.append(right)
    return found


def exact(reader: Rank, right: list[torch.Tensor]) -> bool:
    return all(torch.equal(bound.bytes, own) for bound, own in zip(reader.bounds, right, strict=True))


def check(
    whole: Whole,
    p: int,
    d: int,
    layout: KVLayout,
    joint: bool,
    here: Sequence[int],
    there: Sequence[int],
    segments_of: Callable[..., Sequence[CopyRange]] = lambda segments, local, tables: segments,
) -> list[int]:
    """All readers of d ranks from p ranks are exact and nothing of the sources changes; descriptors of each."""
    heads = whole.raw.shape[3]
    sources = [whole.rank(r, heads_of(heads, p, r), layout, joint) for r in range(p)]
    before = [bound.bytes.clone() for source in sources for bound in source.bounds]
    tables, counts = [source.table for source in sources], []
    for r in range(d):
        own = heads_of(heads, d, r)
        reader = whole.rank(r, own, layout, joint, PAGES + 2, full=False)
        segments = segments_of(plan(reader.table, tables), reader.table, tables)
        counts.append(run(segments, reader.table, tables, {"target": here}, {"target": there}))
        assert exact(reader, expected(whole, reader, own, layout, here, there))
    assert all(map(torch.equal, before, (bound.bytes for source in sources for bound in source.bounds)))
    return counts


HERE, THERE = (8, 1, 4), (2, 6, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "p", "d"), [(4, 1, 2), (4, 2, 1), (4, 2, 2), (4, 1, 4), (4, 4, 2), (2, 4, 8), (2, 8, 1), (6, 2, 3)]
)
def test_exact_between_any_two_sizes(heads: int, p: int, d: int, dtype: torch.dtype) -> None:
    """Two descriptors a block and layer, of keys and of values; replicated heads too."""
    whole = Whole(heads, 8, dtype)
    owners = [len({h * min(p, heads) // heads for h in heads_of(heads, d, r)}) for r in range(d)]
    for joint in (True, False):
        assert check(whole, p, d, "HND", joint, HERE, THERE) == [3 * 2 * 2 * n for n in owners]


def test_nhd_between_equal_sizes_only() -> None:
    whole = Whole(4, 8, torch.bfloat16)
    assert check(whole, 2, 2, "NHD", True, HERE, THERE) == [12, 12]
    for p, d in ((1, 2), (2, 1)):
        with pytest.raises(HandoffMismatchError, match=r'NHD pages of heads .* kv_cache_layout="HND"'):
            check(whole, p, d, "NHD", True, HERE, THERE)
    source, reader = whole.rank(0, range(4), "HND"), whole.rank(0, range(4), "NHD")
    with pytest.raises(HandoffMismatchError, match=r'HND pages there and NHD pages here.*"HND"'):
        plan(reader.table, [source.table])


def test_latents_are_whole_on_every_rank() -> None:
    whole = Whole(1, 24, torch.bfloat16, mla=True)
    for p, d in ((1, 2), (2, 1), (4, 2)):
        for layout in ("HND", "NHD"):
            assert check(whole, p, d, layout, False, HERE, THERE) == [6] * d
    sources = [whole.rank(r, range(1)).table for r in range(2)]
    assert [plan(whole.rank(r, range(1)).table, sources)[0].rank for r in range(4)] == [0, 1, 0, 1]  # they take turns


def test_one_head_is_the_same_bytes_in_both_layouts() -> None:
    whole = Whole(1, 8, torch.float32)
    source, reader = whole.rank(0, range(1), "NHD"), whole.rank(0, range(1), "HND", full=False)
    segments = plan(reader.table, [source.table])
    run(segments, reader.table, [source.table], {"target": HERE[1:]}, {"target": THERE[1:]})
    assert exact(reader, expected(whole, reader, range(1), "HND", HERE[1:], THERE[1:]))


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_any_ranges_any_blocks(data: st.DataObject) -> None:
    """Sources hold any ranges that cover all heads, overlapping or not; a reader any range of its own."""
    heads = data.draw(st.integers(1, 6))
    whole = Whole(heads, data.draw(st.sampled_from([4, 8])), data.draw(st.sampled_from(DTYPES)), layers=1)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(heads - 1, 1)), max_size=3)) & set(range(1, heads)))
    ranges = [range(a, b) for a, b in zip([0, *cuts], [*cuts, heads], strict=True)]
    ranges += [range(a, a + 1) for a in data.draw(st.lists(st.integers(0, heads - 1), max_size=2))]
    ranges = data.draw(st.permutations(ranges))
    first = data.draw(st.integers(0, heads - 1))
    own = range(first, data.draw(st.integers(first + 1, heads)))
    count = data.draw(st.integers(0, PAGES))
    here = data.draw(st.permutations(range(PAGES + 2)))[:count]
    there = data.draw(st.permutations(range(PAGES)))[:count]
    joint = data.draw(st.booleans())
    sources = [whole.rank(r, each, joint=joint) for r, each in enumerate(ranges)]
    tables = [source.table for source in sources]
    reader = whole.rank(data.draw(st.integers(0, 3)), own, joint=joint, pages=PAGES + 2, full=False)
    segments = plan(reader.table, tables)
    assert sum(s.length for s in segments) == sum(b.region.block_bytes for b in reader.bounds)
    run(segments, reader.table, tables, {"target": here}, {"target": there})
    assert exact(reader, expected(whole, reader, own, "HND", here, there))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_rank_with_the_same_heads_beside_one_with_some_of_them(layout: KVLayout) -> None:
    """All heads come from it; the second head was once read from where the first one lies."""
    whole = Whole(3, 4, torch.float32, layers=1)
    sources = [whole.rank(r, each, layout) for r, each in enumerate([range(1, 2), range(1, 3), range(1)])]
    tables = [source.table for source in sources]
    reader = whole.rank(0, range(1, 3), layout, pages=PAGES + 2, full=False)
    run(plan(reader.table, tables), reader.table, tables, {"target": HERE}, {"target": THERE})
    assert exact(reader, expected(whole, reader, range(1, 3), layout, HERE, THERE))


class Shuffled(Descriptors):
    """Planted: block after block, of each all segments."""

    def index(self, blocks: Any) -> np.ndarray:
        plain, count = super().index(blocks), len(blocks["target"])
        return plain.reshape(-1, count).T.reshape(-1)


@pytest.mark.parametrize("side", [True, False])
def test_another_order_on_one_side_is_caught(side: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted defect: every length fits, so no transport says anything; only the bytes do."""

    plain = Descriptors

    def made(segments: Any, table: Any, local: bool) -> Descriptors:
        return (Shuffled if local == side else plain)(segments, table, local)

    whole = Whole(4, 8, torch.bfloat16)
    monkeypatch.setitem(globals(), "Descriptors", made)
    with pytest.raises(AssertionError):
        check(whole, 1, 2, "HND", False, HERE, THERE)


def test_values_before_keys_on_one_side_are_caught() -> None:
    """Planted defect: the source has its regions in another order and gives the reader's numbers of them."""

    def numbered(segments: Any, local: Any, sources: Any) -> Any:
        return [replace(s, remote=s.remote ^ 1) for s in segments]

    with pytest.raises(AssertionError):
        check(Whole(4, 8, torch.bfloat16), 1, 2, "HND", False, HERE, THERE, numbered)


def test_half_a_block_of_keys_and_values_is_caught() -> None:
    """Planted defect: the two ranks read half of a whole block each, which is all keys and all values."""

    def halves(segments: Any, local: Any, sources: Any) -> Any:
        block, rank = local.regions[0].block_stride, local.rank
        return [CopyRange(0, 2 * layer, rank * block, 2 * layer, 0, block) for layer in range(2)]

    with pytest.raises(AssertionError):
        check(Whole(4, 8, torch.bfloat16), 1, 2, "HND", True, HERE, THERE, halves)


@pytest.mark.parametrize("name", ["wrong heads", "NHD called HND"])
def test_a_wrong_table_is_caught_by_its_bytes(name: str) -> None:
    """Planted defects: a source that publishes other heads, or another layout, than it has."""
    whole = Whole(4, 8, torch.bfloat16)
    source = whole.rank(0, range(4), "NHD" if name == "NHD called HND" else "HND")
    changes: dict[str, Any] = {"layout": "HND"} if name == "NHD called HND" else {"head0": 1}
    table = replace(source.table, regions=tuple(replace(r, **changes) for r in source.table.regions))
    own = range(2, 4)
    reader = whole.rank(1, own, full=False)
    run(plan(reader.table, [table]), reader.table, [table], {"target": HERE[1:]}, {"target": THERE[1:]})
    assert not exact(reader, expected(whole, reader, own, "HND", HERE[1:], THERE[1:]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float16"}, "dtype is float16 .* and bfloat16"),
        ({"page_size": 8}, "page_size is 8 .* and 4"),
        ({"head_dim": 16}, "head_dim is 16"),
        ({"head_bytes": 128}, "head_bytes is 128"),
        ({"group": "head"}, "group is head"),
        ({"head0": 2}, "head 0 is on no rank"),
        ({"heads": 3}, "head 3 is on no rank"),
        ({"name": "target/9/keys"}, "the source has none of that name"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    whole = Whole(4, 8, torch.bfloat16, layers=1)
    reader, source = whole.rank(0, range(4)).table, whole.rank(0, range(4)).table
    regions = (replace(source.regions[0], **changes), source.regions[1])
    with pytest.raises(HandoffMismatchError, match=words):
        plan(reader, [replace(source, regions=regions)])


def test_regions_that_only_the_source_has_are_refused() -> None:
    reader, source = (Whole(4, 8, torch.bfloat16, layers=n).rank(0, range(4)).table for n in (1, 2))
    with pytest.raises(HandoffMismatchError, match="regions that this engine has not: target/1/keys, target/1/values"):
        plan(reader, [source])


def test_blocks_outside_of_a_region_are_refused() -> None:
    table = Whole(2, 8, torch.float32).rank(0, range(2)).table
    with pytest.raises(HandoffMismatchError, match=r"blocks 0 … 6, not \[3 7\]"):
        Descriptors(plan(table, [table]), table, True).index({"target": [3, 7]})


def table_of(version: int = VERSION) -> EngineTable:
    rank = Whole(2, 8, torch.float32).rank(0, range(2)).table
    return EngineTable("e", "local", {"weights": "abc"}, (replace(rank, address={"port": 7}),), version)


def test_tables_are_plain_json_and_come_back_the_same() -> None:
    table = table_of()
    assert EngineTable.from_json(table.to_json()) == table


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (table_of(9).to_json(), f"version 9; this installation reads version {VERSION}"),
        ("[]", "version 'list'"),
        ("{", "no region table"),
        (f'{{"version": {VERSION}}}', "no region table: KeyError"),
        (table_of().to_json().replace('"heads": 2', '"heads": 3'), "is impossible"),
        (table_of().to_json().replace('"num_blocks": 7', '"num_blocks": -7'), "is impossible: {'num_blocks': -7}"),
        (table_of().to_json().replace('"base": ', '"base": "0x", "_": '), "no region table"),
    ],
    ids=["version", "list", "cut", "empty", "heads", "blocks", "base"],  # not the addresses that are in the tables
)
def test_other_tables_are_refused(text: str, words: str) -> None:
    with pytest.raises(HandoffMismatchError) as error:
        EngineTable.from_json(text)
    assert words in str(error.value)


def test_fingerprints() -> None:
    check_fingerprints({"a": 1, "b": [2]}, {"b": [2], "a": 1})
    with pytest.raises(HandoffMismatchError, match="b: 3 in the engine that read the prompt and 2 in this one"):
        check_fingerprints({"a": 1, "b": 2}, {"a": 1, "b": 3})
    with pytest.raises(HandoffMismatchError, match=r"c: 3 .* and None"):
        check_fingerprints({"a": 1}, {"a": 1, "c": 3})
