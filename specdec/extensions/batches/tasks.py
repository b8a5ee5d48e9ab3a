"""Tasks: the request of a row, in specdec's form or in that of OpenAI's batches, on a line or in columns.

Source: OpenAI API reference, "Batch", "The request input object", "Create chat completion", "Create completion".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from attention.errors import named_error
from specdec.errors import InvalidInputError
from specdec.extensions.batches.lines import KEYS, Key, Line, digest, fields_of, key_of
from specdec.extensions.openai_format import NO_OPTIONS, chat_of, options_of, streamed, tools_of, with_tools
from specdec.extensions.tools.tool_use import FIELDS
from specdec.options.arguments import CHAT_OPTIONS, own_names, unexpected
from specdec.requests.sampling import SamplingParams
from specdec.values import Fields, Json, only, refuse, short, without, without_none, wrong

Form = Literal["row", "chat.completion", "text_completion"]
URLS: dict[str, Form] = {"/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion"}
_PROMPTS = ("prompt", "messages", "token_ids")
_ABOUT_PROMPTS = _PROMPTS + CHAT_OPTIONS
_OPTIONS = tuple(each.name for each in fields(SamplingParams))
_STREAM = ("stream", "stream_options")
_NOT_WRITTEN = ("return_logits", "return_scores")


@dataclass(frozen=True)
class TaskDefaults:
    """Settings of a run for every row: its sampling, where the row has no option of its own, and the seed of the run.

    name: of the model, in OpenAI's answers.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    name: str = "specdec"


@dataclass(frozen=True)
class Task:
    """One row.

    Attributes:
        number: its line, or its place among others. key: None where it has none. form: as which it is answered.
        prompt, params: as `SpeculativeModel.stream` takes them. kept: fields that are copied to the answer.
        error: why it cannot run, with the name of the error's class; "" where it can.
    """

    number: int
    key: Key | None = None
    form: Form = "row"
    prompt: Any = None
    params: SamplingParams = field(default_factory=SamplingParams)
    kept: Json = field(default_factory=dict)
    error: str = ""


_Make = Callable[[Task, Json, TaskDefaults], Task]


def task_of(line: Line, asking: TaskDefaults) -> Task:
    """The task of a line, or why there is none."""
    return _task(line.number, partial(fields_of, line), _of_line, asking)


def tasks_of(batch: Fields, asking: TaskDefaults) -> list[Task]:
    """A task for each row of a batch of columns, those with an error among them.

    Columns: prompt, messages or token_ids; perhaps params (a dict of sampling options) and key. Others are passed on.
    A row without a key, and without a seed of its own, draws by the number of requests before it in its worker.
    """
    count = min((len(column) for column in batch.values()), default=0)
    known = only(batch, (*_PROMPTS, "params", "key"))
    rows = [{name: plain(column[i]) for name, column in known.items()} for i in range(count)]
    return [_task(i, partial(dict, row), _of_columns, asking) for i, row in enumerate(rows)]


def _task(number: int, read: Callable[[], Json], make: _Make, asking: TaskDefaults) -> Task:
    """The task that `make` makes of the row that `read` returns, or why there is none."""
    task = Task(number)
    try:
        row = read()
        task = replace(task, key=key_of(row))
        return make(task, row, asking)
    except InvalidInputError as error:
        return replace(task, error=named_error(error))


def _of_line(task: Task, row: Json, asking: TaskDefaults) -> Task:
    if "body" not in row and "url" not in row:
        return _of_row(task, row, asking)
    task = replace(task, form=URLS.get(str(row.get("url")), "chat.completion"))
    return _of_openai(task, row, asking)


def _of_columns(task: Task, row: Json, asking: TaskDefaults) -> Task:
    own = row.pop("params", None) or {}
    if not isinstance(own, dict):
        raise wrong("params", own, "a dict of sampling options is needed")
    task = _of_row(task, {**own, **row}, asking)
    if task.key is None and own.get("seed") is None:
        task = replace(task, params=replace(task.params, seed=asking.params.seed))
    if task.params.n != 1:
        raise InvalidInputError(f"n={task.params.n}: a row has one answer; repeat the row, with another key")
    return task


def plain(value: Any) -> Any:
    """A value of a column in Python's own types; fields of a struct that are not set are left out."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: plain(own) for name, own in value.items() if own is not None}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def _of_row(task: Task, row: Json, asking: TaskDefaults) -> Task:
    prompt = prompt_of(row)
    own = without(row, (*KEYS, *_ABOUT_PROMPTS, "metadata"))
    return replace(task, prompt=prompt, params=params_of(own, asking, task), kept=only(row, ("metadata",)))


def _of_openai(task: Task, row: Json, asking: TaskDefaults) -> Task:
    body = row.get("body")
    url = row.get("url")
    if not isinstance(row.get("custom_id"), str):
        raise wrong("custom_id", row.get("custom_id"), "a text is needed")
    if row.get("method", "POST") != "POST" or url not in URLS:
        asked = f"{short(row.get('method'))} {short(url)}"
        raise InvalidInputError(f"method and url are {asked}: allowed is POST with {' or '.join(URLS)}")
    if not isinstance(body, dict):
        raise wrong("body", body, "a JSON object is needed")
    is_chat = task.form == "chat.completion"
    about = ("messages", *CHAT_OPTIONS) if is_chat else ("prompt",)
    use = tools_of(body, is_chat)
    prompt = prompt_of(only(body, about) | ({"tools": use.tools or None} if is_chat else {}))
    fields = FIELDS if is_chat else ()
    own = without(body, (*NO_OPTIONS, *_STREAM, *about, *fields))
    if any(streamed(body)):
        raise InvalidInputError(f"stream={short(body.get('stream'))} is not served; leave it out")
    own = options_of(own, is_chat)
    kept = {"model": body.get("model") or asking.name}
    kept |= {"tools": only(body, fields)} if use.tools else {}
    return replace(task, prompt=prompt, params=with_tools(params_of(own, asking, task), use), kept=kept)


def prompt_of(row: Json) -> Any:
    """The prompt of a row's fields: a text, messages (with options of their template) or token ids.

    Raises:
        InvalidInputError: none of them, several, or one that is no such thing.
    """
    there = without_none({name: row.get(name) for name in _PROMPTS})
    template = without_none({name: row.get(name) for name in CHAT_OPTIONS})
    if len(there) != 1:
        raise InvalidInputError(f"a row has one of {', '.join(_PROMPTS)}, not {' and '.join(there) or 'none of them'}")
    ((name, value),) = there.items()
    if name == "prompt" and isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        value = value[0]  # OpenAI's prompts may stand in a list
    are_ids = isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
    are_messages = isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)
    fits = {"prompt": isinstance(value, str) or are_ids, "messages": are_messages, "token_ids": are_ids}
    if not fits[name]:
        kinds = {"prompt": "one text", "messages": "a list of chat messages", "token_ids": "a list of token ids"}
        raise refuse(name, value, kinds[name])
    if template and name != "messages":
        raise InvalidInputError(f"{', '.join(template)}: only messages are written by a chat template; leave it out")
    return chat_of(value, template) if name == "messages" else value


def params_of(own: Json, asking: TaskDefaults, task: Task) -> SamplingParams:
    """The sampling of a row: its own options, else those of the run; without a seed, one made of its key.

    Raises:
        InvalidInputError: an option that there is not, or a value that is not allowed.
    """
    options = own_names(without_none(own))
    for name in _NOT_WRITTEN:
        if options.get(name):
            raise InvalidInputError(f"{name}: whole rows of logits are written to no file; ask for logprobs")
    if odd := without(options, _OPTIONS):
        raise unexpected("{}", odd, _OPTIONS, 'fields of your own go into "metadata"; unknown field')
    if "seed" not in options and asking.params.seed is None:
        options["seed"] = digest(asking.seed, f"line {task.number}" if task.key is None else f"key {task.key.name}")
    return replace(asking.params, **options)
