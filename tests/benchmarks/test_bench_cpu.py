"""What bench_cpu compares: the prompts of each category, and ratios turn by turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.bench_cpu import prompts, ratio, timed


class Tokenizer:
    def apply_chat_template(self, chat: Any, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": list(chat[0]["content"].encode())}


def test_prompts_are_the_first_of_each_category(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    asked = [("qa", "a"), ("math", "b"), ("qa", "c"), ("qa", "d"), ("other", "e")]
    file.write_text("\n".join(json.dumps({"category": kind, "turns": [text, "more"]}) for kind, text in asked))
    assert prompts(file, ["qa", "math"], 2, Tokenizer()) == {"qa": [[97], [99]], "math": [[98]]}


def test_ratios_are_of_one_turn() -> None:
    assert ratio([1.0, 4.0, 9.0], [2.0, 4.0, 6.0]) == 1.0
    wall, cpu, answers = timed(lambda ids: ids[::-1], [[1, 2], [3]])
    assert answers == [[2, 1], [3]] and wall >= 0 and cpu >= 0
