"""RequestRecord: what is known of one HTTP request, for its line in the log and for the counters."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from starlette.exceptions import HTTPException
from starlette.types import Message, Scope

from specdec.engine.streams import StreamUpdate
from specdec.errors import SpecdecError
from specdec.requests.request import Completion
from specdec.values import Json

_SANE_ID = re.compile(r"[\w.:+/=-]{1,128}", re.ASCII)
"""An id of a request that is taken over from its header."""
PROBES = ("/health", "/ready", "/metrics")
"""Paths that monitoring requests again and again: their lines are of the level DEBUG."""
_ROUTES = (*PROBES, "/v1/models", "/v1/completions", "/v1/chat/completions")
_LOGGED = (
    *("id", "client", "address", "method", "path", "status", "prompt_tokens", "new_tokens", "drafts", "accepted"),
    *("first_token_s", "total_s", "reason", "error"),
)
GONE = 499
"""Status of a request whose client went away before the end of the answer, in the log and in the counters."""


CLOSE = {"Connection": "close"}
"""Of answers to requests whose body is not read: it is not waited for."""


class Refusal(HTTPException):
    """A request that is refused. reason: one word, for the log and the counters."""

    def __init__(self, status: int, reason: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, message, headers)
        self.reason = reason


def client_gone() -> Refusal:
    """The refusal of a request whose client went away."""
    return Refusal(GONE, "client_gone", "the client has gone")


@dataclass
class RequestRecord:
    """One request.

    Attributes:
        id: of its x-request-id header, or made here. address: the client's. client: whom it counts for, once known.
        status: of the answer, `GONE` if the client went away. reason: why it was refused or failed: one word, or the
            name of an error. error: likewise in words.
        prompt_tokens: read. new_tokens: sent, or of completions that have ended. drafts, accepted: verified drafts of
            completions that have ended, and how many of them were accepted.
        first_token_s, total_s: seconds to the first token (None without any), and to the end.
        done: completions that have ended. held: completions that are counted for the client. answered: whether the
            answer has been sent to its end.
    """

    id: str
    method: str
    path: str
    address: str
    client: str = ""
    status: int = 0
    reason: str = ""
    error: str = ""
    prompt_tokens: int = 0
    new_tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0
    done: list[Completion] = field(default_factory=list)
    held: int = 0
    answered: bool = False
    _begun: float = field(default_factory=time.perf_counter)

    @property
    def route(self) -> str:
        """The path as it is in the counters."""
        return self.path if self.path in _ROUTES else "other"

    @classmethod
    def of(cls, scope: Scope) -> Self:
        """The record of an ASGI request, at its arrival."""
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        own = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        return cls(own, scope["method"], scope["path"], (scope.get("client") or ("local",))[0])

    def fail(self, error: BaseException, status: int = 0) -> None:
        """Note why it is refused, or why it failed. status: 0 to keep it."""
        self.status = status or self.status
        self.reason = error.reason if isinstance(error, Refusal) else type(error).__name__.strip("_")
        self.error = str(getattr(error, "detail", error))

    def leave(self) -> None:
        """The client is gone; nothing where the answer has ended."""
        if not self.answered:
            self.fail(client_gone(), GONE)

    def send(self, message: Message) -> None:
        """Note a message of the answer."""
        if message["type"] == "http.response.start":
            self.status = self.status or message["status"]
            message.setdefault("headers", []).append((b"x-request-id", self.id.encode()))
        elif not message.get("more_body", False):
            self.answered = True

    def note(self, found: StreamUpdate | SpecdecError) -> None:
        """Note an update that is sent, or the error that ends the answer."""
        if isinstance(found, SpecdecError):
            self.fail(found)
            return
        if self.first_token_s is None and found.token_ids:
            self.first_token_s = self.age
        self.new_tokens += len(found.token_ids)
        if found.completion is not None:
            self._add(found.completion)

    def complete(self, done: Iterable[Completion]) -> None:
        """Note all completions of an answer that is sent at once."""
        for one in done:
            self._add(one)
            self.new_tokens += len(one.token_ids)
        self.first_token_s = (
            round(min(self.age - one.stats.decode_s for one in self.done), 4) if self.new_tokens else None
        )

    def _add(self, done: Completion) -> None:
        self.done.append(done)
        self.drafts += done.pooled.drafted
        self.accepted += done.pooled.accepted

    @property
    def age(self) -> float:
        """Seconds since its arrival."""
        return round(time.perf_counter() - self._begun, 4)

    def fields(self) -> Json:
        """What the log has of it, without what is not known."""
        return {name: value for name in _LOGGED if (value := getattr(self, name)) not in ("", None)}
