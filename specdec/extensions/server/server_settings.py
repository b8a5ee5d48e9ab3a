"""ServerSettings: what a server takes, from whom, and how long it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.errors import InvalidInputError
from specdec.extensions.tools.answer_formats import AnswerFormat


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """ServerSettings of a server.

    Attributes:
        name: the model's, in requests and answers.
        keys: one of these must come with each request; empty: none is asked for. With several, each is a client.
        max_body_bytes, body_seconds: size of a request's body, and seconds in which it must arrive.
        max_grammar_bytes: of a grammar, which lengthens the round in which it begins. max_n: completions of a prompt.
        max_requests_per_client: completions (prompts times n) that one client may have at once, by its key if there
            are several, else by its address. None: half of those that the model takes; any number where it takes any.
        allow_lark: take grammars in Lark's syntax, which can keep a thread busy for good.
        family: how the model writes tool calls: docs/tools.md.
        stalled_seconds: of a round, after which the server counts as stalled.
        drain_seconds: for running requests to end after SIGTERM.
    """

    name: str
    keys: Sequence[str] = ()
    max_body_bytes: int = 2**20
    body_seconds: float = 30.0
    max_grammar_bytes: int = 2**14
    max_n: int = 16
    max_requests_per_client: int | None = None
    allow_lark: bool = False
    family: str | AnswerFormat = "auto"
    stalled_seconds: float = 60.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Raises InvalidInputError: a key that no request can have."""
        if odd := [place for place, key in enumerate(self.keys, 1) if not key.strip() or not key.isascii()]:
            raise InvalidInputError(f"API key {odd[0]} is empty or not ASCII: no header can have it; give another")
