"""Bytes between engines, in one process and between two: exact, bounded in time, and nothing written after an error."""

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
import torch

from attention.cache.kv_cache import CacheGroup, LayerKV
from attention.errors import InvalidInputError, TransferError, TransferTimeoutError
from attention.spec import AttentionSpec
from attention.transport.nixl_agent import NixlTransport, nixl_module
from attention.transport.region_tables import Bound, EngineTable, RankTable, bind, plan
from attention.transport.sockets import SocketTransport
from attention.transport.transports import LocalTransport, ReadPlan
from tests.rank_server import real_script, start_python

__all__ = ["start_python"]

ROOT = Path(__file__).resolve().parents[3]
os.environ.setdefault("UCX_NET_DEVICES", "lo")
HAS_NIXL = importlib.util.find_spec("nixl") is not None
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed: pip install 'specdec-hf[transfer]'")
TRANSPORTS = [LocalTransport, SocketTransport, pytest.param(NixlTransport, marks=needs_nixl)]
BETWEEN = [pytest.param("SocketTransport", marks=pytest.mark.slow), pytest.param("NixlTransport", marks=needs_nixl)]
HERE, THERE = {"g": (5, 1, 3)}, {"g": (2, 6, 4)}
DIM, PAGES = 8, 8


def regions(heads: range, fill: int | None, dim: int = DIM, pages: int = PAGES) -> tuple[Bound, ...]:
    """Two layers of these of 4 heads, 4 tokens a page: bytes that say where they are, or all `fill`."""
    generator = torch.Generator().manual_seed(5)
    layers = []
    for _ in range(2):
        whole = [torch.randn(pages, 4, 4, dim, generator=generator) for _ in range(2)]
        own = [part[:, heads.start : heads.stop].contiguous() for part in whole]
        if fill is not None:
            own = [torch.full_like(part, fill) for part in own]
        layers.append(LayerKV(own[0], own[1], "HND"))
    spec = AttentionSpec(4, len(heads), dim, dim, 1.0)
    return bind(CacheGroup("g", (spec,) * 2, pages, 4, "HND"), layers, heads.start // len(heads))


def rank_of(number: int, bounds: tuple[Bound, ...], address: Any) -> RankTable:
    return RankTable(number, "cpu", tuple(bound.region for bound in bounds), address)


class Engines:
    """A source of two ranks, two heads each, and a reader of all four heads."""

    def __init__(self, kind: Callable[[], Any]) -> None:
        self.kind, name = kind, f"t{time.monotonic_ns()}"
        self.sources, ranks = [], []
        for number in range(1 if kind is LocalTransport else 2):  # in one process there is one rank
            heads = range(4) if kind is LocalTransport else range(2 * number, 2 * number + 2)
            bounds, transport = regions(heads, None), kind()
            ranks.append(rank_of(number, bounds, transport.start(f"{name}-{number}", bounds, "cpu")))
            self.sources.append((transport, bounds))
        name = f"{name}-0" if kind is LocalTransport else name
        self.table = EngineTable.from_json(EngineTable(name, "any", {}, tuple(ranks)).to_json())
        self.bounds, self.reader = regions(range(4), 7), kind()
        self.rank = rank_of(0, self.bounds, self.reader.start(f"{name}-reader", self.bounds, "cpu"))

    def plan(self, lease: str = "lease") -> ReadPlan:
        return ReadPlan(self.table, lease, self.rank, plan(self.rank, self.table.ranks), THERE, HERE)

    def grant(self) -> None:
        for transport, _ in self.sources:
            transport.grant("lease", THERE)

    def close(self) -> None:
        for transport in (self.reader, *(transport for transport, _ in self.sources)):
            transport.close()
            transport.close()

    def exact(self) -> bool:
        return all(map(torch.equal, (b.bytes for b in self.bounds), right_bytes()))


def right_bytes(dim: int = DIM, pages: int = PAGES) -> list[torch.Tensor]:
    """What the reader has after a read of `THERE` into `HERE`."""
    found = []
    for bound, source in zip(regions(range(4), 7, dim, pages), regions(range(4), None, dim, pages), strict=True):
        own = bound.bytes.clone()
        own[list(HERE["g"])] = source.bytes[list(THERE["g"])]
        found.append(own)
    return found


@pytest.fixture(params=TRANSPORTS)
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    made = Engines(request.param)
    yield made
    made.close()


def soon() -> float:
    return time.monotonic() + 10.0


def test_bytes_are_exact_from_two_ranks_and_the_source_hears_of_it(engines: Engines) -> None:
    engines.grant()
    read = engines.reader.read(engines.plan())
    read.wait(soon())
    assert read.settled and engines.exact()
    engines.reader.finish(engines.plan())
    for transport, bounds in engines.sources:
        heard, end = [], soon()
        while not heard and time.monotonic() < end:
            heard = transport.finished()
        assert heard == ["lease"] and transport.finished() == []
        heads = bounds[0].region.head_range
        assert all(map(torch.equal, (b.bytes for b in bounds), (b.bytes for b in regions(heads, None))))


def test_nothing_is_read_without_a_lease_or_after_it(engines: Engines) -> None:
    if engines.kind is NixlTransport:
        pytest.skip("NIXL has no leases of its own: whoever has the table can read")
    engines.grant()
    engines.sources[-1][0].revoke("lease")
    engines.sources[-1][0].revoke("lease")
    for lease in ("lease", "another"):
        with pytest.raises(TransferError, match=r"no longer h[eo]ld"):
            engines.reader.read(engines.plan(lease)).wait(soon())


def test_a_source_that_is_closed_is_an_error_by_name(engines: Engines) -> None:
    engines.grant()
    engines.reader.read(engines.plan()).wait(soon())
    if engines.kind is NixlTransport:
        pytest.skip("an agent of this process goes with its last reference: see the test with two processes")
    for transport, _ in engines.sources:
        transport.close()
    with pytest.raises(TransferError, match=r"not open in this process|nobody listens on"):
        engines.reader.read(engines.plan()).wait(soon())
    engines.reader.finish(engines.plan())


def test_a_deadline_that_is_over_reads_nothing(engines: Engines) -> None:
    engines.grant()
    if engines.kind is NixlTransport:
        pytest.skip("a small read is done before it is asked for")
    read = engines.reader.read(engines.plan())
    with pytest.raises(TransferTimeoutError):
        read.wait(time.monotonic() - 1)
    assert read.settled and all((b.bytes == regions(range(4), 7)[0].bytes).all() for b in engines.bounds)


@pytest.mark.slow
def test_addresses_that_are_none_are_errors_by_name() -> None:
    engines = Engines(SocketTransport)
    for address in ({}, {"host": "127.0.0.1", "port": "x"}):
        table = replace(engines.table, ranks=tuple(replace(rank, address=address) for rank in engines.table.ranks))
        own = replace(engines.plan(), source=table)
        with pytest.raises(TransferError, match="what is no answer"):
            engines.reader.read(own).wait(soon())
        engines.reader.finish(own)
    engines.close()


def test_in_one_process_too_a_lease_is_for_its_blocks() -> None:
    engines = Engines(LocalTransport)
    engines.grant()
    with pytest.raises(TransferError, match="not of lease"):
        engines.reader.read(replace(engines.plan(), remote_blocks={"g": (2, 6, 99)})).wait(soon())
    engines.close()


def test_a_server_gives_blocks_of_the_lease_only() -> None:
    """Whatever a peer asks for."""
    engines = Engines(SocketTransport)
    engines.grant()
    wrong = replace(engines.plan(), remote_blocks={"g": (2, 6, 5)})
    with pytest.raises(TransferError, match="not of lease"):
        engines.reader.read(wrong).wait(soon())
    for change in ({"remote": 99}, {"remote_offset": -1}, {"length": 10**9}):
        segments = tuple(replace(s, **change) for s in engines.plan().segments)
        with pytest.raises(TransferError, match="in no region"):
            engines.reader.read(replace(engines.plan(), segments=segments)).wait(soon())
    transport = engines.sources[0][0]
    for question in ({}, [], {"lease": "lease", "blocks": 3, "segments": []}):
        with pytest.raises((KeyError, TypeError, AttributeError)):
            transport.answer(question)
    assert transport.answer({"done": "another"}) == [] and transport.finished() == []
    engines.reader.read(engines.plan()).wait(soon())  # and goes on serving
    assert engines.exact()
    engines.close()


def test_a_port_that_is_taken_is_an_error_by_name() -> None:
    first = SocketTransport()
    port = first.start("a", (), "cpu")["port"]
    second = SocketTransport(port=port)
    with pytest.raises(TransferError, match=f"cannot listen on 127.0.0.1:{port}"):
        second.start("b", (), "cpu")
    first.close()


@pytest.mark.skipif(HAS_NIXL, reason="NIXL is installed")
def test_without_nixl_the_error_says_what_to_install() -> None:
    with pytest.raises(InvalidInputError, match=r"specdec-hf\[transfer\]"):
        nixl_module()


CHILD = """
import importlib.util, os, signal, sys
sys.path.insert(0, {root!r})
spec = importlib.util.spec_from_file_location("own", {file!r})
own = importlib.util.module_from_spec(spec); sys.modules["own"] = own; spec.loader.exec_module(own)
{defect}
transport, bounds = own.{kind}(), own.regions(range(4), None, {dim}, {pages})
rank = own.rank_of(0, bounds, transport.start("child-%d" % os.getpid(), bounds, "cpu"))
transport.grant("lease", own.THERE)
print(own.EngineTable("child-%d" % os.getpid(), "any", {{}}, (rank,)).to_json(), flush=True)
sys.stdin.readline()
"""
"""A source in a process of its own."""

DIES_HALFWAY = """
def answer(self, question, plain=own.SocketTransport.answer):
    first, *pieces = plain(self, question)
    yield first
    yield pieces[0] + pieces[1][: len(pieces[1]) // 2]
    os.kill(os.getpid(), {signal})
    own.time.sleep(9)  # the whole process stops at its next system call
own.SocketTransport.answer = answer
"""


@contextmanager
def child(
    kind: str, defect: str = "", dim: int = DIM, pages: int = PAGES, start: Any = real_script, **environment: str
) -> Iterator[Any]:
    """A source in another process -> (process, its table)."""
    code = CHILD.format(root=str(ROOT), file=__file__, kind=kind, defect=defect, dim=dim, pages=pages)
    process = start(code, env={**os.environ, **environment})
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("{")), "")
        yield process, EngineTable.from_json(line)
    finally:
        process.kill()
        process.wait()


def reader_of(kind: str, table: EngineTable, dim: int = DIM, pages: int = PAGES) -> tuple[Any, Any, ReadPlan]:
    bounds = regions(range(4), 7, dim, pages)
    transport = {"SocketTransport": SocketTransport, "NixlTransport": NixlTransport}[kind]()
    rank = rank_of(0, bounds, transport.start(f"reader-{time.monotonic_ns()}", bounds, "cpu"))
    return transport, bounds, ReadPlan(table, "lease", rank, plan(rank, table.ranks), THERE, HERE)


@pytest.mark.parametrize("kind", BETWEEN)
@pytest.mark.thorough
def test_between_two_processes_until_one_is_killed(kind: str) -> None:
    with child(kind) as (process, table):
        transport, bounds, own = reader_of(kind, table)
        transport.read(own).wait(soon())
        assert all(map(torch.equal, (b.bytes for b in bounds), right_bytes()))
        transport.finish(own)
        process.kill()
        process.wait()
        started = time.monotonic()
        with pytest.raises(TransferError, match=r"gone|nobody listens"):
            transport.read(own).wait(soon())
        assert time.monotonic() - started < 5.0
        transport.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error"),
    [pytest.param("SIGKILL", TransferError, marks=pytest.mark.slow), ("SIGSTOP", TransferTimeoutError)],
)
@pytest.mark.cases(1)
def test_a_source_that_dies_or_hangs_halfway(name: str, error: type[Exception], start_python: Any) -> None:
    """What it had sent is garbage, and nothing more is written after the error."""
    defect = DIES_HALFWAY.format(signal=f"signal.{name}")
    with child("SocketTransport", defect, start=start_python) as (process, table):
        transport, bounds, own = reader_of("SocketTransport", table)
        read, started = transport.read(own), time.monotonic()
        with pytest.raises(error):
            read.wait(started + 0.7)
        assert time.monotonic() - started < 3.0 and read.settled
        at_error = [b.bytes.clone() for b in bounds]
        assert not all(map(torch.equal, at_error, right_bytes()))
        if name == "SIGSTOP":
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.2)
            assert all(map(torch.equal, at_error, (b.bytes for b in bounds)))
        transport.close()


LARGE = {"dim": 2**16, "pages": 8}
"""12 MiB a page and layer: long enough on a slow link to be interrupted."""


@needs_nixl
@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_nixl_source_killed_or_frozen_in_the_middle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP, which is slow. A late read may still write: its blocks are not settled before it is done or dead."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with child("NixlTransport", UCX_TLS="tcp", **LARGE) as (process, table):
        transport, bounds, own = reader_of("NixlTransport", table, **LARGE)
        read, started = transport.read(own), time.monotonic()
        os.kill(process.pid, getattr(signal, name))
        if name == "SIGKILL":
            with pytest.raises(TransferError, match="gone"):
                read.wait(soon())
            assert read.settled and time.monotonic() - started < 5.0
        else:
            with pytest.raises(TransferTimeoutError, match="hangs"):
                read.wait(started + 0.7)
            assert not read.settled
            before = [b.bytes.clone() for b in bounds]
            os.kill(process.pid, signal.SIGCONT)
            end = soon()
            while not read.settled and time.monotonic() < end:
                time.sleep(0.01)
            assert read.settled
            assert not all(map(torch.equal, before, (b.bytes for b in bounds))), "it wrote after the error"
        transport.close()
