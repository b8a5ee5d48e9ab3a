"""RequestLog: each request of an ASGI app is counted and logged at its end."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.extensions.server.clients import Clients
from specdec.extensions.server.monitor import Monitor
from specdec.extensions.server.record import GONE, PROBES, RequestRecord

LOG = logging.getLogger("specdec.server")
_PLAIN_WORD = re.compile(r"[^\s\"\\\x00-\x1f\x7f-\x9f]+")


class RequestLog:
    """An ASGI app whose requests are counted and logged, one line each, at their end. A request's record is in its
    `state.record`; the completions that it counts for its client are given back."""

    def __init__(self, app: ASGIApp, clients: Clients, monitor: Monitor) -> None:
        self._app = app
        self._clients = clients
        self._monitor = monitor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.of(scope)
        scope.setdefault("state", {})["record"] = record

        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                record.leave()
            return message

        async def sent(message: Message) -> None:
            record.send(message)
            await send(message)

        try:
            await self._app(scope, received, sent)
        except Exception as error:  # the answer was sent where that was possible
            record.fail(error, 500)
            LOG.exception("request %s failed", record.id)
        finally:
            self._end(record)

    def _end(self, record: RequestRecord) -> None:
        record.total_s = record.age
        if not record.answered and not record.reason:  # cancelled: the process ends, and the answer with it
            record.status = GONE
            record.reason = "server_ended"
        self._monitor.count(record)
        self._clients.give_back(record)
        level = logging.WARNING if record.status >= 500 else logging.INFO
        fields = record.fields()
        words = " ".join(f"{name}={_word(value)}" for name, value in fields.items())
        LOG.log(logging.DEBUG if record.path in PROBES else level, "%s", words, extra={"fields": fields})


class JsonLines(logging.Formatter):
    """A JSON object a line: time, level, logger, and a request's fields, or a message and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        own = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name}
        own |= getattr(record, "fields", None) or {"message": record.getMessage().strip()}
        own |= {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps(own, ensure_ascii=False)


def _word(value: Any) -> str:
    """A value as one word: in quotes, without control characters, where it is more."""
    text = str(value)
    return text if _PLAIN_WORD.fullmatch(text) else json.dumps(text)
