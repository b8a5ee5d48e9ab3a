"""Answers of a model to tasks, as lines of our own form or of OpenAI's batches, or as columns.

Source: OpenAI API reference, "The request output object", "The chat completion object", "The completion object".
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attention.errors import named_error
from specdec.engine.feeding import Feeding
from specdec.engine.streams import Stream
from specdec.errors import InvalidInputError, RequestFailedError
from specdec.extensions.batches.lines import Line
from specdec.extensions.batches.tasks import Task, TaskDefaults, task_of
from specdec.extensions.openai_format import LEAST, response_of, tools_of
from specdec.extensions.tools.answer_reader import answer_of
from specdec.requests.logprobs import TokenLogprobs
from specdec.requests.request import Completion
from specdec.requests.stats import pool_requests
from specdec.requests.submission import filled
from specdec.values import Fields, Json, without_none

if TYPE_CHECKING:
    from specdec.model import SpeculativeModel

ID = "batch_req_"
"""What the id of an answer of OpenAI's form begins with; its row's line follows."""
_NOTHING: Json = {
    "text": "",
    "token_ids": [],
    "finish_reason": "",
    **dict.fromkeys(("prompt_tokens", "new_tokens", "rounds", "drafted", "accepted"), 0),
}
"""The columns of a row that ended with an error."""


class TaskResult(NamedTuple):
    """A task that has ended: its completions, in order, or an error, with the name of its class."""

    task: Task
    completions: tuple[Completion, ...] = ()
    error: str = ""


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


def record_of(answer: TaskResult, tokenizer: Any) -> Record:
    """The record of a task that has ended."""
    task, completions, error = answer
    fields = _row(answer, tokenizer) if task.form == "row" else _openai(answer, tokenizer)
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


def _row(answer: TaskResult, tokenizer: Any) -> Json:
    task, completions, error = answer
    named = {} if task.key is None else {task.key.field: task.key.value}
    head = {**named, "line": task.number, **task.kept, "error": error or None}
    if error:
        return head
    each = [columns(completion) | _told(completion) for completion in completions]
    if getattr(task.prompt, "options", {}).get("tools"):
        for fields, completion in zip(each, completions, strict=True):
            fields["message"] = answer_of(completion, tokenizer, stops=task.params.stop)
    return head | (each[0] if task.params.n == 1 else {"completions": each})


def columns(completion: Completion) -> Json:
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


def answer_columns(batch: Fields, answers: Iterable[TaskResult]) -> Json:
    """The batch's columns and those of its answers; a prompt of ids is called prompt_token_ids then.

    error: "" where a row has an answer.
    """
    rows = {}
    for task, completions, error in answers:
        rows[task.number] = ({} if error else columns(completions[0])) | {"error": error}
    kept = {"prompt_token_ids" if name == "token_ids" else name: column for name, column in batch.items()}
    each = [_NOTHING | rows[i] for i in sorted(rows)]
    return kept | {name: _column([row[name] for row in each]) for name in (*_NOTHING, "error")}


def _column(values: list[Any]) -> np.ndarray:
    """[rows]; of lists, arrays of int64: of a type even where all are empty."""
    if not any(isinstance(value, list) for value in values):
        return np.array(values)
    column = np.empty(len(values), object)
    for i, value in enumerate(values):
        column[i] = np.array(value, np.int64)
    return column


def _told(completion: Completion) -> Json:
    """Fields of completions that requested them."""
    return without_none(
        {
            "truncated_by": completion.truncated_by,
            "drafts": completion.drafts,
            "logprobs": _plain(completion.logprobs),
            "prompt_logprobs": _plain(completion.prompt_logprobs),
        }
    )


def _plain(each: Iterable[TokenLogprobs | None] | None) -> list[Json | None] | None:
    return None if each is None else [None if one is None else _finite(one)._asdict() for one in each]


def _finite(told: TokenLogprobs) -> TokenLogprobs:
    """JSON has no infinity: a token without probability has LEAST."""
    top = tuple((token, max(logprob, LEAST)) for token, logprob in told.top)
    return told._replace(logprob=max(told.logprob, LEAST), top=top)


def _openai(answer: TaskResult, tokenizer: Any) -> Json:
    task, completions, error = answer
    name = f"{ID}{task.number}"
    custom_id = None if task.key is None else task.key.value
    failure = None
    if error:
        kind, _, message = error.partition(": ")
        is_ours = not kind.startswith("Invalid") and kind != "CacheTooSmallError"
        about = {"message": message, "type": "server_error" if is_ours else "invalid_request_error", "code": kind}
        status = 500 if is_ours else 400
        body: Json = {"error": about}
        failure = {"code": kind, "message": message}
    else:
        status = 200
        is_chat = task.form == "chat.completion"
        use = tools_of(task.kept.get("tools", {}), is_chat, tokenizer)
        body = {"id": name, "created": int(time.time()), "model": task.kept["model"]}
        body |= response_of(completions, tokenizer, is_chat, use, task.params.stop)
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": name, "custom_id": custom_id, "response": response, "error": failure}


def answered(model: SpeculativeModel, tasks: Iterable[Task]) -> Iterator[TaskResult]:
    """Every task once, in order of their ends; read lazily, see `Feeding`. One that fails is an answer with an error.

    Raises:
        SpecdecError: more rounds in a row failed than the batch has rows, without an answer between: the device, most
            likely, and not a row. Others: the model is closed or has changed.
    """
    held: dict[int, tuple[Task, list[Completion]]] = {}
    rows = model.config.max_num_seqs

    def numbered() -> Iterator[Task]:
        for number, task in enumerate(tasks):
            held[number] = task, []
            yield task

    def opened(group: list[Task]) -> Stream:
        if refused := [task.error for task in group if task.error]:
            raise InvalidInputError(refused[0])
        return model.stream([task.prompt for task in group], [filled(task.params, model) for task in group])

    failures = 0
    with closing(Feeding(opened, numbered(), rows)) as feeding:
        for item, _, found in feeding:
            if isinstance(found, Completion):
                failures = 0
            if item not in held:  # of several samples that fail the first is kept
                continue
            task, samples = held[item]
            if isinstance(found, Completion):
                samples.append(found)
                if len(samples) == task.params.n:
                    del held[item]
                    yield TaskResult(task, tuple(sorted(samples, key=lambda one: one.sample_index)))
            else:
                failures += not isinstance(found, (InvalidInputError, RequestFailedError))
                if failures > rows:
                    raise found
                del held[item]
                yield TaskResult(task, error=task.error or named_error(found))


def records(model: SpeculativeModel, lines: Iterable[Line], asking: TaskDefaults) -> Iterator[Record]:
    """The records of some lines, as they end."""
    for answer in answered(model, (task_of(line, asking) for line in lines)):
        yield record_of(answer, model.tokenizer)
