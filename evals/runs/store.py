"""A run on disk, which can be continued after an interruption, and the provenance of its numbers.

RUN/settings.json     what the run depends on
RUN/answers.jsonl     one line an answer, with the hash of those settings
RUN/.lock             held by the one process that may write; the system frees it when that process ends, killed or not
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import Any

from evals.data.datasets import DataSet, digest
from evals.errors import RunStoreError
from evals.runs.answers import Answer, from_json, to_json
from specdec.run_files import changes, locked, write_atomically, writing
from specdec.user_warnings import warn_user

_PACKAGES = ("specdec-hf", "torch", "transformers", "tokenizers", "flashinfer-python", "lm_eval")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that affect the numbers; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_name(device: str) -> str:
    """The name of the processor that a torch device is."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    return platform.machine()


def data_facts(data: DataSet) -> dict[str, Any]:
    """Name, source, hash and the number of questions asked."""
    return {"name": data.name, "source": data.source, "sha256": data.sha256, "questions": len(data.questions)}


def model_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A model's facts as they may be published: a folder is reduced to its name, and nothing measured is among them."""
    target = str(facts["target"])
    device = str(facts["device"])
    shown = PurePath(target).name if PurePath(target).is_absolute() else target
    fixed = {key: value for key, value in facts.items() if key != "self_test_error"}
    return {**fixed, "target": shown, "device_name": device_name(device)}


LOCK = ".lock"
_REMEDY = "remove the folder or use another --run-dir"


class RunStore:
    """The answers of one run. Opened on a folder: a new one, or one of the same settings, which is continued.

    One process at a time has it open: leave it as a context manager, or with `close`.
    key: hash of the settings; answers: by (question id, configuration), read at opening.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Open or create `folder`; a last line that a crash has cut off is dropped, with a warning.

        Raises:
            RunStoreError: another run has the folder open, it belongs to other settings, or it is damaged.
            OutputError: it cannot be written.
        """
        self.folder = folder
        self.key = digest(settings)
        self._path = folder / "answers.jsonl"
        _check_is_run(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = locked(folder / LOCK, lambda why: RunStoreError(f"{folder} {why} use another --run-dir"))
        try:
            _check_settings(folder, settings)
            write_atomically(folder / "settings.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")
            self.answers = {(answer.question_id, answer.arm): answer for answer in self._read()}
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder for other runs."""
        self._lock.release()

    def add(self, answers: Iterable[Answer]) -> None:
        """Append answers; they are on disk when this returns.

        Raises:
            OutputError: they cannot be written; earlier ones stay readable.
        """
        answers = list(answers)
        lines = [json.dumps({"key": self.key, "answer": to_json(answer)}, ensure_ascii=False) for answer in answers]
        with writing(self._path), self._path.open("ab") as out:
            out.write("".join(line + "\n" for line in lines).encode())
            out.flush()
            os.fsync(out.fileno())
        self.answers.update({(answer.question_id, answer.arm): answer for answer in answers})

    def finished(self, question_id: str, arms: Iterable[str]) -> bool:
        """Whether a question has an answer, without error, under every one of `arms`."""
        found = (self.answers.get((question_id, arm)) for arm in arms)
        return all(answer is not None and answer.error is None for answer in found)

    def _read(self) -> list[Answer]:
        """The answers on disk. A last line that was cut off is removed, with a warning."""
        if not self._path.is_file():
            return []
        with writing(self._path):
            content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        lines = content[:whole].split(b"\n")[:-1]
        answers = [self._answer(line, number) for number, line in enumerate(lines, 1)]
        if whole < len(content):
            warn_user(
                f"{self._path}:{len(lines) + 1}: the last line was cut off when an earlier run ended; it is dropped, "
                "and its questions are asked again"
            )
            with writing(self._path):
                os.truncate(self._path, whole)
        return answers

    def _answer(self, line: bytes, number: int) -> Answer:
        where = f"{self._path}:{number}"
        try:
            record = json.loads(line)
            answer = from_json(record["answer"])
            key = record["key"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunStoreError(f"{where}: damaged ({type(error).__name__}: {error}); {_REMEDY}") from error
        if key != self.key:
            raise RunStoreError(f"{where}: belongs to other settings; {_REMEDY}")
        return answer


def _check_is_run(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RunStoreError(f"{folder} is not a folder; use another --run-dir")
    if (folder / "settings.json").is_file() or not folder.is_dir():
        return
    if any(path.name != LOCK and not path.name.endswith(".partial") for path in folder.iterdir()):
        raise RunStoreError(f"{folder} is not empty and holds no run; use another --run-dir")


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / "settings.json"
    if not path.is_file():
        return
    try:
        earlier = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise RunStoreError(f"{path} is damaged ({error}); {_REMEDY}") from error
    if not isinstance(earlier, dict):
        raise RunStoreError(f"{path} is damaged (a JSON object is needed, this is {type(earlier).__name__}); {_REMEDY}")
    changed = list(changes(earlier, json.loads(json.dumps(settings))))
    if changed:
        listed = "; ".join(changed)
        raise RunStoreError(f"{folder} holds a run with other settings ({listed}); use another --run-dir, or remove it")


def check_writable(path: Path) -> None:
    """Check that a file or folder can be made at `path`; leaves nothing behind.

    Raises:
        OutputError: it cannot.
    """
    folder = path if path.is_dir() else path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with writing(path):
        if path.is_file():
            path.open("ab").close()
        if path.is_file() or path.is_dir() or not path.exists():  # else a pipe or a device
            tempfile.TemporaryFile(dir=folder).close()
