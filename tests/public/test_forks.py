"""A forked child has the model, and none of the threads that were using it: it answers, or says why not, at once."""

from __future__ import annotations

import faulthandler
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
from fakes import LetterTokenizer, hf_greedy, random_prompts, table_head, tiny_llama, wrap

from attention.recurrence.hf_calls import STAND_INS
from specdec import SamplingParams, SpecdecError
from tests.hybrids import tiny_hybrid

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))
NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW)
LIMIT = 2.0
"""Seconds that a child may take; then it is killed. On a busy machine it may take as many times longer as there are
processes that wait for a core, and the long test allows no more anywhere."""


def right(i: int) -> list[int]:
    return hf_greedy(PROMPTS[i], NEW)


def tokens_of(model: Any, i: int) -> list[int]:
    return list(model.generate(PROMPTS[i], GREEDY)[0].token_ids)


def logits_of(model: Any, i: int) -> torch.Tensor:
    with torch.no_grad():
        return model.hf_model(torch.tensor([PROMPTS[i]]), use_cache=False).logits


def said_by_child(job: Callable[[], str], limit: float | None = None) -> str:
    """What `job` returns in a fork of this process, the error of ours that it raises, or where it is when it is killed.

    limit: default LIMIT, longer on a busy machine.
    """
    if limit is None:
        limit = LIMIT * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))
    (reader, writer), (stacks, at_last) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            faulthandler.dump_traceback_later(0.9 * limit, file=at_last)
            said = job()
        except SpecdecError as error:
            said = f"{type(error).__name__}: {error}"
        except BaseException as error:
            said = f"not ours: {type(error).__name__}: {error}"
        finally:
            os.write(writer, said[:4000].encode())
            os.kill(os.getpid(), signal.SIGKILL)  # no handlers of the parent, of pytest for example
    os.close(writer)
    os.close(at_last)
    until, ended = time.monotonic() + limit, 0
    while not ended and time.monotonic() < until:
        ended, _ = os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said = os.read(reader, 4096).decode() if ended else f"killed at {os.read(stacks, 4096).decode()}"
    os.close(reader)
    os.close(stacks)
    return said


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


def forks(episodes: int, seed: int, limit: float | None) -> list[tuple[str, str, str]]:
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
                found.append((f"{kind[0]} generate, {kind[1]} call", name, said_by_child(jobs[name], limit)))
    assert [tokens_of(model, i) for i in range(6)] == [right(i) for i in range(6)], "the parent goes on"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("episodes", [6, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_forks_at_random_moments(episodes: int) -> None:
    found = forks(episodes, seed=5, limit=LIMIT if episodes > 10 else None)
    assert len(found) == episodes
    assert [entry for entry in found if entry[2] != "right"] == []


@pytest.mark.slow
@pytest.mark.thorough
def test_a_child_that_has_closed_the_model_waits_for_no_thread_of_the_parents() -> None:
    """Two threads of OpenMP have helped the parent: GNU's waits for them in the child, where they are not."""
    model = wrap(target := tiny_llama(), table_head(target), num_speculative_tokens=3)
    torch.set_num_threads(2)
    try:
        x = torch.randn(600, 600)
        products = [x @ x for _ in range(3)] + [torch.nn.functional.softmax(x, 1)]
        expected = logits_of(model, 1)
        assert len(products) == 4
        jobs = child_jobs(model, expected)
        assert [said_by_child(jobs["close"]) for _ in range(4)] == ["right"] * 4
    finally:
        torch.set_num_threads(1)


class Forking(LetterTokenizer):
    """Calls `hook` once, inside a round."""

    hook: Callable[[], object] | None = None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        hook, self.hook = self.hook, None
        if hook is not None:
            hook()
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.slow
def test_a_fork_inside_a_round_goes_on_there_too() -> None:
    tokenizer, children = Forking(), list[int]()
    model = wrap(tiny_llama(), tokenizer=tokenizer)

    def generate() -> str:
        tokenizer.hook = lambda: children.append(os.fork())
        found = tokens_of(model, 1)
        if children == [0]:
            said = "right" if found == right(1) else f"wrong: {found}"
            os.write(writer, said.encode())
            os.kill(os.getpid(), signal.SIGKILL)  # no handlers of the parent, of pytest for example
        return "right" if found == right(1) else f"wrong: {found}"

    reader, writer = os.pipe()
    assert right(1) and generate() == "right"
    ended, until = 0, time.monotonic() + 5 * LIMIT
    while not ended and time.monotonic() < until:
        ended, _ = os.waitpid(children[0], os.WNOHANG)
        time.sleep(0.001)
    if not ended:
        os.kill(children[0], signal.SIGKILL)
    assert ended and os.read(reader, 100) == b"right"


@pytest.mark.slow
def test_a_stream_that_another_thread_was_reading_is_not_cut_short_without_a_word() -> None:
    model = wrap(tiny_llama(), max_num_seqs=4)
    stream = model.stream(PROMPTS[1], SamplingParams(max_new_tokens=90, ignore_eos=True))
    next(stream)
    reading, go_on = threading.Event(), threading.Event()

    def hook(*_: object) -> None:
        reading.set()
        assert go_on.wait(60)

    handle = model.hf_model.register_forward_pre_hook(hook)
    reader = threading.Thread(target=lambda: list(stream), daemon=True)
    reader.start()
    assert reading.wait(60)

    def read() -> str:
        go_on.set()
        return str(len(list(stream)))

    said = said_by_child(read)
    handle.remove()
    go_on.set()
    reader.join(60)
    assert said.startswith("SpecdecError: another thread was waiting for this stream when the process was forked")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_recurrent_model_is_the_users_again_in_a_fork() -> None:
    """Functions of its modeling file are replaced while a round runs on another thread."""
    target = tiny_hybrid("qwen3_next")
    model, ids = wrap(target, max_model_len=128), torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        expected = target(ids, use_cache=False).logits
    inside, go_on = threading.Event(), threading.Event()

    def hook(*_: object) -> None:
        inside.set()
        assert go_on.wait(60)

    handle = target.get_input_embeddings().register_forward_pre_hook(hook)
    worker = threading.Thread(target=lambda: tokens_of(model, 0), daemon=True)
    worker.start()
    assert inside.wait(60)

    def forward() -> str:
        go_on.set()
        functions = vars(sys.modules[type(target).__module__])
        replaced = [name for name in STAND_INS if getattr(functions.get(name), "__name__", "") == "stand_in"]
        with torch.no_grad():
            right = torch.equal(target(ids, use_cache=False).logits, expected)
        return "right" if right and not replaced else f"{right}, still replaced: {replaced}"

    said = said_by_child(forward)
    go_on.set()
    worker.join(60)
    handle.remove()
    assert said == "right"


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        for entry in forks(int(sys.argv[1]), seed=int(sys.argv[2])):
            print(*entry, sep=" | ")
