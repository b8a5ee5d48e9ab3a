"""`specdec serve` under hostile clients, beside a well-behaved one; then SIGTERM, with requests in flight.

    python -m tests.public.soak_service [--hostile 50] [--requests 1000] [--good 300] [--thinking 4] [--checks]

The server is the command, as a process. Hostile clients, in a process of their own, have an address each (127.0.0.2 and
on). They send prompts of a megabyte in every place that a body has for text, bodies that never end or are too large,
n = 100, grammars that hang or are huge, and wrong keys, and go away in the middle. Meanwhile a well-behaved client
measures the time to its first token, as it did alone, and compares each greedy answer. Then the clients' counts of
statuses, the server's counters and the lines of its log are compared, request by request. At SIGTERM requests are in
flight, and bodies that never end: the first are answered, and the process ends within its drain time. Ends in one JSON
line; exits with 1 where something is not as it should be.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
KEY = "the key"
BODY_SECONDS, DRAIN_SECONDS, MOST_BYTES = 2.0, 10.0, 2**20
SLICE = 0.01
"""Seconds that the task sleeps which measures the delay of an event loop."""
PROMPTS = [f"{name} has {i} boxes of {3 + i % 9} eggs. How many eggs?" for i in range(2, 52) for name in ("Tom", "Ann")]
LONG = "Tom has eggs. " * 64_000
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def loaded() -> Any:
    from specdec import SpeculativeModel

    return SpeculativeModel.from_pretrained("gsm-llama", draft="auto", max_num_seqs=32)


def chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


async def measure(delays: list[float]) -> None:
    """Seconds by which a sleeping task wakes late, again and again."""
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(SLICE)
        delays.append(time.perf_counter() - begun - SLICE)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


class Server:
    """`specdec serve` on a port of its own, with its log in a file."""

    def __init__(self, *words: str, checks: bool = False) -> None:
        self.log = Path(tempfile.mkdtemp()) / "log"
        command = [sys.executable, "-m", "specdec", "serve", "--port", "0", "--log-format", "json", "--api-key", KEY]
        command += ["--body-seconds", str(BODY_SECONDS), "--drain-seconds", str(DRAIN_SECONDS), *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPECDEC_CHECK": str(int(checks)), "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log)
        while not (found := re.search(r"at http://127\.0\.0\.1:(\d+)/v1", self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        self.port = int(found[1])

    def metrics(self) -> dict[str, float]:
        """All numbers, by name with labels."""
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics").read().decode()
        return {name: float(value) for name, value in re.findall(r"^(\w+(?:\{.*\})?) (\S+)$", text, re.M)}

    def idle(self) -> bool:
        """Whether nothing is left, waiting for it."""
        names = ("specdec_requests_running", "specdec_requests_waiting", "specdec_http_in_flight")
        names += ("specdec_rows_used", "specdec_target_pages_used", "specdec_head_pages_used")
        end = time.monotonic() + 30
        while any((found := self.metrics())[name] for name in names) and time.monotonic() < end:
            time.sleep(0.05)
        return not any(found[name] for name in names)

    def counted(self) -> Counter[str]:
        """Requests by status, as the counters have them."""
        found = Counter[str]()
        for name, value in self.metrics().items():
            if name.startswith("specdec_http_requests_total") and 'path="/v1' in name:
                found[re.search(r'status="(\d+)"', name)[1]] += int(value)  # type: ignore[index]
        return found

    def lines(self) -> list[dict[str, Any]]:
        """The log's lines of requests to the model."""
        found = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in found if line.get("path", "").startswith("/v1")]


class Asker:
    """Requests by plain sockets, from one address. seen: the status of each request, by its id."""

    def __init__(self, port: int, address: str) -> None:
        self.port, self.address = port, address
        self.seen = dict[str, str]()

    async def open(self, name: str, path: str, body: bytes, length: int = 0, key: str = KEY) -> tuple[Any, Any]:
        """A connection on which a request has been sent: its head, and this body or, by `length`, the begin of one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(self.address, 0))
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nX-Request-Id: {name}\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {length or len(body)}\r\n\r\n".encode() + body)
        return reader, writer

    async def ask(self, name: str, path: str, body: Any, key: str = KEY) -> bytes:
        """The answer's body."""
        return await self.read(name, *await self.open(name, path, json.dumps(body).encode(), key=key))

    async def read(self, name: str, reader: Any, writer: Any) -> bytes:
        """The rest of an answer."""
        try:
            answer: bytes = await asyncio.wait_for(reader.read(), 120)
            self.seen[name] = answer[9:12].decode()
        finally:
            writer.close()
        return answer.partition(b"\r\n\r\n")[2]

    async def first(self, name: str, path: str, body: Any) -> tuple[float, Any, Any]:
        """Seconds to the first event of a stream, which is left open."""
        data, begun = json.dumps(body).encode(), time.perf_counter()
        reader, writer = await self.open(name, path, data)
        await reader.readuntil(b"data: ")
        return time.perf_counter() - begun, reader, writer


class Good(Asker):
    """The well-behaved client: one greedy stream after the other."""

    def __init__(self, port: int, right: list[str], new: int) -> None:
        super().__init__(port, "127.0.0.1")
        self.right, self.new, self.wrong = right, new, list[str]()

    async def run(self, phase: str, count: int, until: Callable[[], bool] = lambda: True) -> list[float]:
        """Seconds to the first token, at least `count` and until the end of something."""
        times = list[float]()
        while len(times) < count or not until():
            place = len(times) % len(self.right)
            body = {"messages": chat(PROMPTS[place]), "temperature": 0, "max_tokens": self.new, "stream": True}
            name = f"{phase}-{len(times)}"
            seconds, reader, writer = await self.first(name, CHAT, body)
            rest = await reader.read()
            writer.close()
            self.seen[name] = "200"
            self.compare(name, place, b"data: " + rest)
            times.append(seconds)
        return times

    def compare(self, name: str, place: int, events: bytes) -> None:
        told = [json.loads(event) for event in re.findall(rb"data: (\{.*\})", events)]
        text = "".join(each["choices"][0]["delta"].get("content") or "" for each in told)
        if text != self.right[place]:
            self.wrong.append(f"{name}: {text!r} is not {self.right[place]!r}")


class Hostile(Asker):
    """A hostile client: one request after the other, of the kinds that are its methods."""

    async def prompts(self, name: str, number: int) -> None:
        """Long texts wherever a body has some."""
        tool = {"type": "function", "function": {"name": "a", "description": LONG}}
        call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": json.dumps({"a": LONG})}}
        bodies: list[tuple[str, Any]] = [
            (TEXT, {"prompt": LONG}),
            (CHAT, {"messages": chat(LONG)}),
            (CHAT, {"messages": chat("Tom"), "tools": [tool]}),
            (CHAT, {"messages": [*chat("Tom"), {"role": "assistant", "content": None, "tool_calls": [call]}]}),
            (TEXT, {"prompt": ["Tom has eggs. " * 900] * 70}),
            (TEXT, {"prompt": [5] * 300_000}),
            (TEXT, {"prompt": "[" * 900_000}),
        ]
        path, body = bodies[number % len(bodies)]
        await self.ask(name, path, body | {"max_tokens": 2})

    async def bodies(self, name: str, number: int) -> None:
        """A body that never ends, or is too large."""
        size = 2 * MOST_BYTES if number % 2 else 1000
        begin = b'{"prompt": "' + b"a" * (MOST_BYTES if number % 2 else 10)
        await self.read(name, *await self.open(name, TEXT, begin, size))

    async def many(self, name: str, number: int) -> None:
        await self.ask(name, CHAT, {"messages": chat("Tom"), "n": 100, "max_tokens": 200})

    async def grammars(self, name: str, number: int) -> None:
        """Grammars that hang, are huge, or have too many states."""
        fields = {f"p{i}": {"enum": [i]} for i in range(600 if number % 2 else 20_000)}
        formats: list[dict[str, Any]] = [
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": fields}}},
            {"type": "grammar", "grammar": 'start: /a*/ "a"'},
            {"type": "regex", "regex": "(a|b)*a(a|b){24}"},
            {"type": "regex", "regex": "|".join(f"w{i}x*" for i in range(60_000))},
        ]
        own = {"max_tokens": 4, "response_format": formats[number // 2 % len(formats)]}
        await self.ask(name, CHAT, {"messages": chat("Tom"), **own})

    async def keys(self, name: str, number: int) -> None:
        await self.ask(name, CHAT, {"messages": chat("Tom")}, "wrong")

    async def gone(self, name: str, number: int) -> None:
        """Goes away from a stream, or while it waits for the whole."""
        body = {"messages": chat(PROMPTS[number % len(PROMPTS)]), "max_tokens": 1000, "ignore_eos": True}
        if number % 2:
            _, _, writer = await self.first(name, CHAT, body | {"stream": True})
        else:
            _, writer = await self.open(name, CHAT, json.dumps(body).encode())
            await asyncio.sleep(0.05 + random.random() / 10)
        writer.close()
        self.seen[name] = "499"

    async def run(self, work: Iterator[tuple[int, str]], thinking: float) -> None:
        """thinking: mean seconds before a request."""
        for number, kind in work:
            await asyncio.sleep(random.expovariate(1 / thinking))
            try:
                await getattr(self, kind)(f"{kind}-{number}", number // len(KINDS))
            except Exception as error:
                self.seen[f"{kind}-{number}"] = f"{type(error).__name__}: {error}"


KINDS = ("prompts", "bodies", "many", "grammars", "keys", "gone")


async def attack(port: int, clients: int, requests: int, thinking: float) -> dict[str, str]:
    """The status of each request of the hostile clients."""
    random.seed(0)
    work = iter([(number, KINDS[number % len(KINDS)]) for number in range(requests)])
    each = [Hostile(port, f"127.0.0.{2 + i}") for i in range(clients)]
    await asyncio.gather(*(client.run(work, thinking) for client in each))
    return {name: status for client in each for name, status in client.seen.items()}


async def end(server: Server, new: int) -> tuple[dict[str, str], float]:
    """SIGTERM with requests in flight and bodies that never end: statuses, and seconds until the process has ended."""
    asker = Asker(server.port, "127.0.0.1")
    body = {"messages": chat(PROMPTS[0]), "temperature": 0, "max_tokens": new, "ignore_eos": True}
    running = [asyncio.create_task(asker.ask(f"end-{i}", CHAT, body | {"stream": i % 2 == 0})) for i in range(16)]
    slow = [await asker.open(f"never-{i}", TEXT, b"{", 1000) for i in range(4)]
    while (await asyncio.to_thread(server.metrics))["specdec_requests_running"] < 16:
        await asyncio.sleep(0.01)
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.1)
    await asker.ask("late", CHAT, body)
    await asyncio.gather(*running)
    await asyncio.to_thread(server.process.wait, 60)
    for _, writer in slow:
        writer.close()
    return asker.seen, time.monotonic() - begun


def differences(server: Server, seen: dict[str, str]) -> list[str]:
    """Requests whose line in the log is missing, or has another status than the client saw."""
    lines = {line["id"]: line for line in server.lines()}
    told = {name: str(lines[name]["status"]) if name in lines else "no line" for name in seen}
    return [f"{name}: {status}, in the log {told[name]}" for name, status in seen.items() if told[name] != status]


@click.command()
@click.option("--hostile", default=50, help="Hostile clients.")
@click.option("--requests", default=1000, help="Of these.")
@click.option("--good", default=300, help="Requests of the well-behaved client, alone and beside them.")
@click.option("--new", default=16, help="New tokens of its requests.")
@click.option("--thinking", default=4.0, help="Mean seconds before a request of a hostile client.")
@click.option("--checks", is_flag=True, help="With the validators on (SPECDEC_CHECK=1).")
@click.option("--attacking", type=int, help="Be the hostile clients, of the server at this port.")
def main(
    hostile: int, requests: int, good: int, new: int, thinking: float, checks: bool, attacking: int | None
) -> None:
    """Run the soak."""
    if attacking is not None:
        print(json.dumps(asyncio.run(attack(attacking, hostile, requests, thinking))))
        return
    with loaded() as model:
        right = [done.text for done in model.generate([chat(prompt) for prompt in PROMPTS], max_new_tokens=new)]
    words = ["--hostile", str(hostile), "--requests", str(requests), "--thinking", str(thinking)]
    result = asyncio.run(soak(Server(checks=checks), words, good, right, new))
    print(json.dumps(result))
    sys.exit(not result["good"])


async def soak(server: Server, hostile: list[str], good: int, right: list[str], new: int) -> dict[str, Any]:
    """All phases, and what came out. hostile: options of the process of hostile clients."""
    client, begun = Good(server.port, right, new), time.monotonic()
    await client.run("warm", 20)
    alone = await client.run("alone", good)
    words = ["-m", "tests.public.soak_service", "--attacking", str(server.port), *hostile]
    command = ["nice", "-n", "10", sys.executable, *words]  # as if on machines of their own
    attackers = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert attackers.stdout is not None
    answer = asyncio.create_task(asyncio.to_thread(attackers.stdout.read))
    beside = await client.run("beside", good, answer.done)
    attacked = json.loads(await answer)
    after = await client.run("after", good)
    idle, seen = await asyncio.to_thread(server.idle), client.seen | attacked
    counted, mine = server.counted(), Counter(seen.values())
    ended, seconds = await end(server, 100)
    differ = differences(server, seen | ended)
    p99 = {name: round(1e3 * percentile(times, 0.99), 1) for name, times in named(alone, beside, after)}
    p50 = {name: round(1e3 * statistics.median(times), 1) for name, times in named(alone, beside, after)}
    ratio = percentile(beside, 0.99) / percentile(alone + after, 0.99)
    expected = Counter({"200": 16, "503": 1})
    right_end = Counter(ended.values()) == expected and server.process.returncode == 0 and seconds <= DRAIN_SECONDS
    return {
        "good": not differ and counted == mine and idle and right_end and not client.wrong and ratio <= 2.0,
        "requests": len(seen),
        "hostile": len(attacked),
        "beside": len(beside),
        "seconds": round(time.monotonic() - begun, 1),
        "first token, ms, p50": p50,
        "first token, ms, p99": p99,
        "p99 beside / alone": round(ratio, 2),
        "clients": dict(sorted(mine.items())),
        "counters": dict(sorted(counted.items())),
        "differ from the log": differ[:5],
        "wrong answers": client.wrong[:3],
        "idle": idle,
        "at SIGTERM": dict(Counter(ended.values())),
        "seconds to the end": round(seconds, 2),
        "exit": server.process.returncode,
        "log": str(server.log),
    }


def named(alone: list[float], beside: list[float], after: list[float]) -> tuple[tuple[str, list[float]], ...]:
    return ("alone", alone), ("beside", beside), ("after", after)


if __name__ == "__main__":
    main()
