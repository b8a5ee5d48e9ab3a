"""What tests let every rank run (`LeadingEngine.run`): planted defects, most of them on rank 1 alone."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import signal
import sys
import time
import unittest.mock
import zlib
from pathlib import Path
from typing import Any, cast

import torch

import specdec.execution.eager
import specdec.extensions.parallel.among_ranks
import specdec.extensions.parallel.ranks
from specdec.acceptance.judge import judge
from specdec.errors import TransferTimeoutError
from specdec.extensions.handoff.link import RankEnd

PLANTED = "planted"


def nothing(engine: Any) -> int:
    return engine.ranks.rank


def wrong_drafts(engine: Any) -> None:
    """Rank 1 drafts other ids from now on, which no head ever drafts."""
    if engine.ranks.rank == 0:
        return
    loop = engine.executor.drafter.loop
    run = type(loop).run

    def wrong(*args: Any) -> Any:
        draft = run(loop, *args)
        draft.token_ids.zero_()
        return draft

    object.__setattr__(loop, "run", wrong)


def right_drafts(engine: Any) -> None:
    vars(engine.executor.drafter.loop).pop("run", None)


def never_share(engine: Any) -> None:
    """No rank takes over rank 0's drafts: what `Ranks.share` is for, left out."""
    share = specdec.extensions.parallel.ranks.Ranks.share

    def not_drafts(self: Any, ids: torch.Tensor) -> None:
        if ids.shape[1] > engine.config.num_speculative_tokens:
            share(self, ids)

    engine.ranks.share = functools.partial(not_drafts, engine.ranks)


def broken_loading(engine: Any, rank: int, place: str, kind: str) -> None:
    """The next load fails on one rank where it calls place ("module:function"). kind: of the error, or "killed"."""
    if engine.ranks.rank != rank:
        return
    module, _, function = place.partition(":")

    def fail(*args: Any, **options: Any) -> None:
        patched.stop()
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank:
            torch.cuda.mem_get_info = lambda *_: (0, 0)  # which the message of an OutOfMemoryError has
        raise {"OSError": OSError, "OutOfMemoryError": torch.OutOfMemoryError}[kind](f"out of memory, {PLANTED}")

    patched = unittest.mock.patch.object(importlib.import_module(module), function, fail)
    patched.start()


def killed_in_a_sum(engine: Any, rank: int, tokens: int, count: int) -> None:
    """One rank is killed in its count-th sum of so many tokens or more."""
    if engine.ranks.rank != rank:
        return
    collectives, seen = engine.ranks.collectives, list[int]()
    add = collectives.sum

    def counted(x: torch.Tensor) -> torch.Tensor:
        seen.extend([1] * (x.numel() // x.shape[-1] >= tokens))
        if len(seen) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return cast(torch.Tensor, add(x))

    collectives.sum = counted


def one_more_request(engine: Any) -> None:
    """Rank 1 has a request that nobody else has."""
    if engine.ranks.rank == 1:
        from specdec.engine.engine import Engine
        from specdec.requests.sampling import SamplingParams

        Engine.submit(engine, [5, 6, 7], SamplingParams(max_new_tokens=8))


@torch.no_grad()
def compiled_error(engine: Any) -> float:
    """The largest difference of logits between the share as one compiled graph, for any length, and as it is."""
    model = engine.target.hf_model
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    errors = []
    for count in (5, 9):
        ids = torch.arange(3, 3 + count)[None]
        errors.append(float((compiled(ids, use_cache=False).logits - model(ids, use_cache=False).logits).abs().max()))
    return max(errors)


def wrong_results(engine: Any) -> None:
    """Rank 1 accepts nothing and decides another token from now on."""
    if engine.ranks.rank == 0:
        return

    def wrong(*args: Any) -> Any:
        result = judge(*args)
        result.num_accepted.zero_()
        result.tokens.fill_(7)
        return result

    specdec.execution.eager.judge = wrong


def right_results(engine: Any) -> None:
    specdec.execution.eager.judge = judge


_patches = contextlib.ExitStack()


def graphs_on_cpu(engine: Any, compiled: bool) -> None:
    """From now on this process captures graphs on a CPU: launches that run again, see tests/specdec/execution."""
    if "fakes" not in sys.modules:  # in a worker, which has no conftest
        spec = importlib.util.spec_from_file_location("fakes", Path(__file__).resolve().parents[3] / "fakes.py")
        assert spec is not None and spec.loader is not None
        sys.modules["fakes"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["fakes"])
    import pytest
    from fakes import backend_of_ours

    from tests.sampled_rounds import kernels_by_reference
    from tests.specdec.execution.test_graphs import FixedPlaceBackend, compile_nothing, record_on_cpu

    patched = _patches.enter_context(pytest.MonkeyPatch.context())
    _patches.enter_context(kernels_by_reference())
    record_on_cpu(patched)
    if not compiled:
        compile_nothing(patched)
    _patches.enter_context(backend_of_ours(FixedPlaceBackend(torch.device("cpu"))))


def no_graphs_on_cpu(engine: Any) -> None:
    _patches.close()


def launch_ahead(engine: Any) -> None:
    """As on a GPU, where a verification is queued before the host goes on."""
    engine.use(engine.executor, queue_verification=True)


def wrong_drafts_of_graphs(engine: Any) -> None:
    """Rank 1's draft loop leaves other ids than it found, whenever a verification is about to read them."""
    if engine.ranks.rank == 0:
        return
    verify = engine.executor.verify

    def wrong(round_: Any, draft: Any) -> Any:
        if draft is not None:
            draft.token_ids.zero_()
        return verify(round_, draft)

    engine.executor.verify = wrong


def late_pages(engine: Any) -> set[int]:
    """Pages of the target's first group that are in quarantine."""
    reserved = engine.guests.held.reserved.values()
    return {page for own in reserved if own.settled is not None for page in own.pages[0]}


def pages_in_use(engine: Any) -> list[int]:
    """Pages of the target's first group that each rank has in use, and of them in quarantine: two numbers a rank."""
    own = [engine.usage().target_pages, len(late_pages(engine))]
    found = engine.ranks.collectives.gather(torch.tensor(own, device=engine.ranks.device))
    return [int(number) for number in found.flatten().tolist()]


def page_digests(engine: Any, pages: list[int]) -> list[list[int]]:
    """Of each rank, one number for keys and one for values of each of the target's layers in these pages (HND)."""
    layers = engine.target.runner.runners[0].layers
    own = torch.tensor([digest(t[pages]) for layer in layers for t in (layer.keys, layer.values)])
    return list(engine.ranks.collectives.gather(own.to(engine.ranks.device)).tolist())


def digest(pages: torch.Tensor) -> int:
    """Of the bytes of some pages."""
    return zlib.crc32(pages.contiguous().view(torch.uint8).cpu().numpy().tobytes())


def wrong_head_range(engine: Any) -> None:
    """Every rank takes its heads for the first ones, when a transport is opened next."""
    _patches.enter_context(unittest.mock.patch("specdec.extensions.handoff.link._part", lambda ranks: 0))


def late_grant(engine: Any, waits: bool) -> None:
    """Rank 1 is half a second late when it lets pages be read. waits: whether rank 0 waits for it, as it has to."""
    if engine.ranks.rank == 1:
        grant = engine.guests.held.grant

        def late(lease: str, pages: Any) -> None:
            time.sleep(0.5)
            grant(lease, pages)

        engine.guests.held.grant = late
    if not waits:
        engine.guests.held.confirm = lambda granted: None


def late_read(engine: Any) -> None:
    """Rank 1's reads begin late: two seconds are long for what rank 0 does meanwhile, also on a busy machine."""
    if engine.ranks.rank == 0:
        return
    read = RankEnd.read

    def late(self: Any, own: Any) -> Any:
        time.sleep(2.0)
        return read(self, own)

    _patches.enter_context(unittest.mock.patch.object(RankEnd, "read", late))


class Unsettled:
    """A read that comes too late, and may write to its pages until `settle_reads`."""

    settled = False

    def wait(self, deadline: float) -> None:
        raise TransferTimeoutError("late")


def unsettled_reads(engine: Any) -> None:
    """Rank 1's reads are such ones."""
    if engine.ranks.rank == 1:
        Unsettled.settled = False
        _patches.enter_context(unittest.mock.patch.object(RankEnd, "read", lambda self, own: Unsettled()))


def settle_reads(engine: Any) -> None:
    """Nothing is written any more."""
    Unsettled.settled = True


def unpatched(engine: Any) -> None:
    """Without what was patched in these functions."""
    _patches.close()


def waits_again(engine: Any) -> None:
    """After `late_grant(…, False)`."""
    engine.guests.held.confirm = functools.partial(specdec.extensions.parallel.among_ranks.confirm, engine.ranks)
