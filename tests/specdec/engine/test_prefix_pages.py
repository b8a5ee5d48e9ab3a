"""Ten thousand random requests under eviction pressure, on a device that knows what every slot of every page must hold.

The device has no model: a token follows from all before it by a hash, and what a slot of a page holds is the hash of
the tokens on which its keys and values would depend. So a page that is read by a request that it does not belong to,
too early, or after it was overwritten, is found at once, on the target's side and on the head's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import LetterTokenizer, count_calls, free_pages

from attention.cache.pages import PageAllocator
from attention.cache.prefix import PrefixCache
from attention.errors import InvariantError
from attention.spec import Reach
from drafters.loops.base import DraftingRows, DraftInput
from drafters.loops.prefill import accepted_rows
from specdec.acceptance.packed import Outcome
from specdec.config import EngineConfig, WindowedPool
from specdec.engine.engine import Engine
from specdec.engine.prefixes import Prefixes
from specdec.engine.scheduler import Usage
from specdec.execution.base import DraftedVerification, Verification
from specdec.requests.sampling import SamplingParams
from specdec.rounds.drafting import accepted_by_row, rows_after
from specdec.rounds.verification import TargetArrays
from specdec.wrapped.group import ALONE

SIZE, LONGEST, K, VOCAB, ROWS, PAGES = 4, 64, 3, 12, 4, 23
MASK = (1 << 64) - 1
WEIGHTS = np.random.default_rng(0).integers(1, 1 << 63, LONGEST + 8, dtype=np.uint64) | np.uint64(1)
UNKNOWN = np.uint64(0)


def hashes(tokens: Any) -> np.ndarray:
    """[n] uint64 of every prefix."""
    ids = np.asarray(tokens, np.uint64) + np.uint64(1)
    return np.cumsum(ids * WEIGHTS[: len(ids)], dtype=np.uint64)


def next_token(hashed: int) -> int:
    return (hashed >> 35) % VOCAB


def answer(prompt: list[int], new: int) -> list[int]:
    """What the model says after a prompt."""
    hashed, tokens = int(hashes(prompt)[-1]), list(prompt)
    while len(tokens) < len(prompt) + new:
        tokens.append(next_token(hashed))
        hashed = (hashed + (tokens[-1] + 1) * int(WEIGHTS[len(tokens) - 1])) & MASK
    return tokens[len(prompt) :]


class Drafts(np.ndarray):
    """[R, n] tokens, none of which is left out for its confidence."""

    kept = None


class Wrong(AssertionError):
    """A slot was read that does not hold what it should."""


class HashDevice:
    """An `Executor` of target and head with M modules. graphs: the draft prefill follows before the read."""

    def __init__(self, config: EngineConfig, modules: int, graphs: bool) -> None:
        self.reads: Any = self
        self.transfers = 0
        self.engine: Any = None
        self.fail, self.error, self.once = "", ArithmeticError, True
        self._modules, self._graphs = modules, graphs
        self._target = np.full((config.num_pages, SIZE), UNKNOWN)
        self._head = np.full((modules, config.num_head_pages, SIZE), UNKNOWN)
        self._near = [np.full((pool.num_pages, SIZE), UNKNOWN) for pool in config.windowed]
        self._tokens = np.zeros((config.max_num_seqs, LONGEST + 1), np.int64)
        self._rng = random.Random(1)

    def send(self, draft: DraftInput | None, target: TargetArrays, sampling: Any) -> Any:
        self.transfers += 1
        near = [(each.reach, each.block_table[each.rows]) for each in target.pages.windowed]
        return SimpleNamespace(target=target, draft=draft, near=near)

    def draft(self, round_: Any, aux: Any) -> Any:
        """The draft loop after a commit."""
        self._break("draft")
        loop: DraftInput = round_.draft
        lens = np.diff(
            accepted_rows(loop.query_start_loc, loop.num_drafts, loop.num_accepted, loop.order).query_start_loc
        )
        assert loop.begins is not None
        for i, row in enumerate(loop.request_rows.tolist()):
            stop, begin = int(loop.committed_lens[i]), int(loop.begins[i])
            known = hashes(loop.tokens[row, : stop + 1])
            self._read_head(loop.block_table[i], row, stop - int(lens[i]), stop, stop, begin, known)
        return self._drafts(loop.drafting, loop.request_rows)

    def verify(self, round_: Any, draft: Any) -> Verification:
        """Reads what rows have, writes what they read now, and accepts."""
        self._break("verify")
        target: TargetArrays = round_.target
        width, outcome = target.max_drafts, []
        drafts = np.zeros((len(target.start), width), np.int64)
        for b, row in enumerate(target.request_rows.tolist()):
            start, new, n = int(target.start[b]), int(target.num_new[b]), int(target.drafts[b])
            assert target.begins is not None
            if start == target.begins[b]:
                self._tokens[row] = self.engine.table.tokens[row]
            tokens = self._tokens[row]
            tokens[start : start + new] = target.tokens[b, :new]
            if n:
                source = b if target.sources is None else int(target.sources[b])
                drafts[b, :n] = draft[source, :n]
            fed = np.concatenate([tokens[: start + new], drafts[b, :n]])
            self._slots(self._target, target.pages.target[b], "target", start, start + new + n, hashes(fed))
            for pool, (reach, tables) in zip(self._near, round_.near, strict=True):
                seen = start // reach.tokens * reach.tokens if reach.step > 1 else max(start - reach.tokens + 1, 0)
                self._slots(pool, tables[b], "windowed", start, start + new + n, hashes(fed), seen)
            if b in target.decided:
                outcome.append(self._decide(tokens, start + new, drafts[b, :n], width))
        decided = target.decided
        accepted = np.array([a for a, _ in outcome], np.int64)
        result = Outcome(accepted, np.array([t for _, t in outcome]).reshape(-1, width + 1), drafts[decided])
        packed: Any = result
        nothing = torch.zeros(0)
        if not self._graphs:
            return Verification(packed, nothing)
        self._draft_prefill(target, accepted_by_row(target, accepted))
        return DraftedVerification(packed, nothing, lambda found: self._steps(target, found))

    def finish(self, packed: Any, num_drafts: np.ndarray) -> Outcome:
        self._break("read")
        found: Outcome = packed
        return found

    def _break(self, stage: str) -> None:
        if self.fail == stage:
            self.fail, self.once = "" if self.once else stage, True
            raise self.error(stage)

    def _decide(self, tokens: np.ndarray, length: int, drafts: np.ndarray, width: int) -> tuple[int, np.ndarray]:
        """Accept, and note the committed tokens."""
        hashed, found, accepted = int(hashes(tokens[:length])[-1]), np.zeros(width + 1, np.int64), 0
        for j in range(len(drafts) + 1):
            found[j] = next_token(hashed)
            if j == len(drafts) or drafts[j] != found[j]:
                break
            hashed = (hashed + (int(found[j]) + 1) * int(WEIGHTS[length + j])) & MASK
            accepted += 1
        room = len(tokens) - length
        tokens[length : length + accepted + 1] = found[: min(accepted + 1, room)]
        return accepted, found

    def _draft_prefill(self, target: TargetArrays, accepted: np.ndarray) -> None:
        """Over all token rows of the verification; what it writes for rejected drafts is right for nobody."""
        assert target.pages.head is not None and target.begins is not None
        for b, row in enumerate(target.request_rows.tolist()):
            if not target.pages.head[b].any():
                continue
            start, end = int(target.start[b]), int(target.start[b] + target.lens[b])
            stop = start + int(target.num_new[b]) + int(accepted[b])
            known = np.full(end + 1, UNKNOWN)
            known[: min(stop, LONGEST) + 1] = hashes(self._tokens[row, : stop + 1])
            self._read_head(target.pages.head[b], row, start, end, stop, int(target.begins[b]), known)

    def _steps(self, target: TargetArrays, num_accepted: np.ndarray) -> np.ndarray:
        return self._drafts(rows_after(target, accepted_by_row(target, num_accepted)), target.request_rows)

    def _read_head(
        self, table: np.ndarray, row: int, start: int, end: int, stop: int, begin: int, known: np.ndarray
    ) -> None:
        """Every module over the states [start, end), of which those before `stop` are of committed tokens."""
        for m in range(self._modules):
            first, last = max(start - m, begin), max(end - m, begin)
            if first == last:
                continue
            if first < start and start == self.engine.table.begin[row]:
                raise Wrong(f"module {m}: the first round of a request has no vector of a round before at {first}")
            self._slots(self._head[m], table, f"module {m}", first, last, known[1 + m :])

    def _drafts(self, rows: DraftingRows, request_rows: np.ndarray) -> np.ndarray:
        """Right or wrong by chance. The steps write where nothing is committed."""
        count, tokens = int(rows.num_drafts.max(initial=0)), self._tokens
        found = np.zeros((len(rows.num_drafts), max(count, 1)), np.int64)
        for i, n in enumerate(rows.num_drafts.tolist()):
            length = int(rows.committed_lens[i]) + 1
            hashed = int(hashes(tokens[request_rows[i], :length])[-1])
            for j in range(n):
                found[i, j] = next_token(hashed) if self._rng.random() < 0.7 else self._rng.randrange(VOCAB)
                if length + j < len(WEIGHTS):
                    hashed = (hashed + (int(found[i, j]) + 1) * int(WEIGHTS[length + j])) & MASK
            for m in range(self._modules):
                places = np.arange(max(length - 1 - m, 0), length - 1 + max(n - 1, 0))
                self._head[m][rows.block_table[i, places // SIZE], places % SIZE] = UNKNOWN
        return found.view(Drafts)

    def _slots(
        self, pool: np.ndarray, table: np.ndarray, what: str, first: int, last: int, right: np.ndarray, seen: int = 0
    ) -> None:
        """Read the slots from `seen` to `first`, and write those up to `last`."""
        places = np.arange(max(first, last))
        pages, offsets = table[places // SIZE], places % SIZE
        wrong = seen + np.flatnonzero(pool[pages[seen:first], offsets[seen:first]] != right[seen:first])
        if len(wrong):
            raise Wrong(f"{what}: position {wrong[0]} of {first} on page {pages[wrong[0]]}")
        pool[pages[first:last], offsets[first:last]] = right[first:last]


class Traffic:
    """An engine over a `HashDevice`, and random requests that begin alike."""

    def __init__(self, seed: int, modules: int = 1, graphs: bool = False, pages: int = PAGES, **sizes: Any) -> None:
        options = {"enable_prefix_caching": True, "max_num_prefill_tokens": 24, **sizes}
        config = EngineConfig(K, LONGEST, ROWS, 48, SIZE, pages, **options)
        self.device = HashDevice(config, modules, graphs)
        target: Any = SimpleNamespace(
            hf_model=SimpleNamespace(device=torch.device("cpu")),
            group=ALONE,
            num_embeddings=VOCAB,
            vocab_size=VOCAB,
            placeholders={},
        )
        drafter: Any = SimpleNamespace(head=None, loop=SimpleNamespace(num_modules=modules, num_following=modules))
        self.engine = Engine(target, drafter, LetterTokenizer(), config, (), self.device)  # type: ignore[arg-type]
        self.engine.use(self.device, queue_verification=bool(seed % 2))  # type: ignore[arg-type]
        self.device.engine = self.engine
        self.rng = random.Random(seed)
        self.begins = [[self.rng.randrange(VOCAB) for _ in range(n)] for n in (5, 8, 12, 17, 24, 30)]
        self.asked: dict[int, tuple[list[int], int]] = {}
        self.ended: list[list[int]] = []
        self.failed = self.struck = self.aborted = self.finished = 0

    def prompt(self) -> list[int]:
        """One that begins as others do, or goes on where another one ended."""
        most = LONGEST - 16
        begin = self.rng.choice(self.ended[-8:] if self.ended and self.rng.random() < 0.3 else self.begins)
        tail = [self.rng.randrange(2) for _ in range(self.rng.choice((0, 0, 1, 2, 3, 6, 9)))]
        return (begin[: self.rng.choice((most, most, 7, 16))] + tail)[:most] or [0]

    def submit(self) -> None:
        prompt, new = self.prompt(), self.rng.choice((1, 2, 3, 5, 8, 14))
        params = SamplingParams(
            max_new_tokens=new,
            num_speculative_tokens=self.rng.choice((None, None, None, 2, 0)),
            cache_prefix=self.rng.random() < 0.93,
        )
        self.asked[self.engine.submit(prompt, params)] = prompt, new

    def round(self, faults: float = 0.0) -> None:
        """One round; what ended must be what the model says."""
        if self.rng.random() < faults:
            self.device.fail = self.rng.choice(("draft", "verify", "read"))
            self.device.error = self.rng.choice((ArithmeticError, KeyboardInterrupt))
            self.device.once = self.device.error is KeyboardInterrupt or self.rng.random() < 0.5
        try:
            updates = self.engine.step()
        except KeyboardInterrupt:
            return
        except ArithmeticError:  # raised once: nobody's fault, and what was reported is there
            updates = self.engine.reported
            assert not any(update.error for update in updates)
            self.struck += 1
        for update in updates:
            if update.error is not None:
                if isinstance(update.error.__cause__, (Wrong, InvariantError)):
                    raise update.error.__cause__
                assert isinstance(update.error.__cause__, ArithmeticError), update.error.__cause__
                self.failed += 1
                del self.asked[update.request_id]
            elif update.completion is not None:
                prompt, new = self.asked.pop(update.request_id)
                assert update.completion.token_ids == answer(prompt, new)
                self.ended.append(prompt + update.completion.token_ids)
                self.finished += 1

    def run(self, requests: int, faults: float = 0.0, aborts: float = 0.0) -> None:
        left = requests
        while left or self.engine.has_work:
            while left and len(self.asked) < self.rng.choice((1, 3, 6, 9)):
                self.submit()
                left -= 1
            self.round(faults)
            if self.asked and self.rng.random() < aborts:
                gone = self.rng.choice(list(self.asked))
                self.engine.abort([gone])
                del self.asked[gone]
                self.aborted += 1
            if self.rng.random() < 0.05:
                self.engine.usage()  # validates
        assert self.engine.usage() == Usage()


def cache_of(engine: Engine) -> PrefixCache:
    assert engine.scheduler.prefixes is not None
    return engine.scheduler.prefixes.cache


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "graphs", "requests"),
    [
        *(pytest.param(1, graphs, 3500, marks=pytest.mark.long) for graphs in (False, True)),
        (2, True, 500),
        pytest.param(3, False, 500, marks=pytest.mark.long),
    ],
)
@pytest.mark.thorough
def test_ten_thousand_requests_read_only_what_is_theirs(modules: int, graphs: bool, requests: int) -> None:
    traffic = Traffic(modules + graphs, modules, graphs)
    traffic.run(requests, faults=0.006, aborts=0.02)
    stats = traffic.engine.stats
    assert traffic.finished + traffic.failed + traffic.aborted == requests
    assert traffic.finished > 0.9 * requests and traffic.failed and traffic.aborted
    assert stats.preemptions > requests / 50, "pages must be short"
    assert 0.2 < stats.cached_tokens / stats.prefix_query_tokens < stats.prefix_hit_rate


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "graphs", "budget"), [pytest.param(1, False, 24, marks=pytest.mark.long), (2, True, 8)]
)
@pytest.mark.thorough
def test_groups_of_sliding_windows(modules: int, graphs: bool, budget: int) -> None:
    """Two groups, one so small that its pages are evicted long before the target's others; prompts in short chunks."""
    stats = windowed_traffic((WindowedPool(Reach(9), 40), WindowedPool(Reach(14), 90)), modules, graphs, budget)
    assert stats.preemptions > 10 and stats.cached_tokens / stats.prefix_query_tokens > 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "graphs", "budget"), [pytest.param(1, True, 8, marks=pytest.mark.long), (2, False, 24)]
)
@pytest.mark.thorough
def test_groups_of_chunks(modules: int, graphs: bool, budget: int) -> None:
    """The same where one group attends in chunks of two pages, another in chunks of four."""
    pools = WindowedPool(Reach(16, 16), 90), WindowedPool(Reach(8, 8), 40)
    stats = windowed_traffic(pools, modules, graphs, budget)
    assert stats.preemptions > 10 and stats.cached_tokens / stats.prefix_query_tokens > 0.2


def windowed_traffic(pools: tuple[WindowedPool, ...], modules: int, graphs: bool, budget: int) -> Any:
    """Five hundred requests over these further groups."""
    traffic = Traffic(modules**2, modules, graphs, windowed=pools, max_num_prefill_tokens=budget)
    traffic.run(500, faults=0.02, aborts=0.02)
    assert traffic.finished > 430 and traffic.failed and traffic.aborted
    return traffic.engine.stats


@pytest.mark.slow
def test_pages_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    withdrawn = count_calls(monkeypatch, PageAllocator, "withdraw")
    Traffic(3).run(200)
    assert len(withdrawn) > 100


@pytest.mark.slow
@pytest.mark.thorough
def test_pages_of_the_head_are_never_short() -> None:
    """Every page of the head in use stands for one of the target's: its pool needs no eviction of its own."""
    for modules in (1, 3):
        traffic = Traffic(modules, modules, pages=20)
        heads = traffic.engine.scheduler.head_pages
        assert heads is not None
        plain = heads.allocator.allocate
        heads.allocator.allocate = _without_eviction(heads.allocator, plain)  # type: ignore[method-assign]
        traffic.run(400)


def _without_eviction(allocator: Any, allocate: Callable[[int], list[int]]) -> Callable[[int], list[int]]:
    def checked(count: int) -> list[int]:
        assert count <= len(free_pages(allocator))
        return allocate(count)

    return checked


def whatever_follows(self: Any, tokens: np.ndarray, num_pages: int) -> list[bytes]:
    return [b"-"] * num_pages


final_pages = Prefixes.final_pages


def before_the_commit(self: Any, row: int) -> tuple[int, int]:
    target, head = final_pages(self, row)
    return target + 1, head + 1


def head_too_early(self: Any, row: int) -> tuple[int, int]:
    target, _ = final_pages(self, row)
    return target, target


PLANTED: dict[str, tuple[Any, str, Any, int]] = {
    "pages of the head are found whatever follows them": (PrefixCache, "_following", whatever_follows, 1),
    "pages are registered before the commit": (Prefixes, "final_pages", before_the_commit, 1),
    "the head's pages are registered with the target's": (Prefixes, "final_pages", head_too_early, 1),
    "of modules, too": (Prefixes, "final_pages", head_too_early, 3),
    "pages that are held are evicted": (PageAllocator, "hold", lambda self, pages: None, 1),
}


@pytest.mark.parametrize("defect", PLANTED)
def test_planted_defects_are_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, planted, modules = PLANTED[defect]
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises((Wrong, InvariantError, AssertionError)):
        Traffic(5, modules).run(400)


def test_rows_of_modules_before_the_beginning_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: modules write as far back as in a request that begins at 0."""
    import specdec.rounds.drafting

    plain = specdec.rounds.drafting.DraftInput
    forgetful = lambda **given: plain(**{**given, "begins": np.zeros_like(given["begins"])})  # noqa: E731
    monkeypatch.setattr(specdec.rounds.drafting, "DraftInput", forgetful)
    with pytest.raises((Wrong, InvariantError)):
        Traffic(5, 3).run(400)


@pytest.mark.parametrize("stage", ["draft", "verify", "read"])
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_a_failed_round_leaves_nothing_cached(stage: str, error: Any) -> None:
    traffic = Traffic(7)
    traffic.run(20)
    for _ in range(3):
        traffic.asked[traffic.engine.submit([1] * 30, SamplingParams(max_new_tokens=8))] = [1] * 30, 8
    traffic.engine.step()
    before = cache_of(traffic.engine)
    assert before.pages.registered_pages()
    traffic.device.fail, traffic.device.error, traffic.device.once = stage, error, error is KeyboardInterrupt
    while traffic.device.fail:
        traffic.round()
    traffic.engine.abort([])  # the next change mends what an interrupt left
    assert cache_of(traffic.engine) is not before and not cache_of(traffic.engine).pages.registered_pages()
    traffic.run(20)
