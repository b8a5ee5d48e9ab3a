"""A forked child has the model, and none of the threads that were using it: it answers, or says why not, at once."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from fakes import hf_greedy, random_prompts, table_head, tiny_llama, wrap

from specdec import SamplingParams, SpecdecError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))
NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW)
LIMIT = 2.0
"""Seconds that a child may take; then it is killed."""


def right(i: int) -> list[int]:
    return hf_greedy(PROMPTS[i], NEW)


def tokens_of(model: Any, i: int) -> list[int]:
    return list(model.generate(PROMPTS[i], GREEDY)[0].token_ids)


def logits_of(model: Any, i: int) -> torch.Tensor:
    with torch.no_grad():
        return model.hf_model(torch.tensor([PROMPTS[i]]), use_cache=False).logits


def said_by_child(job: Callable[[], str]) -> str:
    """What `job` returns in a fork of this process, the name of the error of ours that it raises, or "killed"."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            said = job()
        except SpecdecError as error:
            said = f"{type(error).__name__}: {error}"
        except BaseException as error:
            said = f"not ours: {type(error).__name__}: {error}"
        finally:
            os.write(writer, said[:4000].encode())
            os._exit(0)
    os.close(writer)
    until, ended = time.monotonic() + LIMIT, 0
    while not ended and time.monotonic() < until:
        ended, _ = os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said = os.read(reader, 4096).decode()
    os.close(reader)
    return said if ended else "killed"


def busy(model: Any, generating: int, calling: int) -> list[Callable[[], object]]:
    """What threads do all the while: generate, or call hf_model themselves."""
    jobs: list[Callable[[], object]] = [lambda k=k: tokens_of(model, k % 6) for k in range(generating)]
    return jobs + [lambda: logits_of(model, 4) for _ in range(calling)]


@contextmanager
def threads(jobs: list[Callable[[], object]]) -> Iterator[None]:
    stop, errors = threading.Event(), []

    def run(job: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                job()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        stop.set()
        for worker in workers:
            worker.join(60)
    assert not errors and not any(worker.is_alive() for worker in workers)


def child_jobs(model: Any, expected: torch.Tensor) -> dict[str, Callable[[], str]]:
    """By name, what a child does; each returns "right" or "wrong"."""

    def verdict(found: bool) -> str:
        return "right" if found else "wrong"

    def close() -> str:
        model.close()
        return verdict(torch.equal(logits_of(model, 1), expected))

    def forward() -> str:
        attention = model.hf_model.config._attn_implementation
        return verdict(torch.equal(logits_of(model, 1), expected)) if attention == "sdpa" else f"attention {attention}"

    return {
        "generate": lambda: verdict(tokens_of(model, 2) == right(2)),
        "hf_model": forward,
        "both": lambda: verdict(tokens_of(model, 3) == right(3) and forward() == "right"),
        "usage": lambda: verdict(model.usage().running >= 0),
        "close": close,
    }


def forks(episodes: int, seed: int) -> list[tuple[str, str, str]]:
    """(what the threads did, what the child did, what it said) of forks at random moments."""
    rng, found = random.Random(seed), []
    model = wrap(target := tiny_llama(), table_head(target), num_speculative_tokens=3, max_num_seqs=4)
    expected = logits_of(model, 1)
    jobs = child_jobs(model, expected)
    for i in range(6):
        assert tokens_of(model, i) == right(i)
    kinds = [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1)]
    for kind in kinds:
        with threads(busy(model, *kind)):
            for _ in range(episodes // len(kinds) + (kinds.index(kind) < episodes % len(kinds))):
                name = rng.choice(sorted(jobs))
                time.sleep(rng.uniform(0, 0.03))
                found.append((f"{kind[0]} generate, {kind[1]} call", name, said_by_child(jobs[name])))
    assert [tokens_of(model, i) for i in range(6)] == [right(i) for i in range(6)], "the parent goes on"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("episodes", [6, pytest.param(100, marks=pytest.mark.long)])
def test_forks_at_random_moments(episodes: int) -> None:
    found = forks(episodes, seed=5)
    assert len(found) == episodes
    assert [entry for entry in found if entry[2] != "right"] == []


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        for entry in forks(int(sys.argv[1]), seed=int(sys.argv[2])):
            print(*entry, sep=" | ")
