"""Prompts of bench_cpu: Spec-Bench's six categories, and questions asked once more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.cpu_prompts import chosen, quoting


class Tokenizer:
    def apply_chat_template(self, chat: Any, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": list("|".join(message["content"] for message in chat).encode())}

    def decode(self, ids: list[int], **options: Any) -> str:
        return bytes(ids).decode()


def test_prompts_are_the_first_of_each_category(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    questions = [("qa", "a"), ("writing", "b"), ("writing", "c"), ("qa", "d"), ("coding", "e"), ("qa", "f")]
    file.write_text("\n".join(json.dumps({"category": kind, "turns": [text, "more"]}) for kind, text in questions))
    assert chosen(file, 2) == {"qa": ["a", "d"], "mt_bench": ["b", "e"]}


def test_a_question_is_asked_again_behind_its_answer() -> None:
    found = quoting(Tokenizer(), ["why", "how"], lambda ids: ids[::-1])
    assert [bytes(ids).decode() for ids in found] == ["why|yhw|why", "how|woh|how"]
