"""What the prefix cache finds is what was written for the same tokens; who holds which page; who is evicted first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from fakes import examples
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import attention.cache.prefix
from attention.cache.pages import BlockTables
from attention.cache.prefix import NOTHING, Found, PrefixCache
from attention.cache.shared import SharedPages
from attention.errors import InvariantError, OutOfPagesError

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
        assert self.cache.pages.idle_pages() == []

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
    assert after[0] == before[0] and after[1] != before[1] and len(cache.pages.free_pages()) == PAGES - 4
    assert cache.pages.idle_pages() == list(after[::-1])


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
    shared = SharedPages(4, lambda page: None)
    shared.allocate(1)
    with pytest.raises(InvariantError, match="1 pages are lost"):
        BlockTables(4, 1, 4, 2, shared).validate()
