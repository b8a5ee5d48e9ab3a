"""Prefixes: which pages requests take from the prefix cache, and which they add to it.

What is cached, and when:

- The pages of a prompt are registered while it is read in chunks: before each schedule, those that committed rounds
  have written whole, and that the head has read (or will, in the draft loop that this schedule starts, before any round
  that the schedule lets in).
- The pages of generated tokens are registered when the request gives up its row: at its end, at an abort, at a
  preemption. So a round that only decodes does nothing here. Rejected drafts are in no page: only committed tokens are.
- A request without drafts leaves no pages of the head; one that drafts takes only pages that a head has read.
- Pages of windowed groups are registered with the others; while a prompt is still being read, its pages are registered
  before they are freed.
- After a failed or interrupted round rows and pages are made anew, and nothing is cached.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from attention.cache.pages import BlockTables
from attention.cache.prefix import NOTHING, Found, PrefixCache
from attention.cache.windowed import WindowedTables
from attention.hf.gate import gate_of
from drafters.loops.base import AnyLoop, SharesPages
from specdec.config import EngineConfig
from specdec.errors import InvalidInputError
from specdec.requests.request import Request
from specdec.rounds.rows import RowTable, Schedule
from specdec.user_warnings import warn_user
from specdec.wrapped.changes import WeightVersions
from specdec.wrapped.target import Target


class PrefixValidity:
    """Decides at every call whether cached keys and values still belong to the model's weights, settings and hooks."""

    def __init__(self, target: Target, versions: WeightVersions | None, config: EngineConfig) -> None:
        """versions: detects changes of target and head; None without a prefix cache."""
        self._target = target
        self._versions = versions
        self._kept = config.keep_prefixes
        self._warned = False

    @property
    def unseen(self) -> str:
        """Why pages are kept within one call only, in words; "" when every change of the model can be detected."""
        if self._versions is None or not self._versions.unseen or self._kept:
            return ""
        return f"{self._versions.unseen} may depend on what nobody can see"

    def ended(self) -> bool:
        """Whether the cache must be emptied: the model has changed since the last call, or changes cannot be detected.
        See `WeightVersions`."""
        if self._versions is None:
            return False
        with gate_of(self._target.hf_model.config).held():  # specdec's own forwards change some settings meanwhile
            return self._versions.changed() or bool(self.unseen)

    def warn_once(self) -> None:
        """Issue one SpecdecWarning if changes of the model cannot be detected."""
        if self.unseen and not self._warned:
            self._warned = True
            warn_user(
                f"pages of the prefix cache are kept within one call alone: {self.unseen}. "
                "enable_prefix_caching=True keeps them if the hook always computes the same, False is silent"
            )


class Prefixes:
    """The prefix cache of one scheduler's rows.

    A row *owes* pages while it reads tokens whose pages it has not registered yet: waiting requests that begin with
    the same tokens wait for them, rather than read them, too.

    owing: the rows that owe pages, each with how many it has registered.
    """

    def __init__(
        self,
        cache: PrefixCache,
        table: RowTable,
        target_pages: BlockTables,
        head_pages: BlockTables | None,
        windowed_pages: Sequence[WindowedTables] = (),
    ) -> None:
        """Block tables over the cache's allocators; windowed_pages: tables of the windowed groups."""
        self.cache = cache
        self._table = table
        self._target_pages = target_pages
        self._head_pages = head_pages
        self._windowed_pages = tuple(windowed_pages)
        self._num_following = cache.num_following
        self._sharing = set[int]()
        self.owing: dict[int, int] = {}

    def find(self, request: Request, prefill: int) -> Found:
        """The cached pages for a waiting request that reads `prefill` tokens before it decodes."""
        if not request.params.cache_prefix:
            return NOTHING
        tokens = request.committed[: min(prefill, request.shareable)]
        drafts = self._drafts(request.num_drafts)
        return self.cache.find(tokens, drafts, request.variant)

    def worth_waiting(self, request: Request, prefill: int, found: Found) -> bool:
        """Whether a row is computing pages now that this request could use, beyond those found."""
        if not self.owing or not request.params.cache_prefix:
            return False
        prefill = min(prefill, request.shareable)
        drafts = self._drafts(request.num_drafts)
        tokens = request.committed[:prefill]
        rows = self._table
        taken = len(found.pages)
        begin = taken * self.cache.page_size
        end = (taken + 1) * self.cache.page_size
        for row, registered in self.owing.items():
            stop = min(prefill, int(rows.prefill[row]))
            if rows.variant[row] != request.variant:
                continue
            if registered > taken or stop < end or (drafts and not rows.drafts[row]):
                continue
            if (tokens[begin:end] != rows.tokens[row, begin:end]).any():
                continue
            differs = np.flatnonzero(tokens[:stop] != rows.tokens[row, :stop])
            common = int(differs[0]) if len(differs) else stop
            if self.cache.num_shared(common, prefill, drafts) > taken:
                return True
        return False

    def enter(self, request: Request, found: Found) -> None:
        """A request got a row: it holds the found pages, and will register the pages that it computes."""
        row = request.row
        if not request.params.cache_prefix:
            return
        self.cache.hold(found)
        self._target_pages.begin(row, found.pages)
        if self._head_pages is not None:
            self._head_pages.begin(row, found.head_pages)
        # Not strict: an empty `Found` lists no windowed groups at all.
        for tables, pages in zip(self._windowed_pages, found.windowed, strict=False):
            tables.begin_behind(row, pages, len(found.pages))
        self._sharing.add(row)
        if self._due(row) > len(found.pages):
            self.owing[row] = len(found.pages)

    def register_read(self, schedule: Schedule) -> None:
        """Register the pages of prompt tokens that rows have computed.

        Args:
            schedule: the rows of the next round that run already, whose pages are reserved. Before any later round the
                head reaches the end of the committed tokens of rows with drafts, and of rows that continue reading.
        """
        table = self._table
        rows = schedule.rows
        head_reads = rows[(schedule.num_drafts > 0) | table.prefilling(rows)]
        table.head_computed[head_reads] = table.computed[head_reads]
        for row, registered in list(self.owing.items()):
            target, head = self.final_pages(row)
            final = min(target, head) if self._drafts(int(table.drafts[row])) else target
            if final > registered:
                self._register(row, final, final)
                self.owing[row] = final
            if final >= self._due(row):
                del self.owing[row]

    def keep_windowed(self, rows: ndarray) -> None:
        """Register windowed pages of unfinished prompts before they are freed behind these rows' windows: a request
        may share a shorter prefix than these rows have read."""
        if not self.owing:
            return
        for row in set(rows.tolist()) & self.owing.keys():
            computed = int(self._table.computed[row])
            tokens = self._tokens(row)
            for group, tables in enumerate(self._windowed_pages):
                first, pages = tables.to_be_freed(row, computed)
                self.cache.register_windowed(tokens, group, first, pages, int(self._table.variant[row]))

    def leave(self, row: int) -> None:
        """A row is about to give up its pages: register all that are final."""
        if row not in self._sharing:
            return
        self._sharing.remove(row)
        self.owing.pop(row, None)
        target, head = self.final_pages(row)
        self._register(row, target, min(target, head))

    def clear(self) -> None:
        """Forget everything, and register nothing of rows that run now."""
        self.cache.clear()
        self._sharing.clear()
        self.owing.clear()

    def check_writable(self, rows: ndarray) -> None:
        """Check that the next round of these rows writes only to pages that no other row uses.

        Raises:
            InvariantError: it would write to a page that is registered, or that another row holds.
        """
        size = self.cache.page_size
        table = self._table
        allocators = (self.cache.pages, *self.cache.windowed)
        for row in rows.tolist():
            begin = int(table.computed[row])
            for allocator, tables in zip(allocators, (self._target_pages, *self._windowed_pages), strict=True):
                allocator.check_writable(tables.pages_of(row)[begin // size :])
            if self._head_pages is not None and self.cache.head_pages is not None:
                begin = max(begin - self._num_following + 1, int(table.begin[row]))  # of the last module
                self.cache.head_pages.check_writable(self._head_pages.pages_of(row)[begin // size :])

    def final_pages(self, row: int) -> tuple[int, int]:
        """Numbers of a row's target pages and head pages whose entries will not change any more.

        A row whose last tokens were dropped at an eos id has computed more than is committed. Module M-1's entry at p
        is there once the states before p + M are read.
        """
        table = self._table
        size = self.cache.page_size
        committed = int(table.length[row])
        target = min(int(table.computed[row]), committed)
        head = min(int(table.head_computed[row]), committed - 1) - self._num_following + 1
        return target // size, max(head, 0) // size

    def _drafts(self, num_drafts: int) -> bool:
        return num_drafts > 0 and self._head_pages is not None

    def _due(self, row: int) -> int:
        """Pages that a row can register once it has read its prompt."""
        following = self._num_following if self._drafts(int(self._table.drafts[row])) else 1
        return max(int(self._table.prefill[row]) - following + 1, 0) // self.cache.page_size

    def _register(self, row: int, num_pages: int, num_head_pages: int) -> None:
        heads = []
        if self._drafts(int(self._table.drafts[row])) and self._head_pages is not None:
            heads = self._head_pages.pages_of(row)[:num_head_pages]
        tokens = self._tokens(row)
        variant = int(self._table.variant[row])
        pages = self._target_pages.pages_of(row)[:num_pages]
        self.cache.register(tokens, pages, heads, variant)
        for group, tables in enumerate(self._windowed_pages):
            self.cache.register_windowed(tokens, group, 0, tables.pages_of(row)[:num_pages], variant)

    def _tokens(self, row: int) -> ndarray:
        """[n] int32 committed tokens."""
        return self._table.tokens[row, : self._table.length[row]]


def prefix_cache(config: EngineConfig, loop: AnyLoop | None) -> PrefixCache | None:
    """The prefix cache of an engine with this draft loop; None where it is off.

    Raises:
        InvalidInputError: the draft loop cannot share pages, see `choose_prefix_caching`.
    """
    if not config.enable_prefix_caching:
        return None
    windows = [(pool.reach, pool.num_pages) for pool in config.windowed]
    if loop is None:
        return PrefixCache(config.page_size, config.num_pages, windows=windows)
    if not isinstance(loop, SharesPages):
        raise InvalidInputError(f"enable_prefix_caching=True: not with {loop.name}; give False")
    return PrefixCache(config.page_size, config.num_pages, config.num_head_pages, loop.num_following, windows)
