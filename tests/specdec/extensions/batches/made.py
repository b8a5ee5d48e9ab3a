"""Answers that no model has made, for tests of what stands around one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specdec.extensions.batches.lines import Line
from specdec.extensions.batches.records import Record, TaskResult, record_of
from specdec.extensions.batches.tasks import TaskDefaults, task_of
from tests.specdec.extensions.completions import completion


def echoed(lines: Iterable[Line]) -> Iterator[Record]:
    """As a model that says its seed, which tells a row from every other."""
    for line in lines:
        task = task_of(line, TaskDefaults())
        done = () if task.error else (completion(str(task.params.seed)),)
        yield record_of(TaskResult(task, done, task.error), None)


def write(path: Path, *rows: Any) -> Path:
    """A file of rows; bytes as they are, anything else as JSON."""
    path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, in its order."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]
