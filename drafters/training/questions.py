"""Questions to train on: a JSONL file whose lines have `messages`, `prompt` or `question`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attention.errors import InvalidInputError

Message = dict[str, str]


def read_questions(path: str | Path) -> list[list[Message]]:
    """Read conversations that end with the user's turn; the answers are left to the target.

    A line holds `messages` (a chat; assistant turns at its end are dropped), or `prompt` or `question` (one user turn).

    Returns:
        One list of {"role", "content"} per line.

    Raises:
        InvalidInputError: the file is missing, empty or no UTF-8 text, or a line (named by its number) is none of
            these.
    """
    file = Path(path)
    if not file.is_file():
        raise InvalidInputError(f"there is no file of questions {path}")
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # not splitlines: a string may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"the questions in {path} cannot be read as UTF-8 text: {error}") from error
    questions = [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise InvalidInputError(f"{path} has no questions")
    return questions


def _parse(line: str, place: str) -> list[Message]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidInputError(f"{place}: no JSON: {error}") from error
    keys = [key for key in ("messages", "prompt", "question") if isinstance(row, dict) and key in row]
    if not keys:
        raise InvalidInputError(f"{place}: expected an object with messages, prompt or question")
    return _messages(row[keys[0]], place)


def _messages(content: Any, place: str) -> list[Message]:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise InvalidInputError(f"{place}: messages must be texts with role and content")
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise InvalidInputError(f"{place}: there is no user's turn to answer")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
