"""What rows leave in the prefix cache, what requests take from it, and for whom they wait: without any model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attention.cache.pages import BlockTables
from attention.cache.prefix import NOTHING, Found, PrefixCache
from attention.cache.windowed import WindowedTables
from attention.errors import InvariantError
from attention.spec import Reach
from specdec.engine.prefixes import Prefixes
from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import RowTable, Schedule

SIZE, ROWS, PAGES, MOST, WINDOW = 4, 3, 20, 40, Reach(6)
TEXT = list(range(10, 10 + MOST))


class Made:
    """Row table, pages and prefix cache of a model with a head; its requests read what they are told to."""

    def __init__(self, following: int = 1, windows: bool = False) -> None:
        self.cache = PrefixCache(SIZE, PAGES, PAGES, following, [(WINDOW, PAGES)] if windows else ())
        self.table = RowTable(ROWS, MOST)
        self.target = BlockTables(PAGES, ROWS, MOST, SIZE, self.cache.pages)
        self.head = BlockTables(PAGES, ROWS, MOST, SIZE, self.cache.head_pages)
        self.windowed = [WindowedTables(PAGES, ROWS, MOST, SIZE, WINDOW, pages) for pages in self.cache.windowed]
        self.prefixes = Prefixes(self.cache, self.table, self.target, self.head, self.windowed)

    def request(self, tokens: list[int], drafts: int = 3, long: bool = False, **params: Any) -> Any:
        committed = np.array(tokens, np.int32)
        own = SamplingParams(**params)
        place = {"variant": int(long), "row": -1, "shareable": len(tokens)}
        return SimpleNamespace(params=own, committed=committed, num_drafts=drafts, **place)

    def found(self, tokens: list[int], drafts: int = 3, **options: Any) -> Found:
        return self.prefixes.find(self.request(tokens, drafts, **options), len(tokens))

    def enter(self, tokens: list[int], drafts: int = 3, **options: Any) -> Any:
        """A request gets a row, with pages for all of its tokens."""
        request = self.request(tokens, drafts, **options)
        found, params = self.prefixes.find(request, len(tokens)), request.params
        begin = len(found.pages) * SIZE
        request.row = self.table.open(request.committed, MOST, drafts, 1, params, begin=begin, variant=request.variant)
        self.prefixes.enter(request, found)
        request.found = found
        for tables in (self.target, *self.windowed, *([self.head] if drafts else [])):
            tables.extend([request.row], [len(tokens) + 4])
        return request

    def read(self, request: Any, computed: int) -> None:
        """The prompt was read up to there by committed rounds, and goes on."""
        self.table.computed[request.row] = computed
        one = np.ones(1, np.int64)
        self.prefixes.register_read(Schedule(np.array([request.row]), one, 0 * one))

    def end(self, request: Any, head_computed: int | None = None) -> None:
        """All was read, one more token committed, and the row goes."""
        row = request.row
        self.table.computed[row] = self.table.length[row]
        self.table.head_computed[row] = self.table.length[row] if head_computed is None else head_computed
        self.table.length[row] += 1
        self.leave(request)

    def leave(self, request: Any) -> None:
        self.prefixes.leave(request.row)
        for tables in (self.target, *self.windowed, self.head):
            tables.release(request.row)
        self.table.close(request.row)
        self.cache.validate()


@pytest.mark.parametrize("windows", [False, True])
def test_rows_that_run_while_all_is_forgotten_leave_nothing(windows: bool) -> None:
    """Their pages were written by the old weights; and nobody waits for them."""
    made = Made(windows=windows)
    running = made.enter(TEXT[:13])
    made.read(running, 8)
    other = made.enter(TEXT[20:33])
    assert made.found(TEXT[:13]).num_pages == 2
    assert made.prefixes.worth_waiting(made.request(TEXT[20:33]), 13, NOTHING)
    made.prefixes.clear()
    assert made.found(TEXT[:13]) == Found(windowed=((),) * windows)
    for tokens in (TEXT[:13], TEXT[20:33]):
        assert not made.prefixes.worth_waiting(made.request(tokens), 13, NOTHING)
    made.end(other)
    made.read(running, 13)
    made.end(running)
    assert not made.cache.pages.registered_pages() and made.found(TEXT[:13]).num_pages == 0
    after = made.enter(TEXT[:13])
    made.end(after)
    assert made.found(TEXT[:13]).num_pages == 3, "and those that come after do"


@pytest.mark.parametrize(
    ("length", "computed", "head_computed", "following", "pages"),
    [
        (9, 8, 8, 1, (2, 2)),  # the token at 8 is committed: the head's entry at 7 is final
        (8, 11, 11, 1, (2, 1)),  # ended inside its drafts at a page's border: no committed token follows its last one
        (9, 11, 11, 1, (2, 2)),
        (11, 12, 12, 1, (2, 2)),  # ended one token before a page's border: the token there was dropped
        (13, 12, 8, 1, (3, 2)),  # the head is behind
        (9, 8, 8, 2, (2, 1)),
        (10, 11, 11, 2, (2, 2)),
        (2, 1, 1, 3, (0, 0)),
    ],
)
def test_final_pages(length: int, computed: int, head_computed: int, following: int, pages: tuple[int, int]) -> None:
    made = Made(following)
    row = made.table.open(np.arange(length), MOST, 3, 1, SamplingParams())
    made.table.computed[row], made.table.head_computed[row] = computed, head_computed
    assert made.prefixes.final_pages(row) == pages


def test_a_prompt_is_registered_while_it_is_read_as_far_as_target_and_head_have_read_it() -> None:
    made = Made()
    reading = made.enter(TEXT[:14])
    found = []
    for computed in (3, 4, 5, 8, 12):
        made.read(reading, computed)
        found.append((made.found(TEXT[:14], 0).num_pages, made.found(TEXT[:14]).num_pages))
    assert found == [(0, 0), (1, 1), (1, 1), (2, 2), (3, 3)]


def test_a_head_that_is_behind_holds_back_the_pages_of_a_row_that_drafts() -> None:
    """Nothing is scheduled that the head would read: pages of the target alone would be of no use to it."""
    made = Made()
    reading = made.enter(TEXT[:14])
    made.table.computed[reading.row], made.table.head_computed[reading.row] = 12, 4
    none = np.zeros(0, np.int64)
    made.prefixes.register_read(Schedule(none, none, none))
    assert made.found(TEXT[:14], 0).num_pages == 1
    made.table.drafts[reading.row] = 0
    made.prefixes.register_read(Schedule(none, none, none))
    assert made.found(TEXT[:14], 0).num_pages == 3


def test_a_row_leaves_no_more_pages_of_the_head_than_it_has_read() -> None:
    made = Made()
    made.end(made.enter(TEXT[:12]), head_computed=5)
    assert made.found(TEXT[:14], 0).num_pages == 3 and len(made.found(TEXT[:14]).head_pages) == 1


def test_a_request_that_wants_no_cache_takes_and_leaves_nothing() -> None:
    made = Made()
    alone = made.enter(TEXT[:13], cache_prefix=False)
    made.read(alone, 12)
    made.end(alone)
    assert made.found(TEXT[:13]) == Found()
    made.end(made.enter(TEXT[:13]))
    assert made.found(TEXT[:13]).num_pages == 3
    assert made.found(TEXT[:13], cache_prefix=False) == NOTHING
    waiting = made.request(TEXT[:13], cache_prefix=False)
    made.enter(TEXT[20:33])
    assert not made.prefixes.worth_waiting(waiting, 13, NOTHING)


def test_a_row_used_by_a_request_without_cache_after_one_with_it_leaves_nothing_of_its_own() -> None:
    made = Made()
    made.end(made.enter(TEXT[:13]))
    before = made.cache.pages.registered_pages()
    made.end(made.enter(TEXT[20:33], cache_prefix=False))
    assert made.cache.pages.registered_pages() == before


def test_what_long_factors_wrote_is_found_by_requests_with_long_factors_alone() -> None:
    made = Made()
    made.end(made.enter(TEXT[:13], long=True))
    assert made.found(TEXT[:13]).num_pages == 0 and made.found(TEXT[:13], long=True).num_pages == 3


WAITING: dict[str, tuple[list[int], dict[str, Any], bool]] = {
    "the same": (TEXT[:13], {}, True),
    "without drafts": (TEXT[:13], {"drafts": 0}, True),
    "begins alike": ([*TEXT[:9], 1, 2, 3, 4], {}, True),
    "goes on differently right after a page": ([*TEXT[:4], 1, 2, 3, 4], {}, False),
    "goes on differently right after a page, without drafts": ([*TEXT[:4], 1, 2, 3, 4], {"drafts": 0}, True),
    "other tokens": (TEXT[20:33], {}, False),
    "too short": (TEXT[:4], {}, False),
    "of long factors": (TEXT[:13], {"long": True}, False),
}


@pytest.mark.parametrize("name", WAITING)
def test_who_waits_for_a_row_that_reads_the_same(name: str) -> None:
    tokens, options, waits = WAITING[name]
    made = Made()
    made.enter(TEXT[:16])
    request = made.request(tokens, **options)
    assert made.prefixes.worth_waiting(request, len(tokens), NOTHING) is waits


def test_who_drafts_does_not_wait_for_a_row_that_does_not() -> None:
    made = Made()
    made.enter(TEXT[:16], drafts=0)
    assert not made.prefixes.worth_waiting(made.request(TEXT[:16]), 16, NOTHING)
    assert made.prefixes.worth_waiting(made.request(TEXT[:16], 0), 16, NOTHING)


def test_a_request_waits_for_pages_beyond_those_it_found_and_until_they_are_there() -> None:
    made = Made()
    reading, waiting = made.enter(TEXT[:16]), made.request(TEXT[:16])
    waits = []
    for computed in (4, 8, 12, 16):
        made.read(reading, computed)
        found = made.prefixes.find(waiting, 16)
        waits.append((found.num_pages, made.prefixes.worth_waiting(waiting, 16, found)))
    assert waits == [(1, True), (2, True), (3, False), (3, False)], "the last page has no token of the prompt after it"


def test_nobody_waits_for_a_row_that_began_with_all_that_it_can_register() -> None:
    """Or that has left."""
    made = Made()
    made.end(made.enter(TEXT[:13]))
    again = made.enter(TEXT[:13])
    beyond = made.request(TEXT[:30])
    assert not made.prefixes.worth_waiting(beyond, 30, Found(2, (1, 2), (1, 2)))
    made.leave(again)
    gone = made.enter(TEXT[20:33])
    made.leave(gone)
    assert not made.prefixes.worth_waiting(made.request(TEXT[20:33]), 13, NOTHING)


def test_modules_owe_no_page_whose_last_entries_need_tokens_after_the_prompt() -> None:
    """Two modules: the entry at 7 needs the tokens at 8 and 9; a prompt of 8 tokens has one page to register."""
    made = Made(following=2)
    reading = made.enter(TEXT[:8])
    made.read(reading, 5)
    for drafts in (3, 0):
        waiting = made.request(TEXT[:20], drafts)
        assert not made.prefixes.worth_waiting(waiting, 20, made.prefixes.find(waiting, 20))
    made.leave(reading)
    again = made.enter(TEXT[:8])
    assert len(again.found.pages) == 1, "all that it may register"
    assert not made.prefixes.worth_waiting(made.request(TEXT[:20], 0), 20, Found(1, (1,)))


def test_nobody_waits_for_a_page_that_is_registered() -> None:
    """It was not found, because other pages are gone that the next token would see: it will not be."""
    made = Made()
    reading = made.enter(TEXT[:16])
    made.read(reading, 9)
    assert not made.prefixes.worth_waiting(made.request(TEXT[:16]), 16, Found(1, (1,), (1,)))
    assert made.prefixes.worth_waiting(made.request(TEXT[:16]), 16, Found(2, (1, 2), (1, 2)))


def test_pages_behind_a_window_are_registered_before_they_are_freed() -> None:
    """A request that begins with less than the row has read needs those that its own next token sees."""
    made = Made(windows=True)
    reading = made.enter(TEXT[:21])
    made.read(reading, 8)
    made.table.computed[reading.row] = 20
    rows = np.array([reading.row])
    made.prefixes.keep_windowed(rows)
    made.windowed[0].free_behind(rows, made.table.computed[rows])
    made.read(reading, 20)
    for num, seen in ((9, 2), (13, 2), (21, 2)):
        found = made.found([*TEXT[:num], 1, 2], 0)
        assert found.num_pages == num // SIZE and len(found.windowed[0]) == seen


def test_the_check_looks_at_every_page_that_the_next_round_writes() -> None:
    """Of the target from the first unread token on, of the head as far back as its last module writes."""
    made = Made(following=3)
    row = made.enter(TEXT[:10]).row
    made.table.computed[row] = 8
    made.prefixes.check_writable(np.array([row]))
    for tables, place, refused in (
        (made.target, 1, False),
        (made.target, 2, True),
        (made.head, 0, False),
        (made.head, 1, True),  # module 2 writes from position 6 on
    ):
        page, allocator = tables.pages_of(row)[place], tables.allocator
        allocator.hold([page])  # type: ignore[attr-defined]
        if refused:
            with pytest.raises(InvariantError, match="would write to pages"):
                made.prefixes.check_writable(np.array([row]))
        else:
            made.prefixes.check_writable(np.array([row]))
        allocator.release([page])
