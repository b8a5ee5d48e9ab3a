"""An HTTP server with OpenAI's interface over one model: pip install "specdec-hf[serve]"; see docs/service.md."""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import click
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException

from specdec import InvalidInputError, SpecdecError, SpeculativeModel
from specdec.service.openai_format import chunks, error_body, error_of, request_of, response_of


class Service:
    """The answers, over one model that is called `name`."""

    def __init__(self, model: SpeculativeModel, name: str, api_key: str | None, max_body_bytes: int) -> None:
        self.model, self.name, self.api_key, self.max_body_bytes = model, name, api_key, max_body_bytes
        self.draining = False

    def app(self) -> FastAPI:
        app, v1 = FastAPI(title="specdec"), APIRouter(prefix="/v1", dependencies=[Depends(self.authorise)])
        v1.add_api_route("/models", self.models)
        v1.add_api_route("/chat/completions", self.answer, methods=["POST"], response_model=None)
        v1.add_api_route("/completions", self.answer, methods=["POST"], response_model=None)
        app.include_router(v1)
        app.add_api_route("/metrics", self.metrics, response_class=PlainTextResponse)
        app.add_api_route("/health", self.health, response_model=None)
        app.add_exception_handler(SpecdecError, failed)
        app.add_exception_handler(HTTPException, refused)
        return app

    async def authorise(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self.api_key is not None and not hmac.compare_digest(given, f"Bearer {self.api_key}".encode()):
            raise HTTPException(401, "the API key is missing or wrong")

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": self.name, "object": "model", "created": 0, "owned_by": "specdec"}]}

    async def metrics(self) -> str:
        return self.model.metrics().prometheus()

    async def health(self) -> Response:
        return JSONResponse({"status": "draining" if self.draining else "ok"}, 503 if self.draining else 200)

    async def answer(self, request: Request) -> Response:
        body, chat = await self.body(request), request.url.path.endswith("/chat/completions")
        prompts, params = request_of(body, chat)
        stream = self.model.stream_async(prompts, params)
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}
        if body.get("stream"):
            await stream.start()  # what is wrong with the request is told by the status
            counted = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(self.events(stream, head, chat, counted), media_type="text/event-stream")
        work, gone = asyncio.ensure_future(stream.completions()), asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)  # the client has gone: its request is cancelled
            return JSONResponse(head | response_of(await work, self.model.tokenizer, chat))
        finally:
            work.cancel()
            gone.cancel()

    async def events(self, stream: Any, head: dict[str, Any], chat: bool, counted: bool) -> AsyncIterator[str]:
        async for chunk in chunks(stream, self.model.tokenizer, chat, counted):
            yield f"data: {json.dumps(head | chunk)}\n\n"
        yield "data: [DONE]\n\n"

    async def body(self, request: Request) -> dict[str, Any]:
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self.max_body_bytes:
                raise HTTPException(413, f"the body has more than {self.max_body_bytes} bytes")
        try:
            found = json.loads(data)
        except ValueError as error:
            raise InvalidInputError(f"the body is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise InvalidInputError("the body is no JSON object")
        if found.get("model", self.name) != self.name:
            raise HTTPException(404, f"there is no model {found['model']!r}; there is {self.name!r}")
        return found


async def failed(_: Request, error: Exception) -> Response:
    status, body = error_of(error)
    return JSONResponse(body, status)


async def refused(_: Request, error: Any) -> Response:
    return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code)


class Server(uvicorn.Server):
    """At the first signal running requests end, within a limit, and new ones get 503; the second one ends at once."""

    def __init__(self, service: Service, limit: float, host: str, port: int) -> None:
        super().__init__(uvicorn.Config(service.app(), host, port, log_level="info", access_log=False))
        self.service, self.limit, self.drain_task = service, limit, None

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.drain_task is not None:
            self.should_exit = self.force_exit = True
        else:
            self.drain_task = asyncio.get_running_loop().create_task(self.drain())

    async def drain(self) -> None:
        self.service.draining = True
        cancelled = await self.service.model.aclose(self.limit)
        click.echo(f"Drained: {cancelled} requests were cancelled after {self.limit:g} s", err=True)
        self.should_exit = True


@click.command()
@click.option("--model", default="gsm-llama", show_default=True, help="Target: name or folder.")
@click.option("--draft", help="Head: name, folder, auto, mtp or lookup.")
@click.option("--name", help="The model's name in the interface (default: as --model).")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True)
@click.option("--api-key", envvar="SPECDEC_API_KEY", help="Ask for this key (default: for none).")
@click.option("--max-body-bytes", default=2**20, show_default=True)
@click.option("--max-num-seqs", default=32, show_default=True, help="Most requests at once.")
@click.option("--max-waiting-requests", default=1024, show_default=True, help="Beyond them 429 is answered.")
@click.option("--drain-seconds", default=30.0, show_default=True, help="For running requests to end after SIGTERM.")
def main(model: str, draft: str | None, name: str | None, host: str, port: int, **options: Any) -> None:
    """Serve a model at http://HOST:PORT/v1."""
    sizes = {"max_num_seqs": options["max_num_seqs"], "max_waiting_requests": options["max_waiting_requests"]}
    with SpeculativeModel.from_pretrained(model, draft, **sizes) as loaded:
        gc.freeze()  # a full collection would look at all of torch, and stop the event loop for 0.3 s
        service = Service(loaded, name or model, options["api_key"], options["max_body_bytes"])
        Server(service, options["drain_seconds"], host, port).run()


if __name__ == "__main__":
    main()
