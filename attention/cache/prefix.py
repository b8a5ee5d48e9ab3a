"""The prefix cache: which pages hold the keys and values of which tokens, so that requests share what they begin with.

A page is found by all token ids from the first to its last: a tree has one node for each page of tokens, its children
by the bytes of the next page's ids. Ids are compared, not only hashed, so there are no collisions. Nothing but the ids
decides what is written in a page: weights are the same for all (`PrefixCache.clear` when they change), and there are
no adapters, images or prefixes of other kinds.

A node has a page of the target and, where a head has read its tokens, a page of the head. A head's entries at the last
positions of a page depend on the next page's first tokens: `num_following` of them (1 for a head that pairs the state at
p with the token at p+1; M for M modules). So the entries in the last page that a request finds may be another's. That
page is read again, by target and head, into pages of the request's own: nothing is missing then, and the head's first
states are there. It costs `page_size` tokens of a forward; what is found stays found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attention.cache.shared import SharedPages
from attention.checking import require

_NO_PAGE = 0
"""The null page is never registered."""


class _Node:
    """One page of tokens after those of its parents."""

    __slots__ = ("children", "head", "key", "page", "parent")

    def __init__(self, parent: _Node | None, key: bytes) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[bytes, _Node] = {}
        self.page = _NO_PAGE
        self.head = _NO_PAGE


@dataclass(frozen=True)
class Found:
    """What the cache has of a request's tokens.

    Attributes:
        num_pages: full pages that were found, from the first on.
        pages, head_pages: those that the request begins with, of the target's and of the head's; the rest of what was
            found, at most one page but for pages shorter than `num_following`, is read again.
    """

    num_pages: int = 0
    pages: tuple[int, ...] = ()
    head_pages: tuple[int, ...] = ()


NOTHING = Found()


class PrefixCache:
    """A tree of token pages over the target's pages and, with a head, the head's.

    Attributes:
        pages: allocator of the target's pages; head_pages: of the head's, None without a head.
        page_size: tokens a page.
    """

    def __init__(self, page_size: int, num_pages: int, num_head_pages: int | None = None, num_following: int = 1):
        """num_following: tokens after a position on which the head's entry there depends."""
        self.page_size = page_size
        self.pages = SharedPages(num_pages, self._evict)
        self.head_pages = None if num_head_pages is None else SharedPages(num_head_pages, self._evict_head)
        self._num_again = -(-num_following // page_size)
        self._root = _Node(None, b"")
        self._nodes: dict[int, _Node] = {}
        self._head_nodes: dict[int, _Node] = {}

    def find(self, tokens: np.ndarray, with_head: bool) -> Found:
        """What a request begins with.

        Args:
            tokens: [n] int32, what it reads before it decodes: the position of the last one must be read in any case.
            with_head: whether it drafts, so that only pages serve which the head has read, too.
        """
        pages, heads = self._walk(tokens)
        if with_head:
            read = next((i for i, head in enumerate(heads) if not head), len(heads))
            found = min(len(pages), read + self._num_again)
        else:
            found = len(pages)
        taken = self.num_taken(found, len(tokens), with_head)
        return Found(found, tuple(pages[:taken]), tuple(heads[:taken]) if with_head else ())

    def num_taken(self, num_found: int, num_tokens: int, with_head: bool) -> int:
        """How many of so many found pages a request of so many tokens begins with; it reads the rest again.

        >>> cache = PrefixCache(16, 9, 9)
        >>> [cache.num_taken(3, 50, True), cache.num_taken(3, 50, False), cache.num_taken(3, 48, False)]
        [2, 3, 2]
        """
        if with_head:
            return max(num_found - self._num_again, 0)
        return num_found if num_found * self.page_size < num_tokens else max(num_found - 1, 0)

    def hold(self, found: Found) -> None:
        """A row holds what was found for it."""
        self.pages.hold(found.pages)
        if self.head_pages is not None:
            self.head_pages.hold(found.head_pages)

    def num_idle(self, found: Found) -> int:
        """How many of the target's pages in `found` count as free until it is held."""
        return self.pages.num_idle(found.pages)

    def register(self, tokens: np.ndarray, pages: Sequence[int], head_pages: Sequence[int]) -> None:
        """Let others find a row's pages. Idempotent.

        Where the cache has a page for these tokens already, it stays, unless nobody holds it: then the row's takes its
        place, so that a row that goes on has all pages before its own.

        Args:
            tokens: [n] int32; every whole page of them is registered.
            pages: the row's, whose entries are final. head_pages: the same of the head's, for as many pages from the
                first on as the head has final entries in.
        """
        node = self._root
        for i, key in enumerate(self._keys(tokens)):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node, key)
            self._offer(child, pages[i], head_pages[i] if i < len(head_pages) else _NO_PAGE)
            node = child

    def clear(self) -> None:
        """Forget everything; pages that rows hold stay theirs."""
        for page in list(self._nodes):
            self.pages.withdraw(page)
        if self.head_pages is not None:
            for page in list(self._head_nodes):
                self.head_pages.withdraw(page)
        self._root = _Node(None, b"")
        self._nodes, self._head_nodes = {}, {}

    def validate(self) -> None:
        """Whether tree and allocators agree.

        Raises:
            InvariantError: a registered page has no node, a node is not reached from the root, or is of no use, or a
                page of the head belongs to a node without one of the target.
        """
        reached, stack = [], list(self._root.children.values())
        while stack:
            node = stack.pop()
            reached.append(node)
            stack += node.children.values()
            require(bool(node.page or node.children), "a node has neither a page nor children")
            require(bool(node.page or not node.head), "a node has a page of the head and none of the target")
        require({n.page: n for n in reached if n.page} == self._nodes, "nodes by page are not those of the tree")
        require({n.head: n for n in reached if n.head} == self._head_nodes, "nodes by head page are not the tree's")
        require(self._nodes.keys() == self.pages.registered_pages(), "registered pages are not those of the tree")
        if self.head_pages is not None:
            wrong = self._head_nodes.keys() ^ self.head_pages.registered_pages()
            require(not wrong, f"registered pages of the head are not those of the tree: {sorted(wrong)[:8]}")

    def _keys(self, tokens: np.ndarray) -> list[bytes]:
        """The ids of every whole page as bytes."""
        data, step = np.ascontiguousarray(tokens, np.int32).tobytes(), 4 * self.page_size
        return [data[at : at + step] for at in range(0, len(data) - step + 1, step)]

    def _walk(self, tokens: np.ndarray) -> tuple[list[int], list[int]]:
        """Pages of the target, and of the head (0 where there is none), for whole pages of these tokens."""
        node, pages, heads = self._root, [], []
        for key in self._keys(tokens):
            child = node.children.get(key)
            if child is None or not child.page:
                break
            pages.append(child.page)
            heads.append(child.head)
            node = child
        return pages, heads

    def _offer(self, node: _Node, page: int, head: int) -> None:
        if node.page and node.page != page and self.pages.is_idle(node.page) and (head or not node.head):
            self._forget(node)
        if not node.page:
            node.page = page
            self._nodes[page] = node
            self.pages.register(page)
        if head and not node.head and self.head_pages is not None:
            node.head = head
            self._head_nodes[head] = node
            self.head_pages.register(head)

    def _evict(self, page: int) -> None:
        """Both pages of a node go together: to a request that drafts neither is of use without the other."""
        node = self._nodes[page]
        self._forget(node)
        while node.parent is not None and not node.page and not node.children:
            del node.parent.children[node.key]
            node = node.parent

    def _evict_head(self, head: int) -> None:
        """The head's page alone: rows hold the target's."""
        self._forget_head(self._head_nodes[head])

    def _forget(self, node: _Node) -> None:
        del self._nodes[node.page]
        self.pages.withdraw(node.page)
        node.page = _NO_PAGE
        if node.head:
            self._forget_head(node)

    def _forget_head(self, node: _Node) -> None:
        assert self.head_pages is not None
        del self._head_nodes[node.head]
        self.head_pages.withdraw(node.head)
        node.head = _NO_PAGE
