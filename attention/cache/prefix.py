"""The prefix cache: a tree of pages by their tokens, so that requests share the pages of common prefixes.

A page is found by all token ids from the first to its last: each node is one page of tokens, its children are found by
the next page's ids, which are compared, not only hashed. Each variant has a separate tree. All use the same weights
(call `PrefixCache.clear` when these change).

A head's entries at the last positions of a page depend on the next page's first `num_following` tokens (1 for a head
that pairs the state at p with the token at p+1; M for M modules). So a node has a page of the target and a page of the
head *for each* such continuation, always a pair. A request that drafts takes the pair with its continuation. For the
last page that it shares with others, this pair may be missing; then the request recomputes that page into a new pair. A
request without drafts needs only a target page: it takes any pair's, and registers target pages without head pages.

A node also has a page in each windowed group unless that page was evicted: windowed groups keep only the pages that
their rows may need. A request reuses the longest run of pages for which every group still has all keys that the next
token sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from attention.cache.pages import PageAllocator, PageIds
from attention.cache.windowed import first_needed_page
from attention.checking import require
from attention.spec import Windows

_NO_PAGE = 0
"""The null page is never registered."""
_ANY = b""
"""The continuation of a page that the head has not read: it serves whatever follows."""
_ID_BYTES = 4
Pages = tuple[int, ...]


class _Node:
    """One page of tokens after those of its parents; `entries` by the bytes of the tokens that follow.

    windowed: its page in each windowed group; 0: none.
    """

    __slots__ = ("children", "entries", "key", "parent", "windowed")

    def __init__(self, parent: _Node | None, key: bytes, num_windowed: int) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[bytes, _Node] = {}
        self.entries: dict[bytes, _Entry] = {}
        self.windowed = [_NO_PAGE] * num_windowed

    @property
    def is_used(self) -> bool:
        """Whether it has anything to find, or leads to it."""
        return bool(self.entries or self.children or any(self.windowed))

    @property
    def has_read(self) -> bool:
        """Whether a head has read these tokens, whatever followed them."""
        return any(entry.head for entry in self.entries.values())


@dataclass(eq=False, slots=True)
class _Entry:
    """A target page and the head page (0: none) that matches this continuation."""

    node: _Node
    following: bytes
    page: int
    head: int


@dataclass(frozen=True)
class Found:
    """The cached prefix of a request: `num_pages` full pages, from the first on.

    pages, head_pages: target and head pages that the request begins with. The remaining pages found are recomputed: at
    most one, except for pages shorter than `num_following`.
    windowed: for each windowed group, the trailing pages that the next token sees.
    """

    num_pages: int = 0
    pages: Pages = ()
    head_pages: Pages = ()
    windowed: tuple[Pages, ...] = ()


NOTHING = Found()


class PrefixCache:
    """A tree of token pages over the target's pages and, with a head, the head's.

    A cached head page always accompanies a cached target page; a row owns a head page only if it owns the matching
    target page. So a head pool that is large enough without a cache never has to evict, and only the target's pool
    decides.

    Attributes:
        pages: allocator of target pages; head_pages: allocator of head pages, None without a head.
        page_size: tokens a page. num_following: see `__init__`.
        windowed: allocators of the windowed groups.
    """

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        num_head_pages: int | None = None,
        num_following: int = 1,
        windows: Windows = (),
    ) -> None:
        """
        Args:
            num_following: tokens after a position on which the head's entry there depends, at least 1.
            windows: reach and number of pages of each windowed group.
        """
        self.page_size = page_size
        self.num_following = num_following
        self.pages = PageAllocator(num_pages, lambda page: self._forget(self._entries[page]))
        self.head_pages: PageAllocator | None = None
        if num_head_pages is not None:
            self.head_pages = PageAllocator(num_head_pages, lambda page: self._forget(self._head_entries[page]))
        self._reaches = tuple(reach for reach, _ in windows)
        self.windowed = tuple(
            PageAllocator(count, partial(self._forget_windowed, g)) for g, (_, count) in enumerate(windows)
        )
        self._windowed_nodes: tuple[dict[int, _Node], ...] = tuple({} for _ in windows)
        self._roots: dict[int, _Node] = {}
        self._entries: dict[int, _Entry] = {}
        self._head_entries: dict[int, _Entry] = {}

    def find(self, tokens: np.ndarray, with_head: bool, variant: int = 0) -> Found:
        """What a request begins with that reads these tokens [n] int32, of which the last must be read in any case.

        with_head: whether it drafts, so that only pages that the head has read, too, are found. variant: the tree to
        search.
        """
        taken = []
        node, most = self._root(variant), self.num_shared(len(tokens), len(tokens), with_head)
        keys = self._keys(tokens)
        following = self._following(tokens, most) if with_head else []
        for i, key in enumerate(keys[:most]):
            child = node.children.get(key)
            if child is None or not child.entries:
                break
            entry = child.entries.get(following[i]) if with_head else next(iter(child.entries.values()))
            if entry is None:
                break
            taken.append(entry)
            node = child
        num_pages = len(taken) + self._read_again(node, keys[len(taken) :], with_head)
        # The most of these pages after which the next token finds, in every group, all that it sees.
        most = len(taken)
        while most:
            seen = self._windowed_pages(taken[:most])
            lacking = [most - len(pages) + i for pages in seen for i, page in enumerate(pages) if not page]
            if not lacking:
                break
            most = max(lacking)
        if most < len(taken):
            num_pages, taken = most, taken[:most]
        heads = tuple(entry.head for entry in taken) if with_head else ()
        return Found(num_pages, tuple(entry.page for entry in taken), heads, self._windowed_pages(taken))

    def num_shared(self, num_common: int, num_tokens: int, with_head: bool) -> int:
        """Pages that a request of `num_tokens` tokens takes of one with which it has the first num_common in common.

        The last token's position is read in any case; with a head, so are those on which the head's entries in the
        pages before depend.

        >>> cache = PrefixCache(16, 9, 9)
        >>> [cache.num_shared(*lens, True) for lens in ((50, 90), (48, 90), (49, 49))]
        [3, 2, 3]
        >>> [cache.num_shared(*lens, False) for lens in ((50, 90), (48, 90), (48, 48))]
        [3, 3, 2]
        """
        common = num_common - self.num_following if with_head else min(num_common, num_tokens - 1)
        return max(common, 0) // self.page_size

    def hold(self, found: Found) -> None:
        """Hold the pages found for a row."""
        self.pages.hold(found.pages)
        if self.head_pages is not None:
            self.head_pages.hold(found.head_pages)
        for allocator, pages in zip(self.windowed, found.windowed, strict=False):
            allocator.hold(pages)

    def num_idle(self, found: Found) -> list[int]:
        """Number of pages in `found` that count as free until it is held, for each of the target's groups."""
        of_windows = (a.num_idle(pages) for a, pages in zip(self.windowed, found.windowed, strict=False))
        return [self.pages.num_idle(found.pages), *of_windows]

    def register_windowed(self, tokens: np.ndarray, group: int, first: int, pages: PageIds, variant: int) -> None:
        """Make pages of a windowed group available to other requests. Idempotent.

        A page that the cache already has for the same tokens stays, unless no row holds it.

        Args:
            tokens: [n] int32, the row's committed tokens; all of these pages are among them.
            first: logical index of pages[0]. pages: pages of the row, all entries final; 0: none.
        """
        node = self._root(variant)
        allocator = self.windowed[group]
        nodes = self._windowed_nodes[group]
        end = first + max((i + 1 for i, page in enumerate(pages) if page), default=-first)
        for i, key in enumerate(self._keys(tokens[: end * self.page_size])):
            node = node.children.get(key) or self._add(node, key)
            page = pages[i - first] if i >= first else _NO_PAGE
            old = node.windowed[group]
            if page in (_NO_PAGE, old) or (old and not allocator.is_idle(old)):
                continue
            if old:
                self._withdraw_windowed(group, old)
            node.windowed[group] = page
            nodes[page] = node
            allocator.register(page)

    def register(self, tokens: np.ndarray, pages: PageIds, head_pages: PageIds, variant: int = 0) -> None:
        """Make a row's pages available to other requests. Idempotent.

        A page that the cache already has for the same tokens stays, unless no row holds it: then the row's page
        replaces it, so that a row holds all pages before its registered ones.

        Args:
            tokens: [n] int32, the row's committed tokens.
            pages: the row's leading pages whose entries are all final. head_pages: the matching head pages, as many as
                have final entries; the tokens include the continuation after them.
            variant: the tree to register in.
        """
        node = self._root(variant)
        following = self._following(tokens, len(head_pages))
        for i, key in enumerate(self._keys(tokens[: len(pages) * self.page_size])):
            child = node.children.get(key) or self._add(node, key)
            if i < len(head_pages):
                self._offer(child, following[i], pages[i], head_pages[i])
            else:
                self._offer_headless(child, pages[i])
            node = child

    def clear(self) -> None:
        """Forget everything; pages that rows hold stay theirs."""
        for page in self._entries:
            self.pages.withdraw(page)
        if self.head_pages is not None:
            for page in self._head_entries:
                self.head_pages.withdraw(page)
        for allocator, nodes in zip(self.windowed, self._windowed_nodes, strict=True):
            for page in nodes:
                allocator.withdraw(page)
            nodes.clear()
        self._roots = {}
        self._entries, self._head_entries = {}, {}

    def validate(self) -> None:
        """Whether tree and allocators agree.

        Raises:
            InvariantError: a registered page has no entry, or a node is unreachable from the root or unused.
        """
        reached = []
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            reached.append(stack.pop())
            stack += reached[-1].children.values()
        require(all(node.is_used for node in reached), "a node has neither pages nor children")
        entries = [entry for node in reached for entry in node.entries.values()]
        require({e.page: e for e in entries} == self._entries, "entries by page are not those of the tree")
        require({e.head: e for e in entries if e.head} == self._head_entries, "entries by head page are not the tree's")
        require(self._entries.keys() == self.pages.registered_pages(), "registered pages are not those of the tree")
        if self.head_pages is not None:
            wrong = self._head_entries.keys() ^ self.head_pages.registered_pages()
            require(not wrong, f"registered pages of the head are not those of the tree: {sorted(wrong)[:8]}")
        for g, (allocator, nodes) in enumerate(zip(self.windowed, self._windowed_nodes, strict=True)):
            require(
                {n.windowed[g]: n for n in reached if n.windowed[g]} == nodes,
                "nodes by windowed page are not the tree's",
            )
            require(nodes.keys() == allocator.registered_pages(), "registered windowed pages are not those of the tree")

    def _root(self, variant: int) -> _Node:
        return self._roots.setdefault(variant, _Node(None, b"", len(self._reaches)))

    def _add(self, node: _Node, key: bytes) -> _Node:
        child = node.children[key] = _Node(node, key, len(self._reaches))
        return child

    def _windowed_pages(self, taken: Sequence[_Entry]) -> tuple[Pages, ...]:
        """For each group the pages that the token after these sees."""
        firsts = (first_needed_page(reach, len(taken) * self.page_size, self.page_size) for reach in self._reaches)
        return tuple(tuple(e.node.windowed[g] for e in taken[first:]) for g, first in enumerate(firsts))

    def _keys(self, tokens: np.ndarray) -> list[bytes]:
        """The ids of every whole page as bytes."""
        data = _bytes_of(tokens)
        step = _ID_BYTES * self.page_size
        return [data[at : at + step] for at in range(0, len(data) - step + 1, step)]

    def _following(self, tokens: np.ndarray, num_pages: int) -> list[bytes]:
        """The ids after each of the first pages."""
        data = _bytes_of(tokens)
        step = _ID_BYTES * self.page_size
        width = _ID_BYTES * self.num_following
        require(num_pages * step + width <= len(data) or not num_pages, "a page's continuation is not known")
        return [data[at : at + width] for at in range(step, (num_pages + 1) * step, step)]

    def _read_again(self, node: _Node, keys: Sequence[bytes], with_head: bool) -> int:
        """Number of further pages found that cannot be reused: they continue differently, or leave no token to read."""
        count, most = 0, -(-self.num_following // self.page_size) if with_head else 1
        for key in keys[:most]:
            child = node.children.get(key)
            if child is None or not (child.has_read if with_head else child.entries):
                break
            node = child
            count = count + 1
        return count

    def _offer(self, node: _Node, following: bytes, page: int, head: int) -> None:
        old = node.entries.get(following)
        if old is not None:
            if old.page == page or not self.pages.is_idle(old.page):
                return
            self._drop(old)
        entry = node.entries[following] = self._entries[page] = _Entry(node, following, page, head)
        self.pages.register(page)
        if head and self.head_pages is not None:
            self._head_entries[head] = entry
            self.head_pages.register(head)

    def _offer_headless(self, node: _Node, page: int) -> None:
        """Register a target page without a head page; if entries with head pages exist, mark those as used instead."""
        if node.entries.keys() <= {_ANY}:
            self._offer(node, _ANY, page, _NO_PAGE)
            return
        for old in node.entries.values():
            self.pages.touch(old.page)

    def _drop(self, entry: _Entry) -> None:
        del entry.node.entries[entry.following], self._entries[entry.page]
        self.pages.withdraw(entry.page)
        if entry.head and self.head_pages is not None:
            del self._head_entries[entry.head]
            self.head_pages.withdraw(entry.head)

    def _forget(self, entry: _Entry) -> None:
        """Evict a pair, because a request that drafts can use neither page without the other."""
        self._drop(entry)
        if not entry.node.entries:
            for group, page in enumerate(entry.node.windowed):
                if page:
                    self._withdraw_windowed(group, page)
        self._prune(entry.node)

    def _forget_windowed(self, group: int, page: int) -> None:
        """Evict a page of a windowed group; the target's other pages stay."""
        node = self._windowed_nodes[group][page]
        self._withdraw_windowed(group, page)
        self._prune(node)

    def _withdraw_windowed(self, group: int, page: int) -> None:
        self._windowed_nodes[group].pop(page).windowed[group] = _NO_PAGE
        self.windowed[group].withdraw(page)

    def _prune(self, node: _Node) -> None:
        while node.parent is not None and not node.is_used:
            del node.parent.children[node.key]
            node = node.parent


def _bytes_of(tokens: np.ndarray) -> bytes:
    return np.ascontiguousarray(tokens, np.int32).tobytes()
