"""Service: the answers of a server, as an ASGI app."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from specdec.errors import SpecdecError
from specdec.extensions import openai_format as openai
from specdec.extensions.server.clients import Clients
from specdec.extensions.server.monitor import Monitor
from specdec.extensions.server.record import CLOSE, Refusal, RequestRecord, client_gone
from specdec.extensions.server.request_log import RequestLog
from specdec.extensions.server.server_settings import ServerSettings
from specdec.extensions.tools.tool_use import ToolUse
from specdec.requests.prompts import split_prompts
from specdec.requests.sampling import SamplingParams
from specdec.values import Json, least_bytes

T = TypeVar("T")
_SIZES = {"max_n": "completions of a prompt (n)", "max_grammar_bytes": "bytes of a grammar, or of schemas of tools"}
_SHORT = 2**15
"""Bytes of a body that is read in a millisecond."""


class ReadBody(NamedTuple):
    """A body's request. is_stream, is_counted: whether the answer is a stream, and whether that ends with its
    usage."""

    prompts: Any
    params: SamplingParams
    use: ToolUse
    is_stream: bool
    is_counted: bool
    num_prompts: int


class Service:
    """The answers of a server over one model.

    Attributes:
        draining: whether the server ends: it is ready for nothing new.
    """

    def __init__(self, model: Any, settings: ServerSettings) -> None:
        """model: a `SpeculativeModel`."""
        self.model = model
        self.settings = settings
        self.draining = False
        waiting = model.config.max_waiting_requests
        each = settings.max_requests_per_client
        most = None if waiting is None else model.config.max_num_seqs + waiting
        self.clients = Clients(settings.keys, each or (None if most is None else -(-most // 2)), most)
        self._readers = ThreadPoolExecutor(1, "specdec-bodies")
        self.monitor = Monitor(model.metrics, lambda: self.clients.in_flight)

    def app(self, more: Sequence[Route] = ()) -> RequestLog:
        """The app. more: routes of your own."""
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/v1/chat/completions", partial(self.answer, chat=True), methods=["POST"]),
            Route("/v1/completions", partial(self.answer, chat=False), methods=["POST"]),
            Route("/health", self.state),
            Route("/ready", self.state),
            Route("/metrics", self.metrics),
            *more,
        ]
        kinds = (HTTPException, SpecdecError, RecursionError, Exception)
        app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, failed))
        return RequestLog(app, self.clients, self.monitor)

    async def state(self, request: Request) -> Response:
        """/health: whether the process is to be kept, which it is while rounds end. /ready: whether it takes requests,
        which it does until it drains; its port is bound once the model is loaded."""
        is_ready = request.url.path == "/ready"
        if self.draining:
            return answered({"status": "draining"}, 503 if is_ready else 200)
        is_stalled = self.model.metrics()["round_age_seconds"] > self.settings.stalled_seconds
        return answered({"status": "stalled" if is_stalled else "ok"}, 503 if is_stalled else 200)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        text, content_type = self.monitor.text(request.headers.get("accept", ""))
        return Response(text, media_type=content_type)

    async def models(self, request: Request) -> Response:
        """The one model."""
        self._admitted(request)
        return answered(openai.models_of(self.settings.name, request.path_params.get("name")))

    async def answer(self, request: Request, chat: bool) -> Response:
        """Completions of the prompts in a body."""
        record = self._admitted(request)
        self.clients.take(record, 1)
        data = await self._read(request)
        if len(data) <= _SHORT:
            asked = self.asked(data, chat)
        else:  # its JSON and its schemas would hold up the event loop
            asked = await asyncio.get_running_loop().run_in_executor(self._readers, self.asked, data, chat)
        use = asked.use
        params = asked.params
        self.clients.take(record, params.n * asked.num_prompts)
        stream = self.model.stream_async(asked.prompts, params)
        head = openai.head_of(self.settings.name, chat)
        await unless_gone(request, stream, stream.start())
        record.prompt_tokens = sum(map(len, stream.prompts[:: params.n]))
        if asked.is_stream:
            form = (chat, asked.is_counted, use, params.stop)
            events = openai.events(stream, self.model.tokenizer, head, *form, record.note)
            return StreamingResponse(events, media_type="text/event-stream")
        done = await unless_gone(request, stream, stream.completions())
        record.complete(done)
        return answered(head | openai.response_of(done, self.model.tokenizer, chat, use, params.stop))

    def asked(self, data: bytes, chat: bool) -> ReadBody:
        """A body's request. Raises Refusal, InvalidInputError."""
        settings = self.settings
        body = openai.body_of(data, settings.name, orjson.loads)
        if len(data) > (most := settings.max_grammar_bytes):  # before it is written out, which holds up all threads
            self._check_size("max_grammar_bytes", least_bytes(openai.schema_of(body), most), whole=False)
        use = openai.tools_of(body, chat, self.model.tokenizer, settings.family)
        prompts, params = openai.request_of(body, chat, settings.allow_lark, use)
        self._check_size("max_n", params.n)
        self._check_size("max_grammar_bytes", len(getattr(params.grammar, "source", "")))
        return ReadBody(prompts, params, use, *openai.streamed(body), 1 if chat else len(split_prompts(prompts)))

    def _check_size(self, name: str, size: int, whole: bool = True) -> None:
        """Raises Refusal: more than the setting of that name allows. whole: size is not that of a part."""
        if size > (most := getattr(self.settings, name)):
            found = size if whole else f"more than {most}"
            raise Refusal(400, name, f"{found} {_SIZES[name]}: at most {most} are served ({name}); ask for less")

    def _admitted(self, request: Request) -> RequestRecord:
        """The record of a request whose key is right. Raises Refusal."""
        record: RequestRecord = request.state.record
        record.client = self.clients.named(request)
        return record

    async def _read(self, request: Request) -> bytes:
        """The body. Raises Refusal: it is too large, or late."""
        data = bytearray()
        settings = self.settings
        too_large = Refusal(413, "body_size", f"the body has more than {settings.max_body_bytes} bytes", CLOSE)
        try:
            async with asyncio.timeout(settings.body_seconds):
                async for part in request.stream():
                    data += part
                    if len(data) > settings.max_body_bytes:
                        raise too_large
        except TimeoutError:
            words = f"the body has not arrived within {settings.body_seconds:g} s"
            raise Refusal(408, "body_late", words, CLOSE) from None
        except ClientDisconnect:
            raise client_gone() from None
        return bytes(data)


async def unless_gone(request: Request, stream: Any, work: Coroutine[Any, Any, T]) -> T:
    """What is awaited of a stream.

    Raises:
        Refusal: the client went away first, and the stream is closed.
    """
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise client_gone()
        return tasks[0].result()
    except BaseException:
        stream.close()
        raise
    finally:
        for task in tasks:
            task.cancel()


def answered(fields: Json, status: int = 200, headers: Any = None) -> Response:
    """JSON."""
    return Response(json.dumps(fields), status, headers, "application/json")


async def failed(request: Request, error: Exception) -> Response:
    """The answer to a request that failed; its record has the reason."""
    status, fields = openai.error_of(error)
    request.state.record.fail(error, status)
    retry = {"Retry-After": "1"} if status in (429, 503) else {}
    return answered(fields, status, {**retry, **(getattr(error, "headers", None) or {})})
