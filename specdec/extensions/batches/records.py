"""Records: the lines of answers, in our own form or in that of OpenAI's batches.

Source: OpenAI API reference, "The request output object", "The chat completion object", "The completion object".
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from specdec.extensions.batches.tasks import Task
from specdec.extensions.openai_format import LEAST, response_of
from specdec.requests.logprobs import TokenLogprobs
from specdec.requests.request import Completion
from specdec.requests.stats import pool_requests

ID = "batch_req_"
"""What the id of an answer of OpenAI's form begins with; its row's line follows."""


class Record(NamedTuple):
    """A line of answers, and what is counted of it.

    number: the row's line. data: the line, with its end. failed: whether it is an error.
    """

    number: int
    data: bytes
    failed: bool = False
    new_tokens: int = 0
    rounds: int = 0
    emitted: int = 0


def record_of(task: Task, completions: Sequence[Completion], error: str, tokenizer: Any) -> Record:
    """The record of a task that has ended. error: "" where it has completions."""
    if task.form == "row":
        fields = _row(task, completions, error)
    else:
        fields = _openai(task, completions, error, tokenizer)
    stats = pool_requests([completion.stats for completion in completions])
    new = sum(len(completion.token_ids) for completion in completions)
    return Record(task.number, line_of(fields), bool(error), new, stats.rounds, stats.emitted)


def line_of(fields: Any) -> bytes:
    """JSON on a line; escaped where the text is not valid Unicode."""
    try:
        return json.dumps(fields, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(fields).encode() + b"\n"


def row_number(fields: Any) -> int:
    """The line of the row that a record answers. Raises ValueError, LookupError or TypeError: it is no record."""
    number = fields["line"] if "line" in fields else int(str(fields["id"]).removeprefix(ID))
    if type(number) is not int or number < 1:
        raise ValueError(f"line {number!r}")
    return number


def _row(task: Task, completions: Sequence[Completion], error: str) -> dict[str, Any]:
    named = {} if task.key is None else {task.key.field: task.key.value}
    head = {**named, "line": task.number, **task.kept, "error": error or None}
    if error:
        return head
    each = [columns(completion) | _told(completion) for completion in completions]
    return head | (each[0] if task.params.n == 1 else {"completions": each})


def columns(completion: Completion) -> dict[str, Any]:
    """Fields of every completion."""
    pooled = completion.pooled
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.stats.prompt_tokens,
        "new_tokens": completion.stats.new_tokens,
        "rounds": pooled.rounds,
        "drafted": pooled.drafted,
        "accepted": pooled.accepted,
    }


def _told(completion: Completion) -> dict[str, Any]:
    """Fields of completions that requested them."""
    found: dict[str, Any] = {
        "truncated_by": completion.truncated_by,
        "drafts": completion.drafts,
        "logprobs": _plain(completion.logprobs),
        "prompt_logprobs": _plain(completion.prompt_logprobs),
    }
    return {name: value for name, value in found.items() if value is not None}


def _plain(each: Iterable[TokenLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    return None if each is None else [None if one is None else _finite(one)._asdict() for one in each]


def _finite(told: TokenLogprobs) -> TokenLogprobs:
    """JSON has no infinity: a token without probability has LEAST."""
    top = tuple((token, max(logprob, LEAST)) for token, logprob in told.top)
    return told._replace(logprob=max(told.logprob, LEAST), top=top)


def _openai(task: Task, completions: Sequence[Completion], error: str, tokenizer: Any) -> dict[str, Any]:
    name = f"{ID}{task.number}"
    custom_id = None if task.key is None else task.key.value
    if error:
        kind, _, message = error.partition(": ")
        is_ours = not kind.startswith("Invalid") and kind != "CacheTooSmallError"
        about = {"message": message, "type": "server_error" if is_ours else "invalid_request_error", "code": kind}
        response = {"status_code": 500 if is_ours else 400, "request_id": name, "body": {"error": about}}
        return {"id": name, "custom_id": custom_id, "response": response, "error": {"code": kind, "message": message}}
    head = {"id": name, "created": int(time.time()), "model": task.kept["model"]}
    body = head | response_of(completions, tokenizer, task.form == "chat.completion")
    response = {"status_code": 200, "request_id": name, "body": body}
    return {"id": name, "custom_id": custom_id, "response": response, "error": None}
