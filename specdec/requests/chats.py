"""Chats: messages, and options of the template that writes them, to token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from jinja2 import TemplateError

from attention.errors import named_error
from specdec.errors import InvalidInputError
from specdec.values import Fields, Json, Options, flag, refuse, short, without_none

Messages = Sequence[Any]
_NOT_VARIABLES = {
    *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "tokenizer", "self", "split_special_tokens", "sanitize_control_tokens"),
}
"""Arguments of `apply_chat_template` that are no variables of a template, or are chosen elsewhere."""
_TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""Exceptions of a chat template: jinja's own, and those of its expressions on unexpected values."""

_MEDIA = re.compile(r"(input_)?(image|video|audio|file)(_url)?")
"""Names of message parts that are no text, by their type or by the field that holds them."""


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


_LISTS = (
    ("tools", (_is_object, callable), "functions, or of dicts of their JSON schemas"),
    ("documents", (_is_object,), "dicts, such as of title and text"),
)
"""Options of a chat that are lists: their name, what may be in them, and in words."""


class Chat(list[Any]):
    """Messages with options of their own. options: arguments of the tokenizer's `apply_chat_template`."""

    options: Options


def with_options(messages: Messages, given: Fields) -> Messages:
    """The messages with these of the `CHAT_OPTIONS`; as they are where none is set.

    continue_final_message: the model goes on with the last message (or with this field of it), which stays open.
    chat_template_kwargs: variables of the template (`enable_thinking`, …). tools: functions, or their schemas.
    documents: dicts, such as of "title" and "text". chat_template: in place of the tokenizer's, or the name of one of
    its templates. split_special_tokens: only the template writes special tokens; in messages they are text.

    Raises:
        InvalidInputError: a value that is not allowed, or both a message that is continued and one that begins.
    """
    own = without_none(given)
    if not own:
        return messages
    continued = own.get("continue_final_message", False)
    if not isinstance(continued, str) or continued not in messages[-1]:
        continued = flag("continue_final_message", continued)
    begun = flag("add_generation_prompt", own.get("add_generation_prompt", not continued))
    if continued and begun:
        raise InvalidInputError(
            "continue_final_message=True and add_generation_prompt=True: either the last message goes on, or another "
            "one begins; leave add_generation_prompt out"
        )
    variables = own.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise refuse("chat_template_kwargs", variables, "a dict of variables by name")
    if odd := sorted(_NOT_VARIABLES & set(variables)):
        raise InvalidInputError(f"chat_template_kwargs has {', '.join(odd)}: allowed are variables of the template")
    chat = Chat(messages)
    chat.options = {**variables, **_arguments(own), "add_generation_prompt": begun}
    chat.options |= {"continue_final_message": continued} if continued else {}
    return chat


def _arguments(own: Json) -> Json:
    """Options of a chat that are arguments of `apply_chat_template`, checked; empty lists are left out."""
    found = Options()
    for name, kinds, allowed in _LISTS:
        each = own.get(name, [])
        if not isinstance(each, (list, tuple)) or not all(any(kind(one) for kind in kinds) for one in each):
            raise refuse(name, each, f"a list of {allowed}")
        found |= {name: list(each)} if each else {}
    if "chat_template" in own:
        if not isinstance(own["chat_template"], str) or not own["chat_template"]:
            raise refuse("chat_template", own["chat_template"], "a jinja template, a str")
        found["chat_template"] = own["chat_template"]
    if flag("split_special_tokens", own.get("split_special_tokens", False)):
        found["sanitize_control_tokens"] = True
    return found


def with_tool_calls(message: Json) -> Json:
    """A message of OpenAI's form as templates read it: arguments of its tool calls are objects, not their JSON.

    Arguments that a model wrote wrong stay text: a conversation goes on with the tool's complaint about them.

    Raises:
        InvalidInputError: tool calls of another form, or arguments that are neither an object nor text.
    """
    calls = message.get("tool_calls")
    each = calls if isinstance(calls, list) else [calls]
    return dict(message) if calls is None else {**message, "tool_calls": [_read_call(call) for call in each]}


def _read_call(call: Any) -> Json:
    try:
        function = {"arguments": {}, **call["function"]}
        given = function["arguments"] or "{}"  # a call without arguments may have "" or null
        read = _object_in(given) if isinstance(given, str) else {**given}
        function |= {"name": function["name"], "arguments": read}
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"messages: tool call {short(call)}: a function with a name, and arguments that are a JSON object, is "
            f"needed ({named_error(error)})"
        ) from None
    return {**call, "function": function}


def _object_in(text: str) -> Any:
    """The JSON object that a text is, or the text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def chat_ids(messages: Messages, tokenizer: Any) -> list[int]:
    """Token ids of a conversation, with a generation prompt, or as the options of a `Chat` have it.

    Args:
        messages: {"role": str, "content": str, or a list of parts for a template that reads parts}, at least one.

    Raises:
        InvalidInputError: the tokenizer has no template, a message is no message or has an image in it, or the template
            refuses them.
    """
    return list(_written(messages, tokenizer, return_dict=True)["input_ids"])


def chat_text(messages: Messages, tokenizer: Any) -> str:
    """The text that `chat_ids` tokenises. Raises likewise."""
    return str(_written(messages, tokenizer, tokenize=False))


def _written(messages: Messages, tokenizer: Any, **form: Any) -> Any:
    """The messages through the template. form: arguments of `apply_chat_template`."""
    options = messages.options if isinstance(messages, Chat) else {"add_generation_prompt": True}
    template = options.get("chat_template") or getattr(tokenizer, "chat_template", None)
    if not template:
        raise InvalidInputError(
            "chat messages were given, but the tokenizer has no chat template; give text instead, or chat_template=…"
        )
    for number, message in enumerate(messages, 1):
        _check(number, message)
    name = "sanitize_control_tokens"  # without such an argument it would go to the template as a variable
    if name in options and name not in signature(tokenizer.apply_chat_template).parameters:
        raise InvalidInputError(
            "split_special_tokens=True: this transformers, or this tokenizer, has no apply_chat_template with "
            "sanitize_control_tokens; update transformers (5.24 has it), or leave it out"
        )
    try:
        return tokenizer.apply_chat_template(for_template(messages, tokenizer, template), **form, **options)
    except _TEMPLATE_ERRORS as error:
        odd = [f"{i}, {short(one)}," for i, one in enumerate(messages, 1) if not _is_unicode(one)]
        if odd:
            raise InvalidInputError(f"chat message {odd[0]} is not valid Unicode: half a surrogate pair") from error
        raise InvalidInputError(
            f"the chat template refuses these {len(messages)} messages "
            f"({named_error(error)}); change the messages, or give text"
        ) from error


def prompts_in(value: Any) -> Sequence[Any]:
    """What a list or tuple holds, unless it is empty or of token ids; of any other value nothing."""
    return value if isinstance(value, (list, tuple)) and value and not isinstance(value[0], int) else ()


def num_characters(value: Any) -> int:
    """Of all texts in prompts, in messages and in the options of a `Chat`: names, tool calls, schemas of tools."""
    if isinstance(value, str):
        return len(value)
    each = [*value, *value.values()] if isinstance(value, Mapping) else prompts_in(value)
    own = num_characters(value.options) if isinstance(value, Chat) else 0
    return own + sum(map(num_characters, each))


def _is_unicode(message: Any) -> bool:
    try:
        json.dumps(message, ensure_ascii=False, default=repr).encode()
    except UnicodeEncodeError:
        return False
    return True


def for_template(messages: Messages, tokenizer: Any, template: Any = None) -> list[Any]:
    """The messages as a template (default: the tokenizer's) reads them: texts in parts where it passes over a str."""
    template = template or getattr(tokenizer, "chat_template", None)
    return [_in_parts(message) for message in messages] if _reads_parts_only(tokenizer, template) else list(messages)


_PROBE = "Anna"
_parts_only: dict[str, bool] = {}
"""Results of `_reads_parts_only`, by template."""
_MOST_KNOWN = 256


def _reads_parts_only(tokenizer: Any, template: Any) -> bool:
    """Whether a template reads texts in parts and passes over a plain str, as many do of models that read images too.

    (`content | selectattr("type", …)` on a str selects none of its letters: the text disappears without an error.)
    """
    if not isinstance(template, str) or "{" not in template:  # several by name, or the name of one
        return False
    if template not in _parts_only:
        plain = {"role": "user", "content": _PROBE}
        own = {} if template == getattr(tokenizer, "chat_template", None) else {"chat_template": template}
        shown = [_shows(tokenizer, message, own) for message in (plain, _in_parts(plain))]
        if len(_parts_only) >= _MOST_KNOWN:
            _parts_only.clear()
        _parts_only[template] = shown == [False, True]
    return _parts_only[template]


def _shows(tokenizer: Any, message: Json, options: Options) -> bool:
    try:
        return _PROBE in tokenizer.apply_chat_template([message], tokenize=False, **options)
    except _TEMPLATE_ERRORS:
        return False


def _in_parts(message: Any) -> Any:
    """A message whose text is a list of one part."""
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


def _check(number: int, message: Any) -> None:
    role = message.get("role")
    content = message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidInputError(
            f"chat message {number} has role={short(role)}; every message is a dict with a role (system, user, "
            "assistant, …) and content"
        )
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    called = content is None and "tool_calls" in message
    if not isinstance(content, str) and not parts and not called:
        raise InvalidInputError(
            f"chat message {number} (role {short(role)}) has content={short(content)}; allowed is a str, or a list of "
            "parts (dicts) where the template reads them"
        )
    for part in content if parts else ():
        # A part that is no text, in the form of transformers ({"type": "image", "url": …}) or of OpenAI.
        kind = next(
            (word for word in (part.get("type"), *part) if isinstance(word, str) and _MEDIA.fullmatch(word)), None
        )
        if kind is not None:
            raise InvalidInputError(
                f"chat message {number} has a part of type {kind!r}; only text is served: leave it out, or use the "
                "model's own generate (model.hf_model)"
            )
