"""The server of examples/serve_openai.py under many clients: answers, disconnects, deadlines, SIGTERM, what is left.

    python -m tests.public.soak_service [--clients 50] [--requests 1000] [--disconnects 200] [--deadlines 20]

The server is a process of its own with page checks on (SPECDEC_CHECK=1); clients are OpenAI's. Greedy answers are
compared with those of a direct `generate`. When all requests are through, clients ask once more and the server gets
SIGTERM while these run: all must be answered. Ends in one JSON line; exits with 1 where something was lost or is left.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
LONG = 200
"""New tokens of the requests that are in flight at SIGTERM."""
SLICE = 0.01
"""Seconds that the task sleeps which measures the delay of the event loop."""
PROMPTS = [f"{name} has {i} boxes of {3 + i % 9} eggs. How many eggs?" for i in range(2, 52) for name in ("Tom", "Ann")]


def example() -> Any:
    """examples/serve_openai.py as a module."""
    spec = spec_from_file_location("serve_openai", ROOT / "examples" / "serve_openai.py")
    assert spec is not None and spec.loader is not None
    made = sys.modules["serve_openai"] = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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


def left(model: Any, limit: float) -> dict[str, Any]:
    """What is there once the model is drained, and while it takes nothing new."""
    from specdec.extensions.service.draining import drained

    with drained(model, limit) as cancelled:
        return {"cancelled": cancelled, "usage": vars(model.usage()), "metrics": dict(model.metrics())}


def serve(port: int, report: Path, seconds: float) -> None:
    """The server's process; what is left when it was drained, and the delays of its event loop, go into a file."""
    module, model, delays = example(), loaded(), list[float]()
    model.generate([chat(prompt) for prompt in PROMPTS[:32]], max_new_tokens=8)

    gc.freeze()  # as the example's `main`

    class Server(module.Server):  # type: ignore[misc, name-defined]
        async def startup(self, sockets: Any = None) -> None:
            self.measuring = asyncio.create_task(measure(delays))
            await super().startup(sockets)

        async def drain(self) -> None:
            self.service.draining = True
            self.measuring.cancel()
            found = await asyncio.to_thread(left, model, self.limit)
            found["delay_ms"] = {
                name: 1e3 * percentile(delays, at) for name, at in (("p50", 0.5), ("p99", 0.99), ("max", 1))
            }
            report.write_text(json.dumps(found))
            await super().drain()

    Server(module.Service(model, "gsm-llama", None, 2**20), seconds, "127.0.0.1", port).run()


class Soak:
    """The clients, and what they met."""

    def __init__(self, port: int, right: list[str], long: list[str], new: int) -> None:
        """right, long: the texts of all prompts, with `new` tokens and with `LONG`."""
        from openai import AsyncOpenAI

        self.client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300)
        self.right, self.long, self.new = right, long, new
        self.kinds, self.wrong = Counter[str](), list[str]()

    def present(self) -> float:
        """Requests that wait or run in the server."""
        text = urllib.request.urlopen(f"{str(self.client.base_url).removesuffix('v1/')}metrics").read().decode()
        return sum(float(value) for value in re.findall(r"^specdec_requests_(?:running|waiting) (.*)$", text, re.M))

    async def ask(self, kind: str, place: int) -> None:
        """One request of a kind; what is not as it should be is noted."""
        try:
            await getattr(self, kind)(place % len(PROMPTS))
            self.kinds[kind] += 1
        except Exception as error:
            self.wrong.append(f"{kind} {place}: {type(error).__name__}: {error}")

    def options(self, place: int, **more: Any) -> dict[str, Any]:
        own = {"model": "gsm-llama", "messages": chat(PROMPTS[place]), "temperature": 0, "max_tokens": self.new}
        return own | {"extra_body": {"ignore_eos": self.new == LONG}} | more

    def compare(self, place: int, text: str | None) -> None:
        assert text == self.right[place], f"{text!r} is not {self.right[place]!r}"

    async def plain(self, place: int) -> None:
        found = await self.client.chat.completions.create(**self.options(place))
        self.compare(place, found.choices[0].message.content)

    async def streamed(self, place: int) -> None:
        text = ""
        async for chunk in await self.client.chat.completions.create(**self.options(place, stream=True)):
            text += chunk.choices[0].delta.content or ""
        self.compare(place, text)

    async def disconnect(self, place: int) -> None:
        """Goes away: from a stream after its first chunk, or while it waits for the whole."""
        own = self.options(place, max_tokens=1000, extra_body={"ignore_eos": True})
        if place % 2:
            stream = await self.client.chat.completions.create(**own, stream=True)
            async for _ in stream:
                break
            await stream.close()
            return
        task = asyncio.create_task(self.client.chat.completions.create(**own))
        await asyncio.wait([task], timeout=0.05 + random.random() / 5)
        assert not task.done()
        task.cancel()

    async def deadline(self, place: int) -> None:
        more = {"extra_body": {"max_time": 0.3, "ignore_eos": True}}
        found = await self.client.chat.completions.create(**self.options(place, max_tokens=1000, **more))
        assert found.choices[0].stop_reason == "timeout", found.choices[0]  # type: ignore[attr-defined]

    async def run(self, clients: int, kinds: list[str]) -> None:
        """All requests, so many at once."""
        work = iter(enumerate(kinds))

        async def client() -> None:
            for place, kind in work:
                await self.ask(kind, place)

        await asyncio.gather(*(client() for _ in range(clients)))

    async def end(self, clients: int, process: subprocess.Popen[bytes]) -> Counter[str]:
        """SIGTERM with so many requests in the model, all of which are answered; one that comes later is refused."""
        before, self.new, self.right = self.kinds.copy(), LONG, self.long
        tasks = [asyncio.create_task(self.ask("streamed" if i % 2 else "plain", i)) for i in range(clients)]
        while await asyncio.to_thread(self.present) < clients:
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        try:
            await self.client.chat.completions.create(**self.options(0))
            self.wrong.append("a request after SIGTERM was served")
        except Exception as error:
            self.kinds[f"refused after SIGTERM: {type(error).__name__}"] += 1
        await asyncio.gather(*tasks)
        return self.kinds - before


@click.command()
@click.option("--clients", default=50)
@click.option("--requests", default=1000)
@click.option("--disconnects", default=200)
@click.option("--deadlines", default=20)
@click.option("--new", default=24, help="New tokens of a request that is read to its end.")
@click.option("--serving", type=(int, Path), help="Be the server, on this port, with its report there.")
def main(clients: int, requests: int, disconnects: int, deadlines: int, new: int, serving: Any) -> None:
    """Run the soak."""
    if serving is not None:
        return serve(*serving, seconds=120.0)
    model = loaded()
    right, long = (
        [
            c.text
            for c in model.generate([chat(prompt) for prompt in PROMPTS], max_new_tokens=most, ignore_eos=most == LONG)
        ]
        for most in (new, LONG)
    )
    model.close()
    kinds = ["disconnect"] * disconnects + ["deadline"] * deadlines
    kinds += ["plain" if i % 2 else "streamed" for i in range(requests - len(kinds))]
    random.seed(0)
    random.shuffle(kinds)
    port, report = free_port(), Path(tempfile.mkdtemp()) / "report.json"
    environment = {**os.environ, "SPECDEC_CHECK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.public.soak_service", "--serving", str(port), str(report)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if b"Application startup complete" in line:
            break
    begun = time.perf_counter()
    soak = Soak(port, right, long, new)

    async def everything() -> Counter[str]:
        await soak.run(clients, kinds)
        print(f"{time.perf_counter() - begun:.0f} s, {dict(soak.kinds)}, wrong: {soak.wrong[:3]}", file=sys.stderr)
        return await soak.end(clients, process)

    ended = asyncio.run(everything())
    process.stderr.read()
    code, found = process.wait(timeout=120), json.loads(report.read_text())
    left = {name: count for name, count in found["usage"].items() if count}
    good = not soak.wrong and not left and code == 0 and found["cancelled"] == 0
    result = {"good": good, "seconds": round(time.perf_counter() - begun, 1), "kinds": dict(soak.kinds)}
    result |= {"in flight at SIGTERM": dict(ended), "wrong": soak.wrong[:5], "left": left, "exit": code}
    result |= {"delay_ms": {name: round(value, 2) for name, value in found["delay_ms"].items()}}
    result |= {name: found["metrics"][f"requests_{name}_total"] for name in ("finished", "failed", "dropped")}
    result |= {name: found["metrics"][f"requests_ended_by_{name}_total"] for name in ("cancelled", "timeout")}
    print(json.dumps(result))
    sys.exit(not good)


if __name__ == "__main__":
    main()
