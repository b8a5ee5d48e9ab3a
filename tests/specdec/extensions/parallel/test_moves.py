"""Requests move between models of one rank and of two: the tokens and drafts of requests that never moved; failures."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import LetterTokenizer, free_everywhere

from specdec import Handoff, RanksLostError, SamplingParams, SpeculativeModel, TransferError, TransferTimeoutError
from specdec.errors import HandoffMismatchError, OutOfPagesError
from tests.public.test_handoff import PAIRS, PROMPTS, SIZES, lived
from tests.specdec.extensions.parallel import on_ranks

LETTERS = ["abcd efgh", "Hello 123 and so on", "the quick brown fox jumps over it"]
GREEDY = SamplingParams(max_new_tokens=24, return_drafts=True)
PARAMS = [GREEDY, replace(GREEDY, temperature=1.0, seed=7), replace(GREEDY, temperature=0.7, top_p=0.9, seed=8)]
HND: dict[str, Any] = {**SIZES, "kv_cache_layout": "HND"}
TINY: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "page_size": 4, "kv_cache_tokens": 400}


def load(name: str | Path, size: int, transport: str = "sockets", **options: Any) -> Any:
    if isinstance(name, Path):
        own = {**TINY, "tokenizer": LetterTokenizer(), "kv_cache_layout": "HND"}
        model = SpeculativeModel.from_pretrained(name, device="cpu", tensor_parallel_size=size, **own | options)
    else:
        sizes = {**HND, **options}
        model = SpeculativeModel.from_pretrained(name, PAIRS[name], device="cpu", tensor_parallel_size=size, **sizes)
    model.open_transfer(transport)
    return model


def moved(p: Any, d: Any, prompts: Any, params: Any) -> list[Any]:
    """What requests said that `p` read and `d` continued; then both are free, on every rank."""
    found = d.resume([Handoff.from_bytes(handoff.to_bytes()) for handoff in p.prefill(prompts, params)])
    for model in (p, d):
        assert soon(lambda model=model: free_everywhere(model) and in_use(model) in ([], [0] * 4))
    return lived(found)


def in_use(model: Any) -> list[int]:
    """See `on_ranks.pages_in_use`; [] of one rank."""
    return [] if model.ranks is None else list(model.engine.run(on_ranks.pages_in_use))


def soon(holds: Callable[[], bool]) -> bool:
    """Whether it comes to hold within some seconds: peers are told by the network."""
    end = time.monotonic() + 5
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def held(table: Any, name: str) -> list[tuple[int, int]]:
    """(first head, heads) of a region on each rank."""
    regions = [rank.regions[rank.by_name[name]] for rank in table.ranks]
    return [(region.head0, region.heads) for region in regions]


@pytest.fixture
def pair(two_ranks: Any, keep: Callable[..., Any]) -> Any:
    """gsm-llama with its EAGLE-3 head, of one rank and of two. Without prefix caching: spoiled pages would be found."""
    return keep("pair", lambda: [load("gsm-llama", size, enable_prefix_caching=False) for size in (1, 2)])


@pytest.fixture
def patched(pair: tuple[Any, Any]) -> Iterator[Callable[..., None]]:
    """Lets both ranks of the pair's second model run a function that patches them; undone after the test."""
    engine = pair[1].engine
    yield lambda name, *args: engine.run(getattr(on_ranks, name), *args)
    engine.run(on_ranks.unpatched)
    engine.run(on_ranks.waits_again)


@pytest.mark.slow
@pytest.mark.thorough
def test_between_one_rank_and_two_tokens_and_drafts_stay(pair: tuple[Any, Any]) -> None:
    """From bytes; greedy and sampled; a row of D's own runs meanwhile, and a stop string ends a request at once."""
    one, two = pair
    expected = lived(one.generate(PROMPTS, PARAMS))
    assert any(accepted == 4 for own in expected for accepted in [r.accepted for r in own[3]])
    assert held(two.open_transfer("sockets"), "target/0/keys") == [(0, 1), (1, 1)]
    assert held(two.open_transfer("sockets"), "head/0/keys")[0] == held(one.open_transfer("sockets"), "head/0/keys")[0]
    for p, d in ((one, two), (two, one)):
        busy = d.stream(PROMPTS[0], replace(GREEDY, max_new_tokens=90, ignore_eos=True))
        next(busy)
        assert lived(d.resume(p.prefill(PROMPTS, PARAMS))) == expected
        busy.close()
        assert moved(p, d, PROMPTS[1:], PARAMS[1:]) == expected[1:]
    ends = replace(GREEDY, stop=(expected[0][1][:1],))
    (handoff,) = two.prefill(PROMPTS[0], ends)
    assert handoff.completion is not None and soon(lambda: in_use(two) == [0] * 4)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_rank_without_a_port_is_an_error_by_name(pair: tuple[Any, Any]) -> None:
    """Rank r listens on the r-th port after the one that was asked for, and there may be none: no rank is lost."""
    one, two = pair
    before = lived(one.generate(PROMPTS[0], GREEDY))
    with pytest.raises(TransferError, match=r"rank 1 of this model cannot open.*port=65536: allowed"):
        two.open_transfer("sockets", port=65535)
    assert lived(two.generate(PROMPTS[0], GREEDY)) == before
    two.open_transfer("sockets")
    assert moved(two, one, PROMPTS[0], GREEDY) == before


@pytest.mark.long
@pytest.mark.parametrize("name", PAIRS)
def test_all_sizes(two_ranks: Any, name: str) -> None:
    """EAGLE-3 with prefix caching, and a module over MLA, whose latent is whole on every rank: 1 to 2, 2 to 1, 2 to 2;
    one D has fewer pages, so that requests wait for them, and NHD pages are refused where heads are divided.

    (With seed 1 in place of 11 the last draw of one answer of gsm-deepseek falls between what one rank rounds and what
    two do, without any move.)"""
    small = {"kv_cache_tokens": 512, "max_num_seqs": 2}
    with ExitStack() as stack:
        one, two = (stack.enter_context(load(name, size)) for size in (1, 2))
        more = stack.enter_context(load(name, 2, **small))
        params = [*PARAMS, *(replace(own, temperature=1.0, seed=10 + i) for i, own in enumerate(PARAMS))]
        expected = lived(one.generate(PROMPTS * 2, params))
        for p, d in ((one, more), (two, one), (two, more)):
            assert moved(p, d, PROMPTS * 2, params) == expected
        if name == "gsm-deepseek":
            assert held(two.open_transfer("sockets"), "target/0/latents") == [(0, 1), (0, 1)]
            return
        other = stack.enter_context(load(name, 1, kv_cache_layout="NHD"))
        with pytest.raises(HandoffMismatchError, match='kv_cache_layout="HND"'):
            two.resume(other.prefill(PROMPTS[0], GREEDY))


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        pytest.param("one-kv-head", [(0, 1), (0, 1)], marks=pytest.mark.slow),
        pytest.param("gpt-oss", [(0, 1), (1, 1)], marks=pytest.mark.long),
    ],
)
@pytest.mark.thorough
def test_repeated_heads_are_read_from_one_owner_and_windows_are_moved(
    two_ranks: Any, folders: Callable[[str], Path], name: str, heads: list[tuple[int, int]]
) -> None:
    """One KV head, on both ranks, which the fingerprint counts once; layers with windows, in pages of their own. No
    draft head."""
    params = [replace(own, max_new_tokens=12) for own in PARAMS]
    with load(folders(name), 1) as one, load(folders(name), 2) as two, load(folders(name), 2) as more:
        expected = lived(one.generate(LETTERS, params))
        for p, d in ((one, two), (two, one), (two, more)):
            assert moved(p, d, LETTERS, params) == expected
        assert held(two.open_transfer("sockets"), "target/0/keys") == heads
        with load(folders("two-kv-heads"), 2, hybrid_kv_cache=False) as other:
            (handoff,) = other.prefill(LETTERS[0], GREEDY)
            with pytest.raises(HandoffMismatchError, match=r"target weights|cache groups"):
                one.resume(handoff)


@pytest.mark.long
def test_a_wrong_head_range_is_seen(pair: tuple[Any, Any], patched: Callable[..., None]) -> None:
    """As P it is refused by name; as D it reads the bytes of other heads, which the comparison sees."""
    one, two = pair
    expected = lived(one.generate(PROMPTS, PARAMS))
    patched("wrong_head_range")
    two.open_transfer("sockets")
    two.engine.guests.held.grace = 0.0
    with pytest.raises(HandoffMismatchError, match=r"head 1 is on no rank"):
        one.resume(two.prefill(PROMPTS[0], GREEDY, lease_seconds=1))
    assert lived(two.resume(one.prefill(PROMPTS, PARAMS))) != expected
    patched("unpatched")
    assert soon(lambda: in_use(two) == [0] * 4)
    two.open_transfer("sockets")
    assert moved(one, two, PROMPTS, PARAMS) == expected


@pytest.mark.slow
@pytest.mark.thorough
def test_a_rank_that_is_late_to_grant_is_waited_for(pair: tuple[Any, Any], patched: Callable[..., None]) -> None:
    """Before P hands over. Planted: not waiting is seen."""
    one, two = pair
    expected = lived(one.generate(PROMPTS[0], GREEDY))
    patched("late_grant", True)
    assert moved(two, one, PROMPTS[0], GREEDY) == expected
    patched("late_grant", False)  # later still, and rank 0 does not wait
    two.engine.guests.held.grace = 0.0
    with pytest.raises(TransferError, match="no longer held"):
        one.resume(two.prefill(PROMPTS[0], GREEDY, lease_seconds=2))
    assert soon(lambda: in_use(two) == [0] * 4)
    patched("waits_again")
    two.open_transfer("sockets")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_rank_that_is_late_to_read_is_waited_for(pair: tuple[Any, Any], patched: Callable[..., None]) -> None:
    """Before D goes on and P's pages are free."""
    one, two = pair
    expected = lived(one.generate(PROMPTS[0], GREEDY))
    two.open_transfer("sockets")
    patched("late_read")
    assert moved(one, two, PROMPTS[0], GREEDY) == expected


@pytest.mark.long
def test_not_waiting_for_a_late_read_is_seen(pair: tuple[Any, Any], patched: Callable[..., None]) -> None:
    """Planted."""
    one, two = pair
    others = lived(one.generate(PROMPTS[1], GREEDY))
    two.open_transfer("sockets")
    moved(one, two, PROMPTS[0], GREEDY)
    patched("late_read")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "specdec.extensions.parallel.among_ranks.RanksRead.wait", lambda self, deadline: self.wait_here(deadline)
        )
        assert lived(two.resume(one.prefill(PROMPTS[1], GREEDY))) != others  # its pages are those of the text before
    time.sleep(2.5)  # rank 1 has tried by now, or is done


@pytest.mark.slow
@pytest.mark.thorough
def test_late_reads_of_a_rank_keep_pages_in_quarantine_on_all(
    pair: tuple[Any, Any], patched: Callable[..., None]
) -> None:
    one, two = pair
    patched("unsettled_reads")
    (handoff,) = one.prefill(PROMPTS[0], GREEDY)
    with pytest.raises(TransferTimeoutError, match="rank 1 of this model: late"):
        two.resume(handoff)
    pages = len(handoff.blocks["target"])
    assert in_use(two) == [pages] * 4
    assert two.generate(PROMPTS[1], GREEDY) and in_use(two) == [pages] * 4
    patched("settle_reads")
    assert soon(lambda: in_use(two) == [0] * 4)
    patched("unpatched")
    again = lived(two.resume(handoff))  # P was not told that it was read
    assert again == lived(one.generate(PROMPTS[0], GREEDY))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_reader_that_dies_and_one_that_never_comes(pair: tuple[Any, Any]) -> None:
    """P's pages come back after the lease, on every rank, and not before; so they do when a reader dies in a read."""
    one, two = pair
    two.open_transfer("sockets")
    two.engine.guests.held.grace = 0.1
    began = time.monotonic()
    (handoff,) = two.prefill(PROMPTS[0], GREEDY, lease_seconds=1.0)
    address = handoff.source.ranks[1].address
    blocks = {group: list(own) for group, own in handoff.blocks.items()}
    question = {"lease": handoff.lease, "segments": [[0, 0, 16]], "blocks": blocks}
    with closing(socket.create_connection((address["host"], address["port"]))) as peer:
        peer.sendall(json.dumps(question).encode() + b"\n")
        assert peer.recv(1) == b"{"
    pages = len(handoff.blocks["target"])
    assert in_use(two) == [pages, 0] * 2
    assert soon(lambda: in_use(two) == [0] * 4) and time.monotonic() - began > 1.1
    with pytest.raises(TransferError, match="lease"):
        one.resume(handoff)
    again = one.resume(handoff, on_failure="prefill")
    assert lived(again) == lived(one.generate(PROMPTS[0], GREEDY)) == moved(two, one, PROMPTS[0], GREEDY)
    assert free_everywhere(one)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_read_that_is_refused_at_once_ends_on_every_rank(pair: tuple[Any, Any]) -> None:
    """Rank 0 drops the pages while the other rank begins to read."""
    one, two = pair
    two.open_transfer("sockets")
    for _ in range(8):
        (handoff,) = one.prefill(PROMPTS[0], GREEDY)
        one.release(handoff)
        with pytest.raises(TransferError, match="no longer held"):
            two.resume(handoff)
    assert soon(lambda: in_use(two) == [0] * 4)
    assert moved(one, two, PROMPTS[0], GREEDY) == lived(one.generate(PROMPTS[0], GREEDY))


@pytest.mark.slow
@pytest.mark.thorough
def test_pages_that_are_missing_are_waited_for_and_rows_stay(pair: tuple[Any, Any]) -> None:
    """Nobody is told of a reservation that fails: rows of neither rank are made anew because of it."""
    one, two = pair
    two.open_transfer("sockets")
    expected = lived(two.generate(PROMPTS[1], replace(GREEDY, max_new_tokens=60)))
    (handoff,) = one.prefill(PROMPTS[0], GREEDY)
    stream = two.stream(PROMPTS[1], replace(GREEDY, max_new_tokens=60))
    updates, taken = [next(stream)], []
    while not isinstance(number := two.engine.guests.reserve(handoff.moved), OutOfPagesError):
        taken.append(number)
    before = two.engine_stats.preemptions
    with pytest.raises(OutOfPagesError):
        two.resume(handoff, timeout=0.02)
    for number in taken:
        two.engine.guests.drop(number, lambda: True)
    updates += list(stream)
    assert lived([updates[-1].completion])[0][:3] == expected[0][:3] and two.engine_stats.preemptions == before
    assert lived(two.resume(handoff)) == lived(one.generate(PROMPTS[0], GREEDY))
    assert soon(lambda: in_use(two) == [0] * 4)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_rank_of_the_source_that_is_killed_in_a_read_is_an_error_by_name(every_self_test: None) -> None:
    """D's pages are free once nothing writes to them, and it goes on; P is lost, as with any lost rank."""
    with load("gsm-llama", 1) as d, load("gsm-llama", 2) as p:
        pid = p.ranks.channel.workers.processes[0].process.pid
        expected = lived(d.generate(PROMPTS[0], GREEDY))
        handoffs = p.prefill(PROMPTS, GREEDY)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TransferTimeoutError, match="sent no more bytes"):
            d.resume(handoffs[1], timeout=0.5)
        assert free_everywhere(d)
        killed: list[float] = []
        threading.Timer(0.5, lambda: (killed.append(time.monotonic()), os.kill(pid, signal.SIGKILL))).start()
        with pytest.raises(TransferError, match=r"is gone|nobody listens"):
            d.resume(handoffs[0])
        assert killed and time.monotonic() - killed[0] < 5 and free_everywhere(d)
        assert lived(d.resume(handoffs[0], on_failure="prefill")) == expected
        with pytest.raises(RanksLostError, match="killed by SIGKILL"):
            p.prefill(PROMPTS[0], GREEDY)
        assert free_everywhere(d)
