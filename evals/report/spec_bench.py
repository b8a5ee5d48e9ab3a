"""Answer files in the schema of Spec-Bench and EAGLE, so that their own scripts read them.

Source: hemingkx/Spec-Bench evaluation/eval.py, speed.py; SafeAILab/EAGLE eagle/evaluation/speed.py. Counted as there:
`new_tokens` and `accept_lengths` are accepted drafts + 1 a round, drafts after a stop included; `idxs` is rounds - 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from evals.runs.answers import Answer, Json, Turn
from specdec.run_files import write_atomically


def line(answer: Answer, model_id: str) -> Json:
    """One line of an answer file."""
    turns = answer.turns
    choice = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        "decoding_steps": [len(turn.rounds) for turn in turns],
        "idxs": [len(turn.rounds) - 1 for turn in turns],
        "new_tokens": [sum(_lengths(turn)) for turn in turns],
        "wall_time": [turn.wall_s for turn in turns],
        "accept_lengths": [length for turn in turns for length in _lengths(turn)],
    }
    return {
        "question_id": int(answer.question_id) if answer.question_id.isdigit() else answer.question_id,
        "category": answer.category,
        "answer_id": f"{answer.question_id}-{answer.arm}",
        "model_id": model_id,
        "choices": [choice],
        "tstamp": 0.0,
    }


def write(folder: Path, answers: Sequence[Answer], model_id: str) -> list[Path]:
    """Write one file a configuration into `folder` and return their paths. Answers with an error are left out."""
    paths = []
    for arm in dict.fromkeys(answer.arm for answer in answers):
        own = [line(a, f"{model_id}-{arm}") for a in answers if a.arm == arm and a.error is None]
        path = folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', arm).strip('-').lower()}.jsonl"
        write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in own))
        paths.append(path)
    return paths


def _lengths(turn: Turn) -> list[int]:
    return [record.accepted + 1 for record in turn.rounds]
