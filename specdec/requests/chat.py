"""Chat messages -> token ids through the tokenizer's template, and what can be wrong with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from specdec.errors import InvalidInputError
from specdec.values import short

_TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""A template is a program: jinja's own errors, and what its expressions raise on values they do not expect."""

_MEDIA = re.compile(r"(input_)?(image|video|audio|file)(_url)?")
"""What a part of a message is called, by its type or by the field that holds it, when it is no text."""


def chat_ids(messages: Sequence[Any], tokenizer: Any) -> list[int]:
    """Token ids of a conversation, with a generation prompt.

    Args:
        messages: {"role": str, "content": str, or a list of parts for a template that reads parts}, at least one.

    Raises:
        InvalidInputError: the tokenizer has no template, a message is no message or has an image in it, or the template
            refuses them.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInputError("chat messages were given, but the tokenizer has no chat template; give text instead")
    for number, message in enumerate(messages, 1):
        _check(number, message)
    try:
        ids = tokenizer.apply_chat_template(
            for_template(messages, tokenizer), add_generation_prompt=True, return_dict=True
        )
        return list(ids["input_ids"])
    except _TEMPLATE_ERRORS as error:
        raise InvalidInputError(
            f"the chat template refuses these {len(messages)} messages "
            f"({type(error).__name__}: {error}); change the messages, or give text"
        ) from error


def for_template(messages: Sequence[Any], tokenizer: Any) -> list[Any]:
    """The messages as the tokenizer's template reads them: texts in parts where it passes over a plain str."""
    return [_in_parts(message) for message in messages] if _reads_parts_only(tokenizer) else list(messages)


_PROBE = "Anna"
_parts_only: dict[str, bool] = {}
"""What `_reads_parts_only` found, by template."""


def _reads_parts_only(tokenizer: Any) -> bool:
    """Whether a template reads texts in parts and passes over a plain str, as many do of models that read images too.

    (`content | selectattr("type", …)` on a str selects none of its letters: the text disappears without an error.)
    """
    template = tokenizer.chat_template
    if not isinstance(template, str):
        return False
    if template not in _parts_only:
        plain = {"role": "user", "content": _PROBE}
        _parts_only[template] = not _shows(tokenizer, plain) and _shows(tokenizer, _in_parts(plain))
    return _parts_only[template]


def _shows(tokenizer: Any, message: dict[str, Any]) -> bool:
    try:
        return _PROBE in tokenizer.apply_chat_template([message], tokenize=False)
    except _TEMPLATE_ERRORS:
        return False


def _in_parts(message: Any) -> Any:
    """A message whose text is a list of one part."""
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


def _check(number: int, message: Any) -> None:
    role, content = message.get("role"), message.get("content")
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
        _check_text(number, part)


def _check_text(number: int, part: Mapping[str, Any]) -> None:
    """Refuse a part that is no text, in the form of transformers ({"type": "image", "url": …}) or of OpenAI."""
    kind = next((word for word in (part.get("type"), *part) if isinstance(word, str) and _MEDIA.fullmatch(word)), None)
    if kind is not None:
        raise InvalidInputError(
            f"chat message {number} has a part of type {kind!r}; only text is served: leave it out, or use the model's "
            "own generate (model.hf_model)"
        )
