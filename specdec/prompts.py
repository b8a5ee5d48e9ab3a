"""What a caller may give as prompts, turned into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.chat import chat_ids
from specdec.errors import InvalidInputError

Prompts = Any
"""str | list[int] | list of chat messages (dicts) | a list of any of these."""


def encode_prompts(prompts: Prompts, tokenizer: Any) -> list[list[int]]:
    """Token ids of every prompt.

    A str is tokenised as `tokenizer(text)` does; a list of {"role", "content"} messages goes through the chat template
    with a generation prompt; a list of int is taken as it is.

    Raises:
        InvalidInputError: an empty list, an unknown kind of prompt, or messages without a chat template.
    """
    return [_encode(p, tokenizer) for p in split_prompts(prompts)]


def split_prompts(prompts: Prompts) -> list[Any]:
    """One prompt or many -> a list of prompts.

    Raises:
        InvalidInputError: there is no prompt.
    """
    if isinstance(prompts, str) or _is_ids(prompts) or _is_chat(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence) or not len(prompts):
        raise InvalidInputError(f"no prompts in {prompts!r}; give a str, token ids, chat messages, or a list of these")
    return list(prompts)


def _encode(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidInputError("the prompt is empty; at least one token is needed")
        return list(tokenizer(prompt)["input_ids"])
    if _is_ids(prompt):
        return [int(t) for t in prompt]
    if _is_chat(prompt):
        return chat_ids(prompt, tokenizer)
    raise InvalidInputError(
        f"a prompt is a str, a list of token ids or a list of chat messages, not {type(prompt).__name__}"
    )


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and all(_is_int(t) for t in prompt)


def _is_int(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and all(isinstance(m, dict) for m in prompt)
    )
