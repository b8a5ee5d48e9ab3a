"""An HTTP server with OpenAI's interface over one model: pip install "specdec-hf[serve]"; see docs/service.md."""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import math
import signal
import threading
import time
from typing import Any

import click
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from specdec import SpecdecError, SpeculativeModel
from specdec.extensions import openai_format as openai

GET, CLOSE = ["GET", "HEAD"], {"Connection": "close"}


class Service:
    """The answers, over one model that is called `name`. body_seconds: in which a request's body must arrive."""

    def __init__(
        self, model: SpeculativeModel, name: str, api_key: str | None, max_body_bytes: int, body_seconds: float = 30.0
    ) -> None:
        self.model, self.name, self.api_key = model, name, api_key
        self.max_body_bytes, self.body_seconds, self.draining = max_body_bytes, body_seconds, False
        self.allow_lark, self.stalled_seconds, self.family = False, 60.0, "auto"

    def app(self) -> FastAPI:
        app, v1 = FastAPI(title="specdec"), APIRouter(prefix="/v1", dependencies=[Depends(self.authorise)])
        v1.add_api_route("/models", self.models, methods=GET)
        v1.add_api_route("/models/{name:path}", self.models, methods=GET)
        for path in ("/chat/completions", "/completions"):
            v1.add_api_route(path, self.answer, methods=["POST"], response_model=None)
        app.include_router(v1)
        app.add_api_route("/metrics", self.metrics, methods=GET, response_class=PlainTextResponse)
        app.add_api_route("/health", self.health, methods=GET, response_model=None)
        for kind in (HTTPException, SpecdecError, RecursionError, Exception):
            app.add_exception_handler(kind, failed)
        return app

    async def authorise(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        right = scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), (self.api_key or "").encode())
        if self.api_key is not None and not right:
            raise HTTPException(401, "the API key is missing or wrong")

    async def models(self, name: str | None = None) -> dict[str, Any]:
        return openai.models_of(self.name, name)

    async def metrics(self) -> str:
        return self.model.metrics().prometheus()

    async def health(self) -> Response:
        stalled = self.model.metrics()["round_age_seconds"] > self.stalled_seconds
        status = "draining" if self.draining else "stalled" if stalled else "ok"
        return answered({"status": status}, 200 if status == "ok" else 503)

    async def answer(self, request: Request) -> Response:
        chat = request.url.path.endswith("/chat/completions")
        body = openai.body_of(await self.read(request), self.name)
        use = openai.tools_of(body, chat, self.model.tokenizer, self.family)
        (is_stream, counted), own = openai.streamed(body), openai.request_of(body, chat, self.allow_lark, use)
        stream, head = self.model.stream_async(*own), openai.head_of(self.name, chat)
        if is_stream:
            await stream.start()  # what is wrong with the request is told by the status
            events = openai.events(stream, self.model.tokenizer, head, chat, counted, use, own[1].stop)
            return StreamingResponse(events, media_type="text/event-stream")
        work, gone = asyncio.ensure_future(stream.completions()), asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)  # the client has gone: its request is cancelled
            return answered(head | openai.response_of(await work, self.model.tokenizer, chat, use, own[1].stop))
        finally:
            work.cancel()
            gone.cancel()

    async def read(self, request: Request) -> bytes:
        data = bytearray()
        try:
            async with asyncio.timeout(self.body_seconds):
                async for part in request.stream():
                    data += part
                    if len(data) > self.max_body_bytes:
                        raise HTTPException(413, f"the body has more than {self.max_body_bytes} bytes", CLOSE)
        except TimeoutError:
            raise HTTPException(408, f"the body has not arrived within {self.body_seconds:g} s", CLOSE) from None
        except ClientDisconnect:
            raise HTTPException(499, "the client has gone") from None
        return bytes(data)


def answered(fields: dict[str, Any], status: int = 200, headers: Any = None) -> Response:
    return Response(json.dumps(fields), status, headers, "application/json")


async def failed(_: Request, error: Exception) -> Response:
    status, fields = openai.error_of(error)
    return answered(fields, status, getattr(error, "headers", None))


class Server(uvicorn.Server):
    """At the first signal running requests end, within a limit, and new ones get 503; the second one ends at once."""

    def __init__(self, service: Service, limit: float, host: str, port: int) -> None:
        super().__init__(uvicorn.Config(service.app(), host, port, log_level="info", access_log=False))
        self.service, self.limit, self.drain_task = service, limit, None

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.drain_task is not None:
            self.should_exit = self.force_exit = True
        else:
            if threading.current_thread() is threading.main_thread():  # elsewhere the process is another's
                signal.alarm(math.ceil(self.limit) + 30)  # ends it, whatever a thread is stuck in
            self.drain_task = asyncio.get_running_loop().create_task(self.drain())

    async def drain(self) -> None:
        self.service.draining, end = True, time.monotonic() + self.limit
        cancelled = await self.service.model.aclose(self.limit)
        click.echo(f"Drained: {cancelled} requests were cancelled after {self.limit:g} s", err=True)
        self.config.timeout_graceful_shutdown = math.ceil(max(end - time.monotonic(), 0)) + 2  # for slow clients
        self.should_exit = True


@click.command()
@click.option("--model", default="gsm-llama", show_default=True, help="Target: name or folder.")
@click.option("--draft", help="Head: name, folder, auto, mtp or lookup.")
@click.option("--name", help="The model's name in the interface (default: as --model).")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True)
@click.option("--api-key", envvar="SPECDEC_API_KEY", help="Ask for this key (default: for none).")
@click.option("--max-body-bytes", default=2**20, show_default=True)
@click.option("--body-seconds", default=30.0, show_default=True, help="A request's body must have arrived then.")
@click.option("--max-num-seqs", default=32, show_default=True, help="Most requests at once.")
@click.option("--max-waiting-requests", default=1024, show_default=True, help="Beyond them 429 is answered.")
@click.option("--allow-lark", is_flag=True, help="Take response_format grammars: they can keep a thread busy for good.")
@click.option("--family", default="auto", show_default=True, help="How the model writes tool calls: docs/tools.md.")
@click.option("--stalled-seconds", default=60.0, show_default=True, help="/health is 503 where a round takes longer.")
@click.option("--drain-seconds", default=30.0, show_default=True, help="For running requests to end after SIGTERM.")
def main(model: str, draft: str | None, name: str | None, host: str, port: int, **options: Any) -> None:
    """Serve a model at http://HOST:PORT/v1."""
    sizes = {"max_num_seqs": options["max_num_seqs"], "max_waiting_requests": options["max_waiting_requests"]}
    with SpeculativeModel.from_pretrained(model, draft, **sizes) as loaded:
        gc.freeze()  # a full collection would look at all of torch, and stop the event loop for 0.3 s
        service = Service(loaded, name or model, options["api_key"], options["max_body_bytes"], options["body_seconds"])
        service.allow_lark, service.stalled_seconds = options["allow_lark"], options["stalled_seconds"]
        service.family = options["family"]
        Server(service, options["drain_seconds"], host, port).run()
        gc.unfreeze()  # extensions say that objects are left otherwise


if __name__ == "__main__":
    main()
