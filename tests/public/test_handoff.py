"""Requests of the built-in models move between models, in one process and between two; their engine dies or hangs."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import free_everywhere, late_pages, scheduler_of

from specdec import Handoff, SamplingParams, SpeculativeModel, TransferError, TransferTimeoutError
from specdec.extensions.handoff.moved import MovedRequest
from tests.rank_server import start_python

__all__ = ["start_python"]

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("UCX_NET_DEVICES", "lo")
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed: pip install 'specdec-hf[transfer]'"
)
PAIRS = {"gsm-llama": "auto", "gsm-deepseek": "mtp"}
PROMPTS = [
    "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:",
    "Question: A box has 12 pens. 5 are red and 3 are blue. How many are neither red nor blue?\nAnswer:",
    "Question: Ann reads 6 pages a day. How many pages does she read in 7 days?\nAnswer:",
]
GREEDY = SamplingParams(max_new_tokens=32, return_drafts=True)
PARAMS = [GREEDY, replace(GREEDY, temperature=1.0, seed=7), replace(GREEDY, temperature=0.7, top_p=0.9, seed=8)]
SIZES: dict[str, Any] = {
    "num_speculative_tokens": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_tokens": 1024,
    "max_model_len": 192,
}


def load(name: str, **options: Any) -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(name, PAIRS[name], **SIZES | options)


def lived(completions: list[Any]) -> list[Any]:
    return [(c.token_ids, c.text, c.drafts, c.stats.rounds, c.finish_reason) for c in completions]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm-llama", pytest.param("gsm-deepseek", marks=pytest.mark.long)])
def test_tokens_and_drafts_are_those_of_requests_that_never_moved(name: str) -> None:
    """EAGLE-3, and a multi-token-prediction module over MLA; D has other pages, rows and another backend's sizes."""
    with load(name) as stays, load(name) as p, load(name, kv_cache_tokens=512, max_num_seqs=2) as d:
        expected = stays.generate(PROMPTS, PARAMS)
        completions = d.resume([Handoff.from_bytes(h.to_bytes()) for h in p.prefill(PROMPTS, PARAMS)])
        assert lived(completions) == lived(expected)
        accepted = [r.accepted for c in completions for r in c.stats.rounds]
        assert 0 in accepted and 4 in accepted
        assert free_everywhere(p) and free_everywhere(d)


def reversed_blocks(p: Any, handoff: Handoff) -> Handoff:
    return replace(handoff, blocks={group: own[::-1] for group, own in handoff.blocks.items()})


def other_key(p: Any, handoff: Handoff) -> Handoff:
    assert isinstance(handoff.moved, MovedRequest)
    return replace(handoff, moved=replace(handoff.moved, key=handoff.moved.key ^ 1))


def no_head_pages(p: Any, handoff: Handoff) -> Handoff:
    for layer in p.runners[1].layers:
        layer.keys.zero_()
        layer.values.zero_()
    return handoff


def other_drafts(p: Any, handoff: Handoff) -> Handoff:
    return replace(handoff, tensors={**handoff.tensors, "drafts": handoff.tensors["drafts"].flip(0)})


def one_zero_page(p: Any, handoff: Handoff) -> Handoff:
    p.runners[0].layers[-1].values[handoff.blocks["target"][0]] = 0
    return handoff


DEFECTS: dict[str, tuple[Callable[..., Handoff], int]] = {
    "blocks in another order": (reversed_blocks, 0),
    "one page of one layer is zero": (one_zero_page, 0),
    "no pages of the head": (no_head_pages, 0),
    "drafts in another order": (other_drafts, 0),
    "another key": (other_key, 1),
    "no distribution of the drafts": (
        lambda p, h: replace(h, tensors={n: t for n, t in h.tensors.items() if n != "draft_probs"}),
        1,
    ),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[SpeculativeModel, SpeculativeModel]]:
    """Without prefix caching: spoiled pages would be found again."""
    with (
        load("gsm-llama", enable_prefix_caching=False) as p,
        load("gsm-llama", enable_prefix_caching=False) as d,
    ):
        yield p, d


@pytest.mark.long
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_seen(name: str, pair: tuple[SpeculativeModel, SpeculativeModel]) -> None:
    """What moves is needed: the comparison fails without any part of it (tokens alone would hide the head's)."""
    (p, d), (spoil, sampled) = pair, DEFECTS[name]
    params = [replace(PARAMS[sampled], temperature=2.0 * sampled, seed=i) for i in range(3)]
    expected = lived(p.generate(PROMPTS, params))
    assert lived(d.resume(p.prefill(PROMPTS, params))) == expected
    spoiled = lived(d.resume([spoil(p, handoff) for handoff in p.prefill(PROMPTS, params)]))
    assert spoiled != expected
    if name in ("no pages of the head", "drafts in another order"):
        assert [own[0] for own in spoiled] == [own[0] for own in expected]  # lossless: only the drafts show it


CHILD = """
import sys
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads(1)
from specdec import SamplingParams, SpeculativeModel
prompts, params, sizes = {prompts!r}, SamplingParams(max_new_tokens=32, return_drafts=True), {sizes!r}
model = SpeculativeModel.from_pretrained("gsm-llama", "auto", **sizes)
model.open_transfer({transport!r})
for handoff in model.prefill(prompts, params, lease_seconds=120):
    print("handoff", handoff.to_bytes().hex(), flush=True)
for line in sys.stdin:
    print("usage", model.usage().target_pages, flush=True)
"""


@contextmanager
def prefilling(start: Any, transport: str, prompts: list[str]) -> Iterator[tuple[Any, list[Handoff]]]:
    """Another process that has read the prompts -> (process, handoffs)."""
    code = CHILD.format(root=str(ROOT), prompts=prompts, sizes=SIZES, transport=transport)
    process = start(code, env={**os.environ, "SPECDEC_CHECK": "1", "OMP_NUM_THREADS": "1"})
    try:
        found = []
        while len(found) < len(prompts):
            word, _, data = answer(process).partition(" ")
            if word == "handoff":
                found.append(Handoff.from_bytes(bytes.fromhex(data)))
        yield process, found
    finally:
        process.kill()
        process.wait()


def answer(process: Any) -> str:
    line = str(process.stdout.readline())
    assert line, "the process has ended"
    return line.strip()


def pages_held(process: Any) -> int:
    process.stdin.write("\n")
    process.stdin.flush()
    while not (line := answer(process)).startswith("usage"):
        pass
    return int(line.split()[1])


@pytest.mark.parametrize(
    "transport",
    [
        pytest.param("sockets", marks=pytest.mark.slow),
        pytest.param("nixl", marks=[needs_nixl, pytest.mark.slow]),
    ],
)
@pytest.mark.thorough
def test_between_two_processes_that_hang_and_die(
    transport: str, pair: tuple[SpeculativeModel, SpeculativeModel], start_python: Any
) -> None:
    """Moved; the source frozen: an error in time, and no page used again early; awake again: moved after all; killed:
    an error, or the prompt is read again."""
    stays, d = pair
    expected = lived(stays.generate(PROMPTS * 2, GREEDY))
    d.open_transfer(transport)
    with prefilling(start_python, transport, PROMPTS * 2) as (process, handoffs):
        held = pages_held(process)
        assert lived(d.resume(handoffs[0])) == expected[:1]
        end = time.monotonic() + 5
        while pages_held(process) == held and time.monotonic() < end:
            time.sleep(0.01)
        assert pages_held(process) == held - len(handoffs[0].blocks["target"])

        os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        try:
            d.resume(handoffs[1], timeout=0.7)
            frozen = False  # NIXL copies memory of this host without the other process's help
        except TransferTimeoutError:
            frozen = True
        assert time.monotonic() - started < 5 and (frozen or transport == "nixl")
        quarantined = late_pages(d)
        assert d.usage().target_pages == len(quarantined) <= len(handoffs[1].blocks["target"])
        os.kill(process.pid, signal.SIGCONT)
        if frozen:
            assert lived(d.resume(handoffs[1])) == expected[1:2]
        end = time.monotonic() + 5
        while not free_everywhere(d) and time.monotonic() < end:
            time.sleep(0.01)
        assert free_everywhere(d)
        assert lived(d.resume(handoffs[2])) == expected[2:3]

        process.kill()
        process.wait()
        started = time.monotonic()
        with pytest.raises(TransferError, match=r"gone|nobody listens"):
            d.resume(handoffs[3])
        assert time.monotonic() - started < 5
        assert lived(d.resume(handoffs[4:], on_failure="prefill")) == expected[4:]
        assert free_everywhere(d)
        scheduler_of(d).target_pages.validate()
