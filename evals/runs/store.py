"""A run on disk, which can be continued after an interruption, and the provenance of its numbers.

RUN/settings.json     what the run depends on
RUN/answers.jsonl     one line an answer, with the hash of those settings
RUN/.lock             held by the one process that may write
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from pathlib import Path, PurePath

from attention.errors import named_error
from evals.data.datasets import DataSet, digest
from evals.errors import RunStoreError
from evals.runs.answers import Answer, Json, from_json, to_json
from specdec.import_names import version_of
from specdec.run_files import KeptLines, writing
from specdec.values import without

_PACKAGES = ("specdec-hf", "torch", "transformers", "tokenizers", "flashinfer-python", "lm_eval")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that affect the numbers; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}}


def device_name(device: str) -> str:
    """The name of the processor that a torch device is."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    return platform.machine()


def data_facts(data: DataSet) -> Json:
    """Name, source, hash and the number of questions."""
    return {"name": data.name, "source": data.source, "sha256": data.sha256, "questions": len(data.questions)}


def model_facts(facts: Json) -> Json:
    """A model's facts as they may be published: a folder is reduced to its name, and nothing measured is among them."""
    target = str(facts["target"])
    device = str(facts["device"])
    shown = PurePath(target).name if PurePath(target).is_absolute() else target
    fixed = without(facts, ("self_test_error",))
    return {**fixed, "target": shown, "device_name": device_name(device)}


LOCK = ".lock"
_REMEDY = "use another --run-dir"


class RunStore(KeptLines):
    """The answers of one run, in a folder of its own.

    key: hash of the settings; answers: by (question id, configuration), read at opening.
    """

    error = RunStoreError
    remedy = _REMEDY
    lost = "its questions are asked again"

    def __init__(self, folder: Path, settings: Json) -> None:
        """Open or create `folder`.

        Raises:
            RunStoreError: another run has the folder open, it belongs to other settings, or it is damaged.
            OutputError: it cannot be written.
        """
        self.folder = folder
        self.key = digest(settings)
        self.answers: dict[tuple[str, str], Answer] = {}
        kept = folder / "settings.json"
        if folder.exists() and not folder.is_dir():
            raise RunStoreError(f"{folder} is not a folder; {_REMEDY}")
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        others = (path for path in folder.iterdir() if path.name != LOCK and not path.name.endswith(".partial"))
        if not kept.is_file() and any(others):
            raise RunStoreError(f"{folder} is not empty and holds no run; {_REMEDY}")
        super().__init__(folder / "answers.jsonl", folder / LOCK, (kept, settings), shown=folder)

    def add(self, answers: Iterable[Answer]) -> None:
        """Append answers.

        Raises:
            OutputError: they cannot be written; earlier ones stay readable.
        """
        answers = list(answers)
        lines = [json.dumps({"key": self.key, "answer": to_json(answer)}, ensure_ascii=False) for answer in answers]
        self.write("".join(line + "\n" for line in lines).encode())
        self.answers.update({(answer.question_id, answer.arm): answer for answer in answers})

    def finished(self, question_id: str, arms: Iterable[str]) -> bool:
        """Whether a question has an answer, without error, under every one of `arms`."""
        found = (self.answers.get((question_id, arm)) for arm in arms)
        return all(answer is not None and answer.error is None for answer in found)

    def take(self, line: bytes, place: str) -> None:
        """Read an answer."""
        try:
            record = json.loads(line)
            answer = from_json(record["answer"])
            key = record["key"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunStoreError(f"{place}: damaged ({named_error(error)}); {_REMEDY}") from error
        if key != self.key:
            raise RunStoreError(f"{place}: belongs to other settings; {_REMEDY}")
        self.answers[answer.question_id, answer.arm] = answer
