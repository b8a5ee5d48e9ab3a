"""OpenAI's format: bodies of requests to prompts and parameters, completions and updates to bodies of answers.

What does not change what is generated (`user`, `metadata`, …) is ignored; what is not served (tools) is refused.
Beside OpenAI's, every option of `SamplingParams` may be given by its name (`top_k`, `repetition_penalty`, `max_time`).

Source: OpenAI API reference, "Create chat completion", "Create completion", "Error codes".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from specdec.engine.streams import StreamUpdate
from specdec.errors import ClosedModelError, DrainingError, InvalidInputError, QueueFullError, SpecdecError
from specdec.requests.logprobs import TokenLogprobs
from specdec.requests.request import Completion
from specdec.requests.sampling import SamplingParams
from specdec.service.asynchronous import AsyncStream
from specdec.values import short

_TOOLS = ("tools", "tool_choice", "functions", "function_call")
_LEAST = -9999.0
"""The log-probability of what cannot come: JSON has no -inf. Source: OpenAI API reference, "top_logprobs"."""
_UNTOLD = ("return_logits", "return_scores", "return_drafts", "prompt_logprobs", "prompt_logprobs_start")
"""Options whose results have no place in an answer."""
_ELSEWHERE = (
    *("model", "messages", "prompt", "stream", "stream_options", "user", "metadata", "store", "service_tier"),
    *("safety_identifier", "prompt_cache_key", "parallel_tool_calls", *_TOOLS),
)
_NAMES = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens"),
    "min_tokens": "min_new_tokens",
    "response_format": "grammar",
}
_CHAT, _CHUNK, _TEXT = "chat.completion", "chat.completion.chunk", "text_completion"
_STATUS = {InvalidInputError: 400, QueueFullError: 429, DrainingError: 503, ClosedModelError: 503}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def request_of(body: Mapping[str, Any], chat: bool) -> tuple[Any, SamplingParams]:
    """Prompts and parameters of the body of a chat completion, or of a completion.

    Raises:
        InvalidInputError: something that is not served, or a value that is not allowed.
    """
    if used := [name for name in _TOOLS if body.get(name) not in (None, [], "none")]:
        raise InvalidInputError(
            f"{', '.join(used)}: tools are not served; describe them in a message, and give response_format"
        )
    if used := [name for name in _UNTOLD if name in body]:
        raise InvalidInputError(f"{', '.join(used)}: an answer in OpenAI's format has no place for it")
    own = {_NAMES.get(n, n): value for n, value in body.items() if n not in _ELSEWHERE and value is not None}
    if chat:
        own["logprobs"] = _alternatives(own.pop("logprobs", False), own.pop("top_logprobs", None))
    if isinstance(bias := own.get("logit_bias"), Mapping):
        own["logit_bias"] = {int(t) if isinstance(t, str) and t.isdecimal() else t: each for t, each in bias.items()}
    params = SamplingParams.from_dict({"temperature": 1.0, **own})
    return _chat_of(body.get("messages")) if chat else _prompt_of(body.get("prompt")), params


def _alternatives(logprobs: Any, top: Any) -> Any:
    """Of a chat: a flag, and how many alternatives."""
    if top is not None and not logprobs:
        raise InvalidInputError(f"top_logprobs={short(top)} without logprobs=true")
    return (top or 0) if logprobs else None


def _prompt_of(prompt: Any) -> Any:
    if prompt is None or isinstance(prompt, Mapping):
        raise InvalidInputError("prompt: give a text, token ids, or a list of these")
    return prompt


def _chat_of(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages or not all(isinstance(turn, Mapping) for turn in messages):
        raise InvalidInputError("messages: give a list of objects with role and content")
    return [{**turn, "content": _text_of(turn.get("content"))} for turn in messages]


def _text_of(content: Any) -> str:
    """Of a message's content: a text, or parts that are texts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InvalidInputError(f"messages: content={short(content)}: give a text")
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidInputError(f"messages: only text is served, not {short(part)}")
    return "".join(part["text"] for part in parts)


def response_of(done: Sequence[Completion], tokenizer: Any, chat: bool) -> dict[str, Any]:
    """`choices` and `usage` of all completions of a request, in order."""
    choices = []
    for index, one in enumerate(done):
        text = {"message": {"role": "assistant", "content": one.text}} if chat else {"text": one.text}
        choices.append({"index": index, **text, "logprobs": _told(tokenizer, one.logprobs, chat), **_end_of(one)})
    return {"object": _CHAT if chat else _TEXT, "choices": choices, "usage": usage_of(done)}


async def chunks(stream: AsyncStream, tokenizer: Any, chat: bool, counted: bool) -> AsyncIterator[dict[str, Any]]:
    """`choices` of each update of a stream, then, if `counted`, one of `usage`; an error of requests is the last."""
    begun, done = set[int](), []
    try:
        async for update in stream:
            yield _chunk(update, tokenizer, chat, update.index not in begun)
            begun.add(update.index)
            done += [] if update.completion is None else [update.completion]
    except SpecdecError as error:
        yield error_of(error)[1]
    if counted:
        yield {"object": _CHUNK if chat else _TEXT, "choices": [], "usage": usage_of(done)}


def _chunk(update: StreamUpdate, tokenizer: Any, chat: bool, first: bool) -> dict[str, Any]:
    delta = {"content": update.text} | ({"role": "assistant"} if first else {})
    text = {"delta": delta} if chat else {"text": update.text}
    choice = {"index": update.index, **text, "logprobs": _told(tokenizer, update.logprobs, chat)}
    return {"object": _CHUNK if chat else _TEXT, "choices": [choice | _end_of(update.completion)]}


def usage_of(done: Sequence[Completion]) -> dict[str, Any]:
    """Tokens of completions; each prompt counts once. Accepted and rejected drafts are OpenAI's predictions."""
    rounds = [one.pooled for one in done]
    accepted, drafted = sum(own.accepted for own in rounds), sum(own.drafted for own in rounds)
    prompt = sum(len(one.prompt_token_ids) for one in done if not one.sample_index)
    new = sum(len(one.token_ids) for one in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.stats.cached_tokens for one in done)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def error_of(error: BaseException) -> tuple[int, dict[str, Any]]:
    """The status of an answer to a request that failed by this error, and its body."""
    status = next((own for kind, own in _STATUS.items() if isinstance(error, kind)), 500)
    return status, error_body(status, str(error))


def error_body(status: int, message: str) -> dict[str, Any]:
    """The body of an answer with this status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _end_of(done: Completion | None) -> dict[str, Any]:
    """OpenAI has no reasons for a time limit and a cancelled request: they are in `stop_reason`."""
    if done is None:
        return {"finish_reason": None}
    reason = "stop" if done.finish_reason in ("eos", "stop") else "length"
    return {"finish_reason": reason, "stop_reason": done.finish_reason}


def _told(tokenizer: Any, logprobs: Sequence[TokenLogprobs] | None, chat: bool) -> dict[str, Any] | None:
    """Log-probabilities of tokens in the form of a chat completion, or of a completion; None where none were asked."""
    if logprobs is None:
        return None

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(text.encode())}

    each = [(entry(one.token_id, one.logprob), [entry(*top) for top in one.top]) for one in logprobs]
    if chat:
        return {"content": [own | {"top_logprobs": top} for own, top in each]}
    return {
        "tokens": [own["token"] for own, _ in each],
        "token_logprobs": [own["logprob"] for own, _ in each],
        "top_logprobs": [{one["token"]: one["logprob"] for one in top} for _, top in each],
    }
