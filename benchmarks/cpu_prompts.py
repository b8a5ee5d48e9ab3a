"""Prompts of bench_cpu by category, as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
OF_ITS_OWN = ("translation", "summarization", "qa", "math_reasoning", "rag")
CONVERSATION = "mt_bench"
"""Spec-Bench's sixth category: the eight of MT-bench, of which each question names its own."""


def category(own: str) -> str:
    """Spec-Bench's category of a question."""
    return own if own in OF_ITS_OWN else CONVERSATION


def chosen(data: Path, count: int) -> dict[str, list[str]]:
    """The first turns of so many questions of each category: the first ones, of MT-bench the first of each of its own
    categories, then the second of each, and so on."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in data.read_text("utf-8").splitlines():
        question = json.loads(line)
        own = question["category"]
        found.setdefault(category(own), {}).setdefault(own, []).append(question["turns"][0])
    return {name: in_turn(list(kinds.values()))[:count] for name, kinds in found.items()}


def in_turn(lists: list[list[Any]]) -> list[Any]:
    """The first of each list, then the second of each.

    >>> in_turn([[1, 2, 3], [4]])
    [1, 4, 2, 3]
    """
    return [each for each in chain.from_iterable(zip_longest(*lists)) if each is not None]


def encoded(tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
    """A chat by the tokenizer's template, up to where the answer begins."""
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])


def asked(tokenizer: Any, text: str) -> list[int]:
    """A chat of one message."""
    return encoded(tokenizer, [{"role": "user", "content": text}])


def quoting(tokenizer: Any, texts: list[str], answer: Callable[[list[int]], list[int]]) -> Prompts:
    """Chats in which the same is asked once more, behind the answer, which then stands in the prompt."""
    found = []
    for text in texts:
        said = tokenizer.decode(answer(asked(tokenizer, text)), skip_special_tokens=True)
        roles = (("user", text), ("assistant", said), ("user", text))
        found.append(encoded(tokenizer, [{"role": role, "content": content} for role, content in roles]))
    return found
