"""The server of `specdec serve` against one direct `generate` of the same requests; delay of its event loop.

    python -m benchmarks.bench_service [--clients 32] [--requests 96] [--new 48] [--repeats 9] [--stream]

One process has the model: it answers all requests by one `generate`, then serves them to clients in a process of their
own, in turn, so that a busy machine slows both alike. Ends in one JSON line: medians of tokens a second, the ratio
of the two in each repeat and its median; the same of tokens a second of the process's CPU time, which other processes
do not change; and by how much a sleeping task of the server's event loop wakes late.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import click

from specdec.extensions.server.app import Service
from specdec.extensions.server.running import Server, bound
from specdec.extensions.server.server_settings import ServerSettings
from tests.public.soak_service import PROMPTS, chat, loaded, measure, percentile


async def ask_all(port: int, clients: int, requests: int, new: int, stream: bool) -> float:
    """Seconds of all requests, by so many clients of OpenAI's library."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)
    work = iter(range(requests))

    async def one() -> None:
        for place in work:
            own: dict[str, Any] = {"model": "gsm-llama", "temperature": 0, "max_tokens": new, "stream": stream}
            own |= {"messages": chat(PROMPTS[place % len(PROMPTS)]), "extra_body": {"ignore_eos": True}}
            found = await client.chat.completions.create(**own)
            if stream:
                async for _ in found:
                    pass

    begun = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(clients)))
    return time.perf_counter() - begun


def be_clients(port: int, *sizes: Any) -> None:
    """The clients' process: all requests once for each line that it reads; answers with the seconds."""
    for _ in sys.stdin:
        print(asyncio.run(ask_all(port, *sizes)), flush=True)


class Served:
    """The server on a thread of this process, with a task that measures the delay of its event loop."""

    def __init__(self, model: Any) -> None:
        service, socket, self.delays = (
            Service(model, ServerSettings(name="gsm-llama")),
            bound("127.0.0.1", 0),
            list[float](),
        )
        self.port, self.server = socket.getsockname()[1], Server(service, service.app(), socket)
        self.thread = threading.Thread(target=asyncio.run, args=(self.run(),), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    async def run(self) -> None:
        measuring = asyncio.create_task(measure(self.delays))
        await self.server.serve()
        measuring.cancel()

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join()


@click.command()
@click.option("--clients", default=32)
@click.option("--requests", default=96)
@click.option("--new", default=48, help="New tokens of each.")
@click.option("--repeats", default=9)
@click.option("--stream", is_flag=True)
@click.option("--clients-of", type=int, hidden=True, help="Be the clients of the server on this port.")
def main(clients: int, requests: int, new: int, repeats: int, stream: bool, clients_of: int | None) -> None:
    """Measure."""
    if clients_of is not None:
        be_clients(clients_of, clients, requests, new, stream)
    else:
        print(json.dumps(compared(clients, requests, new, repeats, stream)))


def compared(clients: int, requests: int, new: int, repeats: int, stream: bool) -> dict[str, Any]:
    """The numbers."""
    model = loaded()
    prompts = [chat(PROMPTS[i % len(PROMPTS)]) for i in range(requests)]
    served = Served(model)
    own = ["--clients", str(clients), "--requests", str(requests), "--new", str(new), *(["--stream"] if stream else [])]
    command = [sys.executable, "-m", "benchmarks.bench_service", *own, "--clients-of", str(served.port)]
    asking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert asking.stdin is not None and asking.stdout is not None
    wall, cpu = list[tuple[float, float]](), list[tuple[float, float]]()
    for repeat in range(repeats + 1):
        begun, used = time.perf_counter(), time.process_time()
        done = model.generate(prompts, max_new_tokens=new, ignore_eos=True)
        tokens, seconds = sum(len(one.token_ids) for one in done), time.perf_counter() - begun
        del served.delays[: len(served.delays) * (not repeat)]
        between = time.process_time()
        asking.stdin.write("\n")
        spent = float(asking.stdout.readline())
        if repeat:  # the first warms up
            wall.append((tokens / seconds, tokens / spent))
            cpu.append((tokens / (between - used), tokens / (time.process_time() - between)))
    asking.stdin.close()
    asking.wait()
    served.end()
    model.close()
    delays = {name: 1e3 * percentile(served.delays, at) for name, at in (("p50", 0.5), ("p99", 0.99), ("max", 1))}
    sizes = {"stream": stream, "clients": clients, "requests": requests, "new": new}
    return sizes | {"wall": ratio(wall), "cpu": ratio(cpu), "delay_ms": {k: round(v, 2) for k, v in delays.items()}}


def ratio(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Of tokens a second, directly and by the service."""
    each = [service / direct for direct, service in pairs]
    direct, service = (round(statistics.median(own), 1) for own in zip(*pairs, strict=True))
    return {
        "direct": direct,
        "service": service,
        "ratio": round(statistics.median(each), 3),
        "each": [round(r, 2) for r in each],
    }


if __name__ == "__main__":
    main()
