"""Columns of a data set -> tasks, and answers -> columns, for Ray Data, pandas and their like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.errors import InvalidInputError
from specdec.extensions.batches.answering import TaskResult
from specdec.extensions.batches.lines import key_of
from specdec.extensions.batches.records import columns
from specdec.extensions.batches.tasks import Task, TaskDefaults, params_of, prompt_of
from specdec.options.arguments import CHAT_OPTIONS
from specdec.values import short

PROMPTS = ("prompt", "messages", "token_ids")
_NOTHING: dict[str, Any] = {
    "text": "",
    "token_ids": [],
    "finish_reason": "",
    **dict.fromkeys(("prompt_tokens", "new_tokens", "rounds", "drafted", "accepted"), 0),
}
"""The columns of a row that ended with an error."""


def tasks_of(batch: Mapping[str, Any], asking: TaskDefaults) -> list[Task]:
    """A task for each row of a batch, those with an error among them.

    Columns: prompt, messages or token_ids; perhaps params (a dict of sampling options) and key. Others are passed on.
    A row without a key, and without a seed of its own, draws by the number of requests before it in its worker.
    """
    count = min((len(column) for column in batch.values()), default=0)
    known = {name: batch[name] for name in (*PROMPTS, "params", "key") if name in batch}
    return [_task(i, {name: plain(column[i]) for name, column in known.items()}, asking) for i in range(count)]


def _task(number: int, row: dict[str, Any], asking: TaskDefaults) -> Task:
    task = Task(number)
    try:
        task = replace(task, key=key_of({"key": row.get("key")}))
        own = row.get("params") or {}
        if not isinstance(own, dict):
            raise InvalidInputError(f"params={short(own)}: a dict of sampling options is needed")
        prompt = prompt_of({**row, **{name: own.pop(name) for name in CHAT_OPTIONS if name in own}})
        params = params_of(own, asking, task)
        if task.key is None and own.get("seed") is None:
            params = replace(params, seed=asking.params.seed)
        if params.n != 1:
            raise InvalidInputError(f"n={params.n}: a row has one answer; repeat the row, with another key")
        return replace(task, prompt=prompt, params=params)
    except InvalidInputError as error:
        return replace(task, error=f"{type(error).__name__}: {error}")


def plain(value: Any) -> Any:
    """A value of a column in Python's own types; fields of a struct that are not set are left out."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: plain(own) for name, own in value.items() if own is not None}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def answer_columns(batch: Mapping[str, Any], answers: Iterable[TaskResult]) -> dict[str, Any]:
    """The batch's columns and those of its answers; a prompt of ids is called prompt_token_ids then.

    error: "" where a row has an answer.
    """
    rows: dict[int, dict[str, Any]] = {}
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
