"""OpenAI's format: bodies of requests to prompts and parameters, completions and updates to bodies of answers.

What does not change what is generated (`user`, `metadata`, …) is ignored; what is not served is refused.
Beside OpenAI's, every option of `SamplingParams` may be given by its name (`top_k`, `repetition_penalty`, `max_time`).

Source: OpenAI API reference, "Create chat completion", "Create completion", "Error codes".
"""

from __future__ import annotations

import codecs
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from specdec.engine.streams import StreamUpdate
from specdec.errors import ClosedModelError, DrainingError, InvalidInputError, QueueFullError, SpecdecError
from specdec.extensions.tools.answer_formats import AnswerFormat, format_of
from specdec.extensions.tools.answer_reader import AnswerReader, deltas, message_of
from specdec.extensions.tools.tool_use import FIELDS, ToolUse, tool_use
from specdec.options.arguments import CHAT_OPTIONS, own_names
from specdec.requests import chats
from specdec.requests.logprobs import TokenLogprobs
from specdec.requests.request import Completion
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import pool_requests
from specdec.requests.text import Vocabulary
from specdec.values import Fields, Json, flag, only, refuse, short, whole, without, without_none, wrong

LEAST = -9999.0
"""The log-probability of what cannot come: JSON has no -inf. Source: OpenAI API reference, "top_logprobs"."""
MOST_TOP = 20
"""Alternatives of a chat's token. Source: as before."""
NO_OPTIONS = ("model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")
"""Fields of a body that change no token."""
OFF: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    **dict.fromkeys(("tools", "functions"), ([],)),
    "modalities": (["text"],),
    "suffix": ("",),
    "best_of": (1,),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "parallel_tool_calls": (True, False),
}
"""Fields of a body that are not served, with the values that have no effect; tools are of chats."""
_OLD_TOOLS = ("functions", "function_call")
_UNTOLD = ("return_logits", "return_scores", "return_drafts", "prompt_logprobs", "prompt_logprobs_start")
"""Options whose results have no place in an answer."""
_CHAT = "chat.completion"
_CHUNK = "chat.completion.chunk"
_TEXT = "text_completion"
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
PLAIN = ToolUse()
"""No tools, and answers as they are."""
_encode = json.JSONEncoder(separators=(",", ":")).encode


class _UnknownModelError(InvalidInputError):
    """A body names a model that is not served."""


_STATUS: dict[type[Exception], int] = {
    _UnknownModelError: 404,
    InvalidInputError: 400,
    RecursionError: 400,
    QueueFullError: 429,
    DrainingError: 503,
    ClosedModelError: 503,
}


def body_of(data: bytes, name: str, loads: Callable[[bytes], Any] = json.loads) -> Json:
    """The body of a request to the model that is called `name`. loads: reads JSON, while no other thread runs.

    Raises:
        InvalidInputError: no JSON object. _UnknownModelError: it names another model.
    """
    try:
        found = loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidInputError(f"the body is a JSON object, not {short(found)}")
    if found.get("model") not in (None, name):
        raise _UnknownModelError(f"there is no model {short(found['model'])}; there is {name!r}")
    return found


def models_of(name: str, asked: str | None) -> Json:
    """The list of models, of which there is one, or that one. Raises _UnknownModelError: another is named."""
    if asked not in (None, name):
        raise _UnknownModelError(f"there is no model {short(asked)}; there is {name!r}")
    one = {"id": name, "object": "model", "created": 0, "owned_by": "specdec"}
    return one if asked else {"object": "list", "data": [one]}


def streamed(body: Fields) -> tuple[bool, bool]:
    """Whether the answer is a stream, and whether that ends with its usage. Raises InvalidInputError: other values."""
    options = body.get("stream_options")
    if not isinstance(options, (Mapping, type(None))):
        raise refuse("stream_options", options, '{"include_usage": true or false}')
    given = {"stream": body.get("stream"), "stream_options: include_usage": (options or {}).get("include_usage")}
    stream, counted = (flag(name, value if value is not None else False) for name, value in given.items())
    return stream, counted


def tools_of(body: Fields, chat: bool, tokenizer: Any = None, family: str | AnswerFormat = "auto") -> ToolUse:
    """The tools of a body, and how the answers to it are read.

    family: how the model writes calls and reasoning: a name of `FORMATS`, "auto" (as the chat template shows), or a
    format of your own.

    Raises:
        InvalidInputError: as `tool_use` and `format_of`.
    """
    if not chat:
        return PLAIN
    template = getattr(tokenizer, "chat_template", None)
    own = format_of(family, template) if isinstance(family, str) else family
    return tool_use(body, own, template)


def request_of(
    body: Fields, chat: bool, allow_lark: bool = False, use: ToolUse | None = None
) -> tuple[Any, SamplingParams]:
    """Prompts and parameters of the body of a chat completion, or of a completion.

    allow_lark: take grammars in Lark's syntax, whose authors can keep a thread of this process busy for good. use: of
    `tools_of` for this body; without it calls are not read from answers, nor is "strict" served.

    Raises:
        InvalidInputError: something that is not served, or a value that is not allowed.
    """
    if used := [name for name in _UNTOLD if body.get(name) is not None and body[name] is not False]:
        raise InvalidInputError(f"{', '.join(used)}: an answer in OpenAI's format has no place for it")
    use = use or tools_of(body, chat)
    template = without(only(body, CHAT_OPTIONS), ("tools",)) if chat else {}
    template |= {"tools": use.tools} if use.tools else {}
    if template.get("chat_template") is not None:
        raise InvalidInputError("chat_template: this service takes no templates, which run as code; leave it out")
    about = ("prompt", "stream", "stream_options", "messages", *(FIELDS if chat else ()))
    elsewhere = (*NO_OPTIONS, *_UNTOLD, *template, *about)
    own = options_of(without(body, elsewhere), chat)
    params = with_tools(SamplingParams.from_dict({"temperature": 1.0, **own}), use)
    if not allow_lark and getattr(params.grammar, "kind", None) == "lark":
        raise InvalidInputError(
            "response_format: this service takes no grammar in Lark's syntax; give json_schema, regex or choice"
        )
    return chat_of(body.get("messages"), template) if chat else _prompt_of(body.get("prompt")), params


def schema_of(body: Fields) -> Any:
    """The schema, an object, that the answer to a body must follow; None where there is none."""
    form = body.get("response_format")
    named = form.get("json_schema") if isinstance(form, dict) and form.get("type") == "json_schema" else None
    schema = named.get("schema", named) if isinstance(named, dict) else None
    return schema if isinstance(schema, dict) else None


def with_tools(params: SamplingParams, use: ToolUse) -> SamplingParams:
    """The parameters with the grammar of tool calls. Raises InvalidInputError: they have another."""
    if use.grammar is None:
        return params
    if params.grammar is not None:
        raise InvalidInputError("response_format and tools that constrain the answer (tool_choice, strict): give one")
    return replace(params, grammar=use.grammar)


def options_of(given: Fields, chat: bool) -> Json:
    """Options of a body by the names of `SamplingParams`; what is null or has no effect is left out.

    Raises:
        InvalidInputError: something that is not served, log-probabilities that OpenAI has not, two values of an option.
    """
    own = without_none(given)
    for name in OFF.keys() & own.keys():
        value = own.pop(name)
        if not any(value == off and type(value) is type(off) for off in OFF[name]):
            tools = "; give tools and tool_choice in a chat" if name in _OLD_TOOLS else ""
            raise InvalidInputError(f"{name}={short(value)} is not served; leave it out{tools}")
    if chat:
        top = whole("top_logprobs", own.pop("top_logprobs", 0), 0, MOST_TOP)
        asked = flag("logprobs", own.pop("logprobs", False))
        if top and not asked:
            raise InvalidInputError(f"top_logprobs={top} without logprobs=true")
        own |= {"logprobs": top} if asked else {}
    return own_names(own)


def _prompt_of(prompt: Any) -> Any:
    if prompt is None or prompt == [] or isinstance(prompt, Mapping):
        raise wrong("prompt", prompt, "give a text, token ids, or a list of these")
    return prompt


def chat_of(messages: Any, template: Fields) -> Sequence[Any]:
    """The messages of a body as templates read them: texts, and tool calls with arguments that are objects.

    template: options of the chat template in the body. Raises InvalidInputError: something that is not served.
    """
    if not isinstance(messages, list) or not messages or not all(isinstance(turn, Mapping) for turn in messages):
        raise InvalidInputError("messages: give a list of objects with role and content")
    found = [{**chats.with_tool_calls(turn), "content": _text_of(turn)} for turn in messages]
    return chats.with_options(found, template)


def _text_of(turn: Fields) -> str:
    """Of a message's content: a text, parts that are texts, or null of an assistant without an answer."""
    content = turn.get("content")
    content = "" if content is None and turn.get("role") == "assistant" else content
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InvalidInputError(f"messages: content={short(content)}: give a text")
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidInputError(f"messages: only text is served, not {short(part)}")
    return "".join(part["text"] for part in parts)


def response_of(
    done: Sequence[Completion], tokenizer: Any, chat: bool, use: ToolUse = PLAIN, stops: Sequence[str] = ()
) -> Json:
    """`choices` and `usage` of all completions of a request, in order. use: of `tools_of`. stops: its stop strings."""
    choices = []
    for index, one in enumerate(done):
        message = {"role": "assistant", "content": one.text}
        if use.format is not None:
            reader = AnswerReader(use, tokenizer, one.prompt_token_ids, stops)
            message = message_of(reader.read(one.token_ids, last=True))
        text = {"message": message} if chat else {"text": one.text}
        found = told(Pieces(Vocabulary(tokenizer)), one.logprobs, chat)
        choices.append({"index": index, **text, "logprobs": found, **_end_of(one, "tool_calls" in message)})
    return {"object": _CHAT if chat else _TEXT, "choices": choices, "usage": usage_of(done)}


async def events(
    stream: Any,
    tokenizer: Any,
    head: Fields,
    chat: bool,
    counted: bool,
    use: ToolUse = PLAIN,
    stops: Sequence[str] = (),
    note: Callable[[Any], object] = lambda found: None,
) -> AsyncIterator[str]:
    """Server-sent events of an `AsyncStream`: `choices` of each update, an error of requests, and, if `counted`,
    `usage`. Those that are there at once are one text. use: of `tools_of`. stops: the request's stop strings. note:
    called with each update and error."""
    begin = f"data: {_encode({**head, 'object': _CHUNK if chat else _TEXT})[:-1]},"
    choices = _choices(stream, tokenizer, chat, use, stops)
    done = []
    try:
        async for first in stream:
            text = ""
            for update in (first, *stream.unread()):
                note(update)
                for choice in choices(update):
                    text += f'{begin}"choices":[{_encode(choice)}]}}\n\n'
                done += [] if update.completion is None else [update.completion]
            if text:
                yield text
    except SpecdecError as error:
        note(error)
        yield f"{begin}{_encode(error_of(error)[1])[1:]}\n\n"
    if counted:
        yield f"{begin}{_encode({'choices': [], 'usage': usage_of(done)})[1:]}\n\n"
    yield "data: [DONE]\n\n"


def _choices(
    stream: Any, tokenizer: Any, chat: bool, use: ToolUse, stops: Sequence[str]
) -> Callable[[StreamUpdate], list[Json]]:
    """What makes the `choices` of each update of a stream: one, or one for each delta of its tool calls and
    reasoning."""
    known = {}  # what has come of each completion so far

    def of(update: StreamUpdate) -> list[Json]:
        at = update.index
        first = {"role": "assistant"} if at not in known else {}
        if at not in known:
            own = None if use.format is None else AnswerReader(use, tokenizer, stream.prompts[at], stops)
            known[at] = Pieces(Vocabulary(tokenizer)), own
        pieces, reader = known[at]
        logprobs = told(pieces, update.logprobs, chat)
        each = [{"content": update.text}]
        if reader is not None:
            each = deltas(reader.read(update.token_ids, update.completion is not None)) or [Json()]
        has_calls = reader is not None and reader.num_calls > 0
        last = len(each) - 1
        return [
            {
                "index": at,
                **({"delta": delta} if chat else {"text": update.text}),
                "logprobs": logprobs if place == 0 else None,
                **_end_of(update.completion if place == last else None, has_calls),
            }
            for place, delta in enumerate([{**first, **each[0]}, *each[1:]])
        ]

    return of


def head_of(name: str, chat: bool) -> Json:
    """What every part of an answer of the model that is called `name` begins with."""
    return {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}


def usage_of(done: Sequence[Completion]) -> Json:
    """Tokens of completions; each prompt counts once. Accepted and rejected drafts are OpenAI's predictions."""
    rounds = pool_requests([one.stats for one in done])
    prompt = sum(len(one.prompt_token_ids) for one in done if not one.sample_index)
    new = sum(len(one.token_ids) for one in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.stats.cached_tokens for one in done)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": rounds.accepted,
            "rejected_prediction_tokens": rounds.drafted - rounds.accepted,
        },
    }


def error_of(error: BaseException) -> tuple[int, Json]:
    """The status of an answer to a request that failed by this error, and its body."""
    status = getattr(error, "status_code", None)  # of Starlette
    message = str(getattr(error, "detail", error))
    if status is None:
        status = next((own for kind, own in _STATUS.items() if isinstance(error, kind)), 500)
        if isinstance(error, RecursionError):
            message = f"the body is nested too deeply ({error})"
        elif not isinstance(error, SpecdecError):
            message = "the server failed; its log says why"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _end_of(done: Completion | None, has_calls: bool = False) -> Json:
    """OpenAI has no reasons for a time limit and a cancelled request: they are in `stop_reason`."""
    if done is None:
        return {"finish_reason": None}
    reason = "stop" if done.finish_reason in ("eos", "stop") else "length"
    reason = "tool_calls" if has_calls and reason == "stop" else reason
    return {"finish_reason": reason, "stop_reason": done.finish_reason}


class Piece(NamedTuple):
    """A token in a text. text: as it is written, "bytes:…" where it is no text by itself. data: its bytes in the text,
    none of a special token. offset: characters of the text before it."""

    text: str
    data: bytes
    offset: int


class Pieces:
    """A completion's tokens as pieces of its text, one after the other."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0
        self._is_first = True

    def at_end(self, token_id: int) -> Piece:
        """A token as the next one, which is not added."""
        data, special = self._vocabulary.written(token_id, self._is_first)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return Piece(text, b"" if special else data, self._length)

    def add(self, token_id: int) -> Piece:
        """Add the next token."""
        found = self.at_end(token_id)
        self._is_first = self._is_first and self._vocabulary.written(token_id)[1]
        self._length += len(self._utf8.decode(found.data))
        return found


def told(pieces: Pieces, logprobs: Sequence[TokenLogprobs] | None, chat: bool) -> Json | None:
    """Log-probabilities of tokens in the form of a chat completion, or of a completion; None where none were requested.

    The bytes of all tokens are those of the text. pieces: those of the tokens before, to which these are added.
    """
    if logprobs is None:
        return None
    content = []
    offsets = []
    by_text = []
    for one in logprobs:
        top = [_entry(pieces.at_end(token_id), logprob) for token_id, logprob in one.top]
        piece = pieces.add(one.token_id)
        content.append(_entry(piece, one.logprob) | {"top_logprobs": top})
        offsets.append(piece.offset)
        by_text.append(_by_text(one, content[-1]))
    if chat:
        return {"content": content}
    return {
        "tokens": [own["token"] for own in content],
        "token_logprobs": [own["logprob"] for own in content],
        "top_logprobs": by_text if any(by_text) else None,
        "text_offset": offsets,
    }


def _entry(piece: Piece, logprob: float) -> Json:
    return {"token": piece.text, "logprob": max(logprob, LEAST), "bytes": list(piece.data)}


def _by_text(one: TokenLogprobs, own: Fields) -> dict[str, float]:
    """Alternatives of a token, and the token itself, by their texts; of equal texts those after the first have names
    with their ids."""
    found = {}
    for (token_id, _), each in zip(one.top, own["top_logprobs"], strict=True):
        is_taken = each["token"] in found or (each["token"] == own["token"] and token_id != one.token_id)
        found[f"token_id:{token_id}" if is_taken else each["token"]] = each["logprob"]
    return {**found, own["token"]: own["logprob"]} if found else found
