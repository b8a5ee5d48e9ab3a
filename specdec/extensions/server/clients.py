"""Clients, by key or address, and how many completions each has in flight."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_network

from starlette.requests import Request

from specdec.errors import QueueFullError
from specdec.extensions.server.record import Refusal, RequestRecord


class Clients:
    """The clients of a server."""

    def __init__(self, keys: Sequence[str], most_each: int | None, most: int | None) -> None:
        """most_each, most: completions that a client, and that all, may have at once; None for any number."""
        self._keys = [key.strip().encode() for key in keys]
        self._most_each = most_each
        self._most = most
        self._held = Counter[str]()

    @property
    def in_flight(self) -> int:
        """Completions of all clients."""
        return self._held.total()

    def named(self, request: Request) -> str:
        """The client that sends a request: its key's place where there are several keys, else its address.

        Raises:
            Refusal: the key is missing or wrong.
        """
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        each = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]  # all: in a constant time
        if self._keys and (scheme.lower() != "bearer" or not any(each)):
            message = "the API key is missing or wrong; give it as Authorization: Bearer KEY"
            raise Refusal(401, "wrong_key", message, {"WWW-Authenticate": "Bearer"})
        return f"key {each.index(True) + 1}" if len(each) > 1 else network_of(request)

    def take(self, record: RequestRecord, count: int) -> None:
        """Count so many completions of a request, in place of those that it has counted.

        Raises:
            Refusal: its client would have too many. QueueFullError: all clients together would.
        """
        most = self._most_each
        beside = self._held[record.client] - record.held
        if most is not None and beside + count > most:
            remedy = "ask again when some have ended" if count <= most else "ask for fewer in a request"
            raise Refusal(
                429 if count <= most else 400,
                "client_limit",
                f"{count} completions (prompts times n) beside {beside} of this client: it may have {most} at once "
                f"(max_requests_per_client); {remedy}",
            )
        others = self.in_flight - record.held
        if self._most is not None and others + count > self._most:
            raise QueueFullError(f"{others} completions run or wait, the server takes {self._most}; ask again later")
        self._held[record.client] += count - record.held
        record.held = count

    def give_back(self, record: RequestRecord) -> None:
        """The end of a request."""
        self._held[record.client] -= record.held
        if not self._held[record.client]:
            del self._held[record.client]


def network_of(request: Request) -> str:
    """The address of a request's client; of IPv6 its network of 64 bits, all of which one client has."""
    host = request.client.host if request.client is not None else "local"
    with suppress(ValueError):  # no IPv6
        return str(ip_network(f"{host.partition('%')[0]}/64", strict=False))
    return host
