"""What the prefix cache finds is what was written for the same tokens; who holds which page; who is evicted first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from fakes import examples, free_pages, idle_pages
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import attention.cache.prefix
from attention.cache.pages import BlockTables, PageAllocator
from attention.cache.prefix import NOTHING, Found, PrefixCache
from attention.cache.windowed import WindowedTables
from attention.errors import InvariantError, OutOfPagesError
from attention.spec import Reach

SIZE, ROWS, PAGES, MOST = 2, 3, 9, 12


@dataclass(frozen=True)
class Row:
    """What a row reads, whether it drafts, and whether its pages were registered."""

    tokens: tuple[int, ...]
    drafts: bool


class PrefixMachine(RuleBasedStateMachine):
    """Pages are notes of the tokens that they were written for."""

    following = 1

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(SIZE, PAGES, PAGES, self.following)
        assert self.cache.head_pages is not None
        self.target = BlockTables(PAGES, ROWS, MOST, SIZE, self.cache.pages)
        self.head = BlockTables(PAGES, ROWS, MOST, SIZE, self.cache.head_pages)
        self.notes: dict[int, tuple[int, ...]] = {}
        self.head_notes: dict[int, tuple[int, ...]] = {}
        self.rows: dict[int, Row] = {}

    @precondition(lambda self: len(self.rows) < ROWS)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=MOST), drafts=st.booleans())
    def enter(self, tokens: list[int], drafts: bool) -> None:
        """A request takes what is found, and reads the rest; nothing that it writes is another's."""
        ids = np.array(tokens, np.int32)
        found = self.cache.find(ids, drafts)
        own = self.target.pages_for(len(tokens)) - len(found.pages)
        if own + self.cache.num_idle(found)[0] > self.cache.pages.num_free:
            return
        row = min(set(range(ROWS)) - self.rows.keys())
        self.cache.hold(found)
        self.target.begin(row, found.pages)
        self.head.begin(row, found.head_pages)
        self.target.resize([row], [len(tokens)])
        if drafts:
            self.head.resize([row], [len(tokens)])
        self.rows[row] = Row(tuple(tokens), drafts)
        for i, page in enumerate(found.pages):
            assert self.notes[page] == tuple(tokens[: (i + 1) * SIZE])
        for i, page in enumerate(found.head_pages):
            assert self.head_notes[page] == tuple(tokens[: (i + 1) * SIZE + self.following])
        assert len(found.pages) <= found.num_pages and len(found.pages) * SIZE < len(tokens)
        written = self.target.pages_of(row)[len(found.pages) :], self.head.pages_of(row)[len(found.head_pages) :]
        self.cache.pages.check_writable(written[0])
        assert self.cache.head_pages is not None
        self.cache.head_pages.check_writable(written[1])
        for i, page in enumerate(written[0], len(found.pages)):
            self.notes[page] = tuple(tokens[: (i + 1) * SIZE])
        for i, page in enumerate(written[1], len(found.head_pages)):
            self.head_notes[page] = tuple(tokens[: (i + 1) * SIZE + self.following])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        """Registered, a row's whole pages are found by one like it."""
        row = data.draw(st.sampled_from(sorted(self.rows)))
        asked = self.rows[row]
        whole = len(asked.tokens) // SIZE
        heads = max(len(asked.tokens) - self.following, 0) // SIZE if asked.drafts else 0
        ids = np.array(asked.tokens, np.int32)
        self.cache.register(ids, self.target.pages_of(row)[:whole], self.head.pages_of(row)[:heads])
        found = self.cache.find(np.append(ids, np.int32(7)), False)
        assert len(found.pages) == found.num_pages == whole
        if asked.drafts:
            found = self.cache.find(ids, True)
            assert len(found.head_pages) == heads

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        del self.rows[row]
        self.target.release(row)
        self.head.release(row)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.find(np.zeros(MOST, np.int32), False) == NOTHING
        assert idle_pages(self.cache.pages) == []

    @invariant()
    def every_page_has_its_holders(self) -> None:
        self.target.validate()
        self.head.validate()
        self.cache.validate()
        assert self.head.allocator.num_free >= self.target.allocator.num_free, "pairs"


class ModulesMachine(PrefixMachine):
    """Three modules, on pages shorter than they are many."""

    following = 3


TestPages = PrefixMachine.TestCase
TestPages.settings = settings(max_examples=examples(200), stateful_step_count=30, deadline=None)
TestModules = ModulesMachine.TestCase
TestModules.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)


def filled(*prompts: list[int], pages: int = PAGES, leave: bool = True) -> tuple[PrefixCache, BlockTables]:
    """A cache without a head, and prompts that were read one after the other."""
    cache = PrefixCache(SIZE, pages)
    tables = BlockTables(pages, len(prompts), MOST, SIZE, cache.pages)
    for row, prompt in enumerate(prompts):
        ids = np.array(prompt, np.int32)
        found = cache.find(ids, False)
        cache.hold(found)
        tables.begin(row, found.pages)
        tables.resize([row], [len(prompt)])
        cache.register(ids, tables.pages_of(row)[: len(prompt) // SIZE], [])
        if leave:
            tables.release(row)
    return cache, tables


def pages_found(cache: PrefixCache, *tokens: int) -> int:
    return cache.find(np.array([*tokens, 9], np.int32), False).num_pages


def test_the_least_recently_used_goes_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    cache, tables = filled([1, 1, 2, 2], [3, 3, 4, 4], [1, 1, 5, 5], pages=6)
    assert [pages_found(cache, *p) for p in ((1, 1, 2, 2), (3, 3, 4, 4), (1, 1, 5, 5))] == [2, 2, 2]
    counts = []
    for taken in range(1, 6):
        tables.resize([0], [taken * SIZE])
        counts.append([pages_found(cache, *p) for p in ((1, 1, 2, 2), (3, 3, 4, 4), (1, 1, 5, 5))])
        cache.validate()
    assert counts == [[1, 2, 2], [1, 1, 2], [1, 0, 2], [1, 0, 1], [0, 0, 0]]


def test_pages_that_a_row_holds_are_not_evicted() -> None:
    cache, tables = filled([1, 1, 2, 2], [1, 1, 3, 3], pages=5, leave=False)
    tables.release(0)
    assert cache.pages.num_free == 2, "a page of nobody's, and [2, 2]; [1, 1] is the other's"
    tables.resize([0], [2 * SIZE])
    assert pages_found(cache, 1, 1, 3, 3) == 2 and pages_found(cache, 1, 1, 2, 2) == 1
    with pytest.raises(OutOfPagesError, match="1 pages are missing"):
        tables.resize([0], [3 * SIZE])


def test_a_row_that_reads_a_page_again_takes_its_place() -> None:
    """So a row that goes on holds all pages before its own, and they outlive those after them."""
    cache, tables = filled([1, 1, 2, 2])
    before = cache.find(np.array([1, 1, 2, 2, 9], np.int32), False).pages
    again = cache.find(np.array([1, 1, 2, 2], np.int32), False)
    assert (again.num_pages, len(again.pages)) == (2, 1), "the last token's position is read in any case"
    cache.hold(again)
    tables.begin(0, again.pages)
    tables.resize([0], [6])
    cache.register(np.array([1, 1, 2, 2, 3, 3], np.int32), tables.pages_of(0), [])
    tables.release(0)
    after = cache.find(np.array([1, 1, 2, 2, 3, 3, 9], np.int32), False).pages
    assert after[0] == before[0] and after[1] != before[1] and len(free_pages(cache.pages)) == PAGES - 4
    assert idle_pages(cache.pages) == list(after[::-1])


def test_a_page_of_the_head_is_found_by_what_follows() -> None:
    cache = PrefixCache(SIZE, PAGES, PAGES)
    target, head = (BlockTables(PAGES, 2, MOST, SIZE, pages) for pages in (cache.pages, cache.head_pages))
    for row, tokens in enumerate(([1, 1, 2], [1, 1, 3])):
        target.resize([row], [len(tokens)])
        head.resize([row], [len(tokens)])
        cache.register(np.array(tokens, np.int32), target.pages_of(row)[:1], head.pages_of(row)[:1])
    for row, last in ((0, 2), (1, 3)):
        found = cache.find(np.array([1, 1, last, 5], np.int32), True)
        assert found == Found(1, (target.pages_of(row)[0],), (head.pages_of(row)[0],))
    assert cache.find(np.array([1, 1, 4, 5], np.int32), True) == Found(1), "read again: no head has read it before a 4"
    assert cache.find(np.array([1, 1, 4, 5], np.int32), False).num_pages == 1


class Colliding(bytes):
    """Bytes that all have one hash."""

    def __hash__(self) -> int:
        return 1

    def __getitem__(self, part: Any) -> Any:
        return Colliding(super().__getitem__(part))


def test_other_tokens_of_the_same_hash_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.cache.prefix, "_bytes_of", lambda tokens: Colliding(tokens.tobytes()))
    cache, _ = filled([1, 1, 2, 2])
    assert [pages_found(cache, *p) for p in ((1, 1, 2, 2), (1, 1, 3, 3), (2, 2, 1, 1))] == [2, 1, 0]


def test_the_checkers_find_planted_defects() -> None:
    cache, tables = filled([1, 1, 2, 2], leave=False)
    cache.pages.hold(tables.pages_of(0)[:1])
    with pytest.raises(InvariantError, match=r"owned twice: .* stand in other rows"):
        tables.validate()
    cache, tables = filled([1, 1, 2, 2], leave=False)
    with pytest.raises(InvariantError, match="would write to pages that others may read"):
        cache.pages.check_writable(tables.pages_of(0))
    cache.pages.withdraw(tables.pages_of(0)[0])
    with pytest.raises(InvariantError, match="registered pages are not those of the tree"):
        cache.validate()
    shared = PageAllocator(4, lambda page: None)
    shared.allocate(1)
    with pytest.raises(InvariantError, match="1 pages are lost"):
        BlockTables(4, 1, 4, 2, shared).validate()


NEAR = 7


class WindowsMachine(RuleBasedStateMachine):
    """Without a head, and with a windowed group that has fewer pages than the target's others."""

    reach = Reach(3)

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(SIZE, PAGES, windows=[(self.reach, NEAR)])
        self.target = BlockTables(PAGES, ROWS, MOST, SIZE, self.cache.pages)
        self.near = WindowedTables(NEAR, ROWS, MOST, SIZE, self.reach, self.cache.windowed[0])
        self.notes: tuple[dict[int, tuple[int, ...]], ...] = ({}, {})
        self.rows: dict[int, tuple[int, ...]] = {}

    @precondition(lambda self: len(self.rows) < ROWS)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=MOST))
    def enter(self, tokens: list[int]) -> None:
        """A request begins with what is found, and what it finds is its own tokens'."""
        found = self.cache.find(np.array(tokens, np.int32), False)
        own = self.target.pages_for(len(tokens)) - len(found.pages)
        idle, pools = self.cache.num_idle(found), (self.cache.pages, self.cache.windowed[0])
        if any(own + held > pool.num_free for held, pool in zip(idle, pools, strict=True)):
            return
        row = min(set(range(ROWS)) - self.rows.keys())
        first = self.near.first_needed(len(found.pages) * SIZE)
        assert len(found.windowed[0]) == len(found.pages) - min(first, len(found.pages)), "what the next token sees"
        self.cache.hold(found)
        self.target.begin(row, found.pages)
        self.near.begin_behind(row, found.windowed[0], len(found.pages))
        self.rows[row] = tuple(tokens)
        for tables, notes, begin in ((self.target, self.notes[0], 0), (self.near, self.notes[1], first)):
            for i, page in enumerate(tables.pages_of(row)[begin:], begin):
                assert notes[page] == tuple(tokens[: (i + 1) * SIZE])
            tables.extend([row], [len(tokens)])
            written = tables.pages_of(row)[len(found.pages) :]
            tables.allocator.check_writable(written)  # type: ignore[attr-defined]
            notes.update({page: tuple(tokens[: (i + 1) * SIZE]) for i, page in enumerate(written, len(found.pages))})

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        """Then one like it finds all of its whole pages: its own last ones are what the next token sees."""
        row = data.draw(st.sampled_from(sorted(self.rows)))
        ids, whole = np.array(self.rows[row], np.int32), len(self.rows[row]) // SIZE
        self.cache.register(ids, self.target.pages_of(row)[:whole], [])
        self.cache.register_windowed(ids, 0, 0, self.near.pages_of(row)[:whole], False)
        found = self.cache.find(np.append(ids, np.int32(7)), False)
        assert len(found.pages) == found.num_pages == whole

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """The window moves to the row's end; what is freed was registered before."""
        row = data.draw(st.sampled_from(sorted(self.rows)))
        ids = np.array(self.rows[row], np.int32)
        first, pages = self.near.to_be_freed(row, len(ids))
        self.cache.register_windowed(ids, 0, first, pages, False)
        self.near.free_behind(np.array([row]), np.array([len(ids)]))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        del self.rows[row]
        self.target.release(row)
        self.near.release(row)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.find(np.zeros(MOST, np.int32), False).num_pages == 0
        assert not self.cache.windowed[0].registered_pages() and not self.cache.pages.registered_pages()

    @invariant()
    def every_page_has_its_holders(self) -> None:
        self.target.validate()
        self.near.validate()
        self.cache.validate()


class ChunksMachine(WindowsMachine):
    """The same in chunks of two pages: a request that begins with a chunk takes none of its pages."""

    reach = Reach(2 * SIZE, 2 * SIZE)


TestWindows, TestChunks = WindowsMachine.TestCase, ChunksMachine.TestCase
for _case in (TestWindows, TestChunks):
    _case.settings = settings(max_examples=examples(60), stateful_step_count=20, deadline=None)


WINDOW, CHUNK = Reach(4), Reach(4, 4)


def windowed_cache(num_windowed: int = PAGES, reach: Reach = WINDOW, **sizes: Any) -> PrefixCache:
    """Pages 1, 2, 3 of the target and of a group whose window reaches two pages back hold [1, 1], [2, 2], [3, 3]."""
    cache = PrefixCache(SIZE, PAGES, windows=[(reach, num_windowed)], **sizes)
    for pages in (cache.pages, cache.windowed[0]):
        assert pages.allocate(3) == [1, 2, 3]
    return cache


TOKENS = np.array([1, 1, 2, 2, 3, 3], np.int32)
NEXT = np.array([1, 1, 2, 2, 3, 3, 9], np.int32)


def test_what_was_forgotten_may_be_evicted_no_more() -> None:
    """After `clear` a page of a group of windows is as free as any, and nothing refers to it."""
    cache = windowed_cache()
    cache.register(TOKENS, [1, 2, 3], [])
    cache.register_windowed(TOKENS, 0, 0, [1, 2, 3], False)
    cache.clear()
    cache.validate()
    for pages in (cache.pages, cache.windowed[0]):
        pages.release([1, 2, 3])
        assert not idle_pages(pages) and len(pages.allocate(PAGES - 1)) == PAGES - 1
    cache.validate()


@pytest.mark.parametrize(
    ("gone", "left"), [([], 3), ([2], 1), ([1], 3), ([0, 1], 3), ([1, 2], 1), ([0, 2], 0), ([0, 1, 2], 0)]
)
def test_as_many_pages_are_found_as_have_all_that_the_next_token_sees(gone: list[int], left: int) -> None:
    """The window of 4 sees from page n - 1 and a token of page n - 2 … on, so of pages 1 … n the last one or two."""
    cache = windowed_cache()
    cache.register(TOKENS, [1, 2, 3], [])
    cache.register_windowed(TOKENS, 0, 0, [0 if i in gone else i + 1 for i in range(3)], False)
    right = max(n for n in range(4) if not set(gone) & set(range(max((2 * n - 3) // 2, 0), n)))
    found = cache.find(NEXT, False)
    assert (len(found.pages), found.num_pages) == (right, right if gone and right < 3 else 3)
    first = max((2 * right - 3) // 2, 0)
    assert found.windowed == (tuple(range(first + 1, right + 1)),)


@pytest.mark.parametrize(
    ("gone", "right"), [([], 3), ([2], 2), ([1], 3), ([0, 1], 3), ([1, 2], 2), ([0, 2], 2), ([0, 1, 2], 2)]
)
def test_a_request_that_begins_a_chunk_needs_none_of_its_pages(gone: list[int], right: int) -> None:
    """Chunks of two pages: after one or three of them the next token sees the last one, after two it sees none."""
    cache = windowed_cache(reach=CHUNK)
    cache.register(TOKENS, [1, 2, 3], [])
    cache.register_windowed(TOKENS, 0, 0, [0 if i in gone else i + 1 for i in range(3)], False)
    found = cache.find(NEXT, False)
    assert len(found.pages) == right and found.windowed == (((3,) if right == 3 else ()),)


def test_windowed_pages_are_registered_from_where_they_begin() -> None:
    cache = windowed_cache()
    cache.register(TOKENS, [1, 2, 3], [])
    cache.register_windowed(TOKENS, 0, 1, [2, 3], False)
    assert cache.windowed[0].registered_pages() == {2, 3} and cache.find(NEXT, False).windowed == ((2, 3),)


def test_windowed_pages_that_end_with_none_add_nothing() -> None:
    cache = windowed_cache()
    cache.register_windowed(TOKENS, 0, 0, [1, 0, 0], False)
    cache.validate()
    assert cache.windowed[0].registered_pages() == {1}


@pytest.mark.parametrize("held", [True, False])
def test_a_windowed_page_takes_the_place_of_an_idle_one_alone(held: bool) -> None:
    cache = windowed_cache()
    cache.register(TOKENS, [1, 2, 3], [])
    cache.register_windowed(TOKENS, 0, 0, [1, 2, 3], False)
    if not held:
        cache.windowed[0].release([3])
    new = cache.windowed[0].allocate(1)
    cache.register_windowed(TOKENS, 0, 2, new, False)
    cache.validate()
    assert cache.find(NEXT, False).windowed[0][-1] == (3 if held else new[0])
    assert cache.windowed[0].registered_pages() == ({1, 2, 3} if held else {1, 2, *new})


@pytest.mark.parametrize("held", [True, False])
def test_a_page_takes_the_place_of_an_idle_one_alone(held: bool) -> None:
    """So a row that holds what it began with is not left with pages that nobody finds."""
    cache = PrefixCache(SIZE, PAGES)
    old, new = cache.pages.allocate(1), cache.pages.allocate(1)
    cache.register(TOKENS, old, [])
    if not held:
        cache.pages.release(old)
    cache.register(TOKENS, new, [])
    cache.validate()
    assert cache.find(NEXT, False).pages == tuple(old if held else new)
    assert (old[0] in free_pages(cache.pages)) is not held


def test_a_page_of_the_target_takes_its_windowed_pages_along_when_nothing_else_needs_them() -> None:
    """Found without it they are of no use; beside another continuation they are."""
    cache = PrefixCache(SIZE, 4, 4, windows=[(WINDOW, 6)])
    assert cache.head_pages is not None
    for last, number in ((5, 1), (6, 2)):
        page, head = cache.pages.allocate(1), cache.head_pages.allocate(1)
        cache.register(np.array([1, 1, last], np.int32), page, head)
        assert page == head == [number]
    (near,) = cache.windowed[0].allocate(1)
    cache.register_windowed(np.array([1, 1, 5], np.int32), 0, 0, [near], False)
    for pages in (cache.pages, cache.head_pages, cache.windowed[0]):
        pages.release([1] if pages is cache.windowed[0] else [1, 2])
    cache.pages.allocate(2)  # evicts one of the two
    cache.validate()
    assert cache.windowed[0].registered_pages() == {near}
    cache.pages.allocate(1)  # and the other
    cache.validate()
    assert not cache.windowed[0].registered_pages() and near in free_pages(cache.windowed[0])


def test_windowed_pages_alone_are_found_no_more_when_they_go() -> None:
    """Pages of a row that was read while the target's others were another's: their nodes go with them."""
    cache = windowed_cache(num_windowed=5)
    cache.register_windowed(TOKENS, 0, 0, [0, 0, 3], False)
    cache.validate()
    cache.windowed[0].release([1, 2, 3])
    cache.windowed[0].allocate(4)
    cache.validate()
    assert cache.find(NEXT, False).num_pages == 0


def test_what_a_request_without_drafts_uses_is_not_evicted_before_what_nobody_does() -> None:
    """It reads a page that a head has read into one of its own; that which others find counts as used now."""
    cache = PrefixCache(SIZE, 6, 6)
    assert cache.head_pages is not None
    for tokens in ([1, 1, 5], [2, 2, 5]):
        page, head = cache.pages.allocate(1), cache.head_pages.allocate(1)
        cache.register(np.array(tokens, np.int32), page, head)
        cache.pages.release(page)
        cache.head_pages.release(head)
    assert idle_pages(cache.pages) == [1, 2]
    own = cache.pages.allocate(1)
    cache.register(np.array([1, 1, 7], np.int32), own, [])
    assert cache.pages.registered_pages() == {1, 2}, "of no use beside one that serves a request with drafts, too"
    assert idle_pages(cache.pages) == [2, 1]


def test_pages_that_only_go_on_differently_count_as_found() -> None:
    """With three tokens on which a head's entry depends, two pages of two are read again, if a head has read them."""
    cache = PrefixCache(SIZE, PAGES, PAGES, 3)
    assert cache.head_pages is not None
    ids = np.array([1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6], np.int32)
    pages, heads = cache.pages.allocate(5), cache.head_pages.allocate(4)
    cache.register(ids, pages, heads)
    found = cache.find(np.array([1, 1, 2, 2, 3, 3, 4, 4], np.int32), True)
    assert (len(found.pages), found.num_pages) == (2, 4)
    found = cache.find(np.append(ids, [7, 8, 9]).astype(np.int32), True)
    assert (len(found.pages), found.num_pages) == (4, 4), "the fifth has been read by no head"
    assert cache.find(ids, False).num_pages == 5


def test_variants_share_nothing() -> None:
    cache = PrefixCache(SIZE, PAGES)
    pages = cache.pages.allocate(3)
    cache.register(TOKENS, pages, [], variant=1)
    assert cache.find(NEXT, False).num_pages == 0 and cache.find(NEXT, False, variant=1).num_pages == 3


def test_idle_pages_that_are_found_are_counted_in_every_group() -> None:
    cache = windowed_cache()
    cache.register(TOKENS, [1, 2, 3], [])
    cache.register_windowed(TOKENS, 0, 0, [1, 2, 3], False)
    found = cache.find(NEXT, False)
    assert cache.num_idle(found) == [0, 0]
    cache.pages.release([1, 2, 3])
    cache.windowed[0].release([2, 3])
    assert cache.num_idle(found) == [3, 2]
