"""A server on a thread of the test's process, and what asks it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import openai

from specdec import SpeculativeModel
from specdec.extensions.server.app import Service
from specdec.extensions.server.running import Server, bound
from specdec.extensions.server.server_settings import ServerSettings

CHAT = [{"role": "user", "content": "Tom has 3 boxes of 12 eggs. How many eggs?"}]
KEY = "secret"


class Running:
    """The server on a thread."""

    def __init__(self, settings: Any = None, model: Any = None, **sizes: Any) -> None:
        """settings: of `ServerSettings`, by name. sizes: of the model, where none is given."""
        own = {"name": "gsm-llama", "keys": (KEY,), "max_body_bytes": 5000, "drain_seconds": 60.0} | (settings or {})
        self.model = model or SpeculativeModel.from_pretrained("gsm-llama", draft="auto", max_model_len=512, **sizes)
        self.service = Service(self.model, ServerSettings(**own))
        self.server = Server(self.service, self.service.app(), bound("127.0.0.1", 0))
        self.thread = threading.Thread(target=asyncio.run, args=(self.run(),), daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.port = self.server.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=120)

    async def run(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve()

    def drain(self) -> None:
        """As at the first signal."""
        self.loop.call_soon_threadsafe(self.server.handle_exit, 15, None)

    def end(self) -> None:
        self.drain()
        self.thread.join(120)
        self.model.close()

    def get(self, path: str, body: bytes | None = None, key: str | None = KEY, **more: str) -> tuple[int, str]:
        """Status and text. more: headers."""
        return self.answer(path, body, key, **more)[:2]

    def answer(
        self, path: str, body: bytes | None = None, key: str | None = KEY, **more: str
    ) -> tuple[int, str, dict[str, str]]:
        """Status, text and headers."""
        headers = ({} if key is None else {"Authorization": f"Bearer {key}"}) | more
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers), timeout=120) as answer:
                return answer.status, answer.read().decode(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), dict(error.headers)

    def post(self, chat: bool = True, **body: Any) -> tuple[int, Any]:
        """Status and the JSON of an answer."""
        path = "/v1/chat/completions" if chat else "/v1/completions"
        status, text = self.get(path, json.dumps(({"messages": CHAT} if chat else {}) | body).encode())
        return status, json.loads(text)

    def raw(self, method: str, path: str, authorization: str) -> tuple[int, str]:
        """Status and text, by any method."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, headers={"Authorization": authorization})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def begin_body(self) -> socket.socket:
        """A connection with a request of which a part of the body has come."""
        made = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n"
        made.sendall(head.encode() + b'{"prompt"')
        return made

    def idle(self) -> bool:
        """Whether nothing is left, waiting for it."""
        end = time.monotonic() + 60
        while (self.model.usage().requests or self.service.clients.in_flight) and time.monotonic() < end:
            time.sleep(0.01)
        usage = self.model.usage()
        return usage.requests == usage.target_pages == self.service.clients.in_flight == 0

    def count(self, **labels: str) -> float:
        """HTTP requests with these labels, once their records are counted."""
        found = 0.0
        for metric in self.service.monitor.registry.collect():
            for sample in metric.samples:
                if sample.name == "specdec_http_requests_total" and labels.items() <= sample.labels.items():
                    found += sample.value
        return found


def ask(running: Running, **options: Any) -> Any:
    own = {"model": "gsm-llama", "messages": CHAT, "temperature": 0, "max_tokens": 24}
    return running.client.chat.completions.create(**(own | options))
