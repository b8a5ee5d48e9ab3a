"""Ranks that fail or end, interrupts and wrong calls: an error by name, soon, and no process left."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fakes import LetterTokenizer

from specdec import (
    HeadLoadError,
    InvalidInputError,
    ModelLoadError,
    OutOfDeviceMemoryError,
    RanksLostError,
    SamplingParams,
    SpecdecError,
    SpeculativeModel,
)
from specdec.extensions.parallel import loading as leading
from specdec.extensions.parallel import workers
from specdec.extensions.parallel.engine import differing_ids
from specdec.extensions.parallel.symmetric import join_group
from tests.rank_server import run_python
from tests.specdec.extensions.parallel import on_ranks

__all__ = ["run_python"]

SOON = 5.0
SIZES: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "page_size": 4, "kv_cache_tokens": 400}
PARAMS = SamplingParams(max_new_tokens=12)
PROMPT = "abcd efgh"


def load(folder: Path, **options: Any) -> Any:
    options = {"tokenizer": LetterTokenizer(), "device": "cpu", "tensor_parallel_size": 2, **SIZES, **options}
    return SpeculativeModel.from_pretrained(folder, **options)


def pids_of(model: Any) -> list[int]:
    return [each.process.pid for each in model.ranks.channel.workers.processes]


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that still run."""
    found = []
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            found.append(pid)
    return found


def load_ends_all(words: str, loading: Callable[[], Any], pids: list[int]) -> None:
    """It fails soon, with these words, and none of the processes is left."""
    started = time.monotonic()
    with patch.object(workers, "_PATIENCE", 0.3), pytest.raises(ModelLoadError, match=words):
        loading()
    assert time.monotonic() - started < SOON + 3  # a load takes no longer on a busy machine
    assert alive(pids) == []


@pytest.fixture
def new_processes() -> None:
    """None are open yet: what other tests of the module share is lost, and loaded anew when they ask for it."""
    if workers.are_open():
        workers.open_workers(2)[0].end()


@pytest.fixture
def model(two_ranks: Any, folders: Callable[[str], Path], keep: Callable[..., Any]) -> Any:
    return keep("model", lambda: [load(folders("one-kv-head"))])[0]


@pytest.fixture
def answer(model: Any) -> list[int]:
    return list(model.generate(PROMPT, PARAMS)[0].token_ids)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_bad_prompt_is_told_to_nobody(model: Any, answer: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="outside the vocabulary"):
        model.generate([[1, 2], [3, 4000]], PARAMS)
    assert model.generate(PROMPT, PARAMS)[0].token_ids == answer


@pytest.mark.slow
@pytest.mark.thorough
def test_a_forward_of_one_rank_alone_is_refused(model: Any, answer: list[int]) -> None:
    started = time.monotonic()
    ids = torch.tensor([[1, 2, 3]])
    for call in (model.hf_model, model.hf_model.generate):
        with pytest.raises(SpecdecError, match="on one rank alone"):
            call(ids)
    with pytest.raises(InvalidInputError, match="one share of the weights"):
        model.refresh()
    assert time.monotonic() - started < SOON
    assert model.generate(PROMPT, PARAMS)[0].token_ids == answer


@pytest.mark.slow
@pytest.mark.thorough
def test_an_interrupt_leaves_the_model_usable(model: Any, answer: list[int], interruptible: None) -> None:
    for delay in (0.05, 0.11, 0.2):
        timer = threading.Timer(delay, signal.raise_signal, [signal.SIGINT])
        stream = model.stream([PROMPT] * 3, SamplingParams(max_new_tokens=80))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            for _ in stream:
                pass
            time.sleep(1)
        timer.join()
        stream.close()
        assert model.generate(PROMPT, PARAMS)[0].token_ids == answer
    assert model.usage().requests == 0


@pytest.mark.slow
@pytest.mark.thorough
def test_an_error_in_a_text_ends_its_request_on_every_rank(two_ranks: Any, folders: Callable[[str], Path]) -> None:
    class Broken(LetterTokenizer):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            if len(token_ids) > 4:
                raise OSError("planted")
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    with load(folders("one-kv-head"), tokenizer=Broken()) as own:
        for _ in range(2):
            with pytest.raises(SpecdecError, match="planted"):
                own.generate([PROMPT, "zz"], PARAMS)
        assert own.usage().requests == 0


@pytest.mark.long
def test_two_models_take_turns_on_several_threads(
    two_ranks: Any, model: Any, answer: list[int], folders: Callable[[str], Path]
) -> None:
    found: list[Any] = []

    def ask(which: Any) -> None:
        found.append([which.generate(PROMPT, PARAMS)[0].token_ids for _ in range(6)])

    with load(folders("qwen3-moe")) as other:
        right = other.generate(PROMPT, PARAMS)[0].token_ids
        threads = [threading.Thread(target=ask, args=(which,)) for which in (model, other, model, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == sorted([[answer] * 6, [right] * 6] * 2)
    with pytest.raises(InvalidInputError, match="models with tensor_parallel_size=2 are open"):
        load(folders("one-kv-head"), tensor_parallel_size=4)
    assert model.generate(PROMPT, PARAMS)[0].token_ids == answer
    with pytest.raises(InvalidInputError, match="give at least one token id"):
        model.own_logits([])


@pytest.mark.slow
@pytest.mark.thorough
def test_a_load_that_fails_on_one_rank_names_it(two_ranks: Any, model: Any, folders: Callable[[str], Path]) -> None:
    """The other models of these processes are lost with it; the next load starts new ones."""
    with pytest.raises(HeadLoadError, match="there is no folder"):
        load(folders("one-kv-head"), draft="/no/such/head")
    assert model.generate(PROMPT, PARAMS)  # what all ranks refuse alike harms nobody
    pids = pids_of(model)
    model.engine.run(on_ranks.broken_loading, 1, "specdec.extensions.parallel.ranks:take_share", "OSError")
    load_ends_all(r"rank 1 \(process \d+\): .*planted", lambda: load(folders("one-kv-head")), pids)
    with pytest.raises(RanksLostError, match="load it again"):
        model.generate(PROMPT, PARAMS)
    model.close()


@pytest.mark.long
def test_a_process_killed_while_nothing_runs(folders: Callable[[str], Path], every_self_test: None) -> None:
    with load(folders("one-kv-head")) as own:
        (pid,) = pids_of(own)
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        while not own.ranks.channel.workers.is_lost and time.monotonic() - started < SOON:
            time.sleep(0.01)
        with pytest.raises(RanksLostError, match=rf"rank 1 \(process {pid}\) is lost: it was killed by SIGKILL"):
            own.generate(PROMPT, PARAMS)
        assert time.monotonic() - started < SOON


@pytest.mark.slow
@pytest.mark.thorough
def test_a_process_killed_before_the_ranks_meet(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, every_self_test: None, new_processes: None
) -> None:
    """gloo would wait two minutes for it, NCCL without end."""
    killed: list[float] = []

    def kill_then_join(*arguments: Any) -> Any:
        for each in workers.open_workers(2)[0].processes:
            os.kill(each.process.pid, signal.SIGKILL)
        killed.append(time.monotonic())
        return join_group(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(leading, "join_group", kill_then_join)
        # it may have done its part of the meeting before it is killed: then the load finds it lost
        with pytest.raises(ModelLoadError, match=r"(did not start|on all ranks): rank 1 .* was killed by SIGKILL"):
            load(folders("one-kv-head"))
    assert time.monotonic() - killed[0] < SOON
    with load(folders("one-kv-head")) as again:
        assert len(again.generate(PROMPT, PARAMS)[0].token_ids) == 12


@pytest.mark.slow
@pytest.mark.thorough
def test_a_process_killed_in_a_round(folders: Callable[[str], Path], every_self_test: None) -> None:
    """Rank 0 waits in a sum when it happens: the other process was stopped before."""
    with load(folders("one-kv-head")) as own:
        (pid,) = pids_of(own)
        stream = own.stream([PROMPT] * 2, SamplingParams(max_new_tokens=60))
        next(stream)
        os.kill(pid, signal.SIGSTOP)
        killed = []
        timer = threading.Timer(0.5, lambda: (killed.append(time.monotonic()), os.kill(pid, signal.SIGKILL)))
        timer.start()
        with pytest.raises(RanksLostError, match="killed by SIGKILL"):
            for _ in stream:
                pass
        assert time.monotonic() - killed[0] < SOON
        with pytest.raises(RanksLostError):
            own.generate(PROMPT, PARAMS)
        assert not own.engine.has_work


@pytest.mark.slow
@pytest.mark.thorough
def test_a_process_killed_while_a_long_prompt_is_read_and_a_request_streams(
    folders: Callable[[str], Path], every_self_test: None, real_ranks: None
) -> None:
    """A new interpreter, killed in a sum of the prompt's third chunk (of four layers' sums each); all calls fail."""
    with load(folders("one-kv-head")) as own:
        (pid,) = pids_of(own)
        stream = own.stream(PROMPT, SamplingParams(max_new_tokens=100))
        next(stream)
        own.engine.run(on_ranks.killed_in_a_sum, 1, 20, 10)
        told: list[BaseException] = []

        def read() -> None:
            try:
                own.generate([[5] * 110], PARAMS)
            except BaseException as error:
                told.append(error)

        reader = threading.Thread(target=read)
        started = time.monotonic()
        reader.start()
        with pytest.raises(RanksLostError, match=rf"rank 1 \(process {pid}\) is lost: it was killed by SIGKILL"):
            for _ in stream:
                pass
        reader.join(SOON)
        assert time.monotonic() - started < SOON
        assert [type(error) for error in told] == [RanksLostError] and "killed by SIGKILL" in str(told[0])
        assert own.usage().requests == 0 and alive([pid]) == []


def left_behind(before: set[threading.Thread]) -> list[Any]:
    """Threads that were not there before, and folders for files of ranks, once a moment has passed."""
    deadline = time.monotonic() + 1
    while True:
        threads = [each for each in set(threading.enumerate()) - before if each.name != "tqdm_monitor"]
        found = [*threads, *Path(tempfile.gettempdir()).glob("specdec-*")]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


PHASES = {
    "share": ("specdec.extensions.parallel.ranks:take_share", "OSError"),
    "sizes": ("specdec.loading.parts:divide_cache", "OSError"),
    "caches": ("specdec.loading.assembly:runner_of", "OutOfMemoryError"),
    "self-test": ("specdec.loading.assembly:check_target", "OSError"),
    "self-test, no memory": ("specdec.loading.assembly:check_target", "OutOfMemoryError"),
    "behind all sums": ("specdec.engine.sharing:SharedEngine", "OutOfMemoryError"),
}


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_in_any_phase(
    folders: Callable[[str], Path],
    every_self_test: None,
    rank: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Soon, by name, nothing stays, and the next load works."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 0))
    before = set(threading.enumerate())
    own = load(folders("one-kv-head"))
    right = own.generate(PROMPT, PARAMS)[0].token_ids
    for place, kind in PHASES.values():
        pids = pids_of(own)
        own.engine.run(on_ranks.broken_loading, rank, place, kind)
        started = time.monotonic()
        name = r"on all ranks: rank 1 \(process \d+\): .*" if rank else ""
        errors = ModelLoadError if rank else (ModelLoadError, OutOfDeviceMemoryError, OSError)
        with pytest.raises(errors, match=rf"(?s){name}planted") as found:
            load(folders("one-kv-head"))
        assert time.monotonic() - started < SOON + 3, place
        own.close()
        assert rank == 1 or "rank 1" not in str(found.value), place
        del found
        gc.collect()
        assert (alive(pids), left_behind(before)) == ([], []), place
        own = load(folders("one-kv-head"))
        assert own.generate(PROMPT, PARAMS)[0].token_ids == right
    own.close()


@pytest.mark.long
def test_a_process_that_stands_still_and_two_interrupts(
    folders: Callable[[str], Path], every_self_test: None, interruptible: None
) -> None:
    """Rank 0 waits for it in a sum; the first interrupt waits for the end of the round, which does not come."""
    with load(folders("one-kv-head")) as own:
        (pid,) = pids_of(own)
        stream = own.stream(PROMPT, SamplingParams(max_new_tokens=60))
        next(stream)
        os.kill(pid, signal.SIGSTOP)
        timers = [threading.Timer(delay, signal.raise_signal, [signal.SIGINT]) for delay in (0.3, 0.9)]
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            for timer in timers:
                timer.start()
            for _ in stream:
                pass
        assert 0.9 <= time.monotonic() - started < SOON
        with pytest.raises(RanksLostError, match="in the midst of a call"):
            own.generate(PROMPT, PARAMS)
        assert alive([pid]) == []


class OfThisProgram:
    """What no other process can import."""


@pytest.mark.slow
@pytest.mark.thorough
def test_a_message_that_another_rank_cannot_read(folders: Callable[[str], Path], every_self_test: None) -> None:
    with load(folders("one-kv-head")) as own:
        own.engine.tell("engine", "abort", OfThisProgram())
        started = time.monotonic()
        with pytest.raises(RanksLostError, match=r"rank 1 .*(ModuleNotFoundError|AttributeError)"):
            own.generate(PROMPT, PARAMS)
        assert time.monotonic() - started < SOON


@pytest.mark.slow
@pytest.mark.thorough
def test_ranks_that_disagree(folders: Callable[[str], Path], every_self_test: None) -> None:
    with load(folders("one-kv-head")) as own:
        assert own.engine.run(on_ranks.nothing) == 0
        own.engine.run(on_ranks.one_more_request)
        started = time.monotonic()
        with pytest.raises(RanksLostError, match="the ranks disagree about a round"):
            own.generate(PROMPT, PARAMS)
        assert time.monotonic() - started < SOON


@pytest.mark.long
def test_the_garbage_collector_ends_the_processes(folders: Callable[[str], Path], every_self_test: None) -> None:
    own = load(folders("one-kv-head"))
    pids, inner = pids_of(own), own.hf_model
    del own
    gc.collect()
    assert alive(pids) == []
    with pytest.raises(SpecdecError, match="on one rank alone"):
        inner(torch.tensor([[1, 2]]))


@pytest.fixture
def built_in(every_self_test: None, new_processes: None) -> Iterator[Any]:
    """The built-in pair, on processes of its own."""
    with SpeculativeModel.from_pretrained(
        "gsm-llama", "auto", device="cpu", tensor_parallel_size=2, max_model_len=64, max_num_seqs=2
    ) as loaded:
        yield loaded


@pytest.mark.slow
@pytest.mark.thorough
def test_wrong_drafts_of_a_rank_are_counted_and_harmless(built_in: Any) -> None:
    """Without the broadcast they change the tokens: what the planted defect shows of the test itself."""
    prompts = ["Anna has 12 apples and buys 8 more.", "Tom reads 7 pages a day."]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, return_drafts=True)
    right = built_in.generate(prompts, params)
    assert differing_ids(built_in.engine) == [0, 0]
    built_in.engine.run(on_ranks.wrong_drafts)
    found = built_in.generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in right]
    assert [c.drafts for c in found] == [c.drafts for c in right]
    counts = differing_ids(built_in.engine)
    assert counts[0] == 0 and counts[1] > 10
    built_in.engine.run(on_ranks.right_drafts)
    built_in.engine.run(on_ranks.wrong_results)
    assert [c.token_ids for c in built_in.generate(prompts, params)] == [c.token_ids for c in right]
    assert differing_ids(built_in.engine)[1] > counts[1] + 10
    built_in.engine.run(on_ranks.right_results)
    built_in.engine.run(on_ranks.wrong_drafts)
    built_in.engine.run(on_ranks.never_share)
    assert [c.token_ids for c in built_in.generate(prompts, params)] != [c.token_ids for c in right]


@pytest.mark.slow
@pytest.mark.thorough
def test_close_ends_the_processes(built_in: Any) -> None:
    pids = pids_of(built_in)
    assert alive(pids) == pids and len(pids) == 1
    started = time.monotonic()
    built_in.close()
    assert time.monotonic() - started < SOON and alive(pids) == []
    built_in.close()


CRASH = """
import os, signal, sys, time, torch
from specdec.extensions.parallel.loading import start_ranks
link = start_ranks(2, torch.device("cpu"))
fork = os.fork()
if fork == 0:
    sys.exit(7)  # with the group of its parent, whose threads it does not have
for _ in range(600):
    if os.waitpid(fork, os.WNOHANG)[0]:
        break
    time.sleep(0.05)
else:
    os.kill(fork, signal.SIGKILL)
    sys.exit("the fork did not end")
print(link.workers.folder, *(each.process.pid for each in link.workers.processes), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_nothing_outlives_a_crash(run_python: Any) -> None:
    """The rank is a new interpreter."""
    root = Path(__file__).resolve().parents[4]
    done = run_python(CRASH, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])})
    folder, *numbers = done.stdout.split() or [""]
    pids = [int(number) for number in numbers]
    assert done.returncode == -signal.SIGKILL and len(pids) == 1, done.stderr
    deadline = time.monotonic() + SOON
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(pids) == [] and not Path(folder).exists()
