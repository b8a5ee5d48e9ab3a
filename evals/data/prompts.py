"""From a conversation to prompt token ids: the chat template, or plain text when there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from evals.data.datasets import Question
from specdec.errors import InvalidInputError
from specdec.user_warnings import warn_user

NO_TEMPLATE = (
    "the tokenizer has no chat template: prompts are sent as plain text. A head trained on templated conversations "
    "accepts fewer drafts on such prompts, so acceptance measured here is not comparable with templated runs"
)


def warn_without_template() -> None:
    """Warn that prompts go out as plain text, and what that costs."""
    warn_user(NO_TEMPLATE)


def opening(question: Question, system: str | None) -> list[dict[str, str]]:
    """The messages before the first turn: the system prompt, then the question's own history."""
    start = [{"role": "system", "content": system}] if system else []
    return start + [{"role": role, "content": content} for role, content in question.history]


def render(tokenizer: Any, messages: Sequence[dict[str, str]], templated: bool) -> list[int]:
    """Prompt token ids of a conversation that ends with a user message.

    Without a template the contents are joined by blank lines.

    Raises:
        InvalidInputError: the chat template refuses the conversation.
    """
    if not templated:
        return list(tokenizer("\n\n".join(m["content"] for m in messages))["input_ids"])
    try:
        ids = tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
        )
    except TemplateError as error:
        roles = ", ".join(m["role"] for m in messages)
        raise InvalidInputError(f"the chat template refuses a conversation with the roles {roles}: {error}") from error
    return list(ids)
