"""A run on disk: answers appended as they come, so that an interrupted run is continued and not repeated.

RUN/settings.json     what the run depends on
RUN/answers.jsonl     one line an answer, with the hash of those settings
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evals.data.datasets import digest
from evals.errors import RunStoreError
from evals.runs.answers import Answer, from_json, to_json


class RunStore:
    """The answers of one run. Opened on a folder: a new one, or one of the same settings, which is continued.

    Attributes:
        folder: where it lies; key: hash of the settings; answers: by (question id, arm), read at opening.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Open or create `folder`.

        Raises:
            RunStoreError: the folder belongs to other settings, or a line other than the last is damaged.
        """
        self.folder = folder
        self.key = digest(settings)
        self._path = folder / "answers.jsonl"
        _check_settings(folder, settings)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "settings.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")
        self.answers: dict[tuple[str, str], Answer] = {}
        for answer in self._read():
            self.answers[answer.question_id, answer.arm] = answer

    def add(self, answers: Iterable[Answer]) -> None:
        """Append answers; they are on disk when this returns."""
        answers = list(answers)
        lines = [json.dumps({"key": self.key, "answer": to_json(answer)}, ensure_ascii=False) for answer in answers]
        with self._path.open("ab") as out:
            out.write("".join(line + "\n" for line in lines).encode())
            out.flush()
            os.fsync(out.fileno())
        self.answers.update({(answer.question_id, answer.arm): answer for answer in answers})

    def finished(self, question_id: str, arms: Iterable[str]) -> bool:
        """Whether a question has an answer, without error, under every one of `arms`."""
        found = (self.answers.get((question_id, arm)) for arm in arms)
        return all(answer is not None and answer.error is None for answer in found)

    def _read(self) -> Iterable[Answer]:
        """The answers on disk. A last line that was cut off by a crash is removed."""
        if not self._path.is_file():
            return []
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self._path, whole)
        lines = content[:whole].split(b"\n")[:-1]
        return [self._answer(line, number) for number, line in enumerate(lines, 1)]

    def _answer(self, line: bytes, number: int) -> Answer:
        where = f"{self._path}:{number}"
        try:
            record = json.loads(line)
            answer = from_json(record["answer"])
            key = record["key"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunStoreError(f"{where}: damaged ({error}); remove the folder or use another --run-dir") from error
        if key != self.key:
            raise RunStoreError(f"{where}: belongs to other settings; remove the folder or use another --run-dir")
        return answer


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / "settings.json"
    if not path.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise RunStoreError(f"{folder} is not empty and holds no run; use another --run-dir")
        return
    try:
        earlier = json.loads(path.read_text())
    except ValueError as error:
        raise RunStoreError(f"{path} is damaged ({error}); remove the folder or use another --run-dir") from error
    current = json.loads(json.dumps(settings))
    changed = sorted(k for k in {*earlier, *current} if earlier.get(k) != current.get(k))
    if changed:
        listed = "; ".join(f"{k}: {earlier.get(k)!r} there, {current.get(k)!r} here" for k in changed)
        raise RunStoreError(f"{folder} holds a run with other settings ({listed}); use another --run-dir, or remove it")


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
