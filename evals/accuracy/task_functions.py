"""What the files in `tasks` name: data of the offline tasks, and HumanEval's filter and metric.

Data come from lm-eval's `--metadata data_dir=DIR`, else from $SPECDEC_DATA. HumanEval's programs run in their own
processes. Source: the rule of that task (prompt + completion + test + check) is openai/human-eval
human_eval/execution.py.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from evals.data.arithmetic import problems
from evals.data.datasets import DATA_VARIABLE, data_folder, read_jsonl
from evals.errors import DataError
from specdec.errors import SpecdecError


def gsm8k(data_dir: str | None = None, **_: Any) -> Any:
    """GSM8K's train and test split. `data_dir` is the data folder, or the folder with train.jsonl and test.jsonl."""
    folder = _folder(data_dir)
    if not (folder / "test.jsonl").is_file():
        folder = folder / "gsm8k"
    splits = {split: _rows(folder / f"{split}.jsonl") for split in ("train", "test")}
    return datasets.DatasetDict(splits)


def humaneval(data_dir: str | None = None, **_: Any) -> Any:
    """HumanEval as its only split, "test"."""
    return datasets.DatasetDict({"test": _rows(_folder(data_dir) / "humaneval" / "HumanEval.jsonl")})


def arithmetic(arithmetic_questions: int = 1000, arithmetic_seed: int = 0, **_: Any) -> Any:
    """Held-out generated problems."""
    drawn = problems("heldout", arithmetic_questions, arithmetic_seed)
    rows = [{"question": problem.question, "answer": problem.answer} for problem in drawn]
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})


def _folder(data_dir: str | None) -> Path:
    folder = data_folder(Path(data_dir) if data_dir else None)
    if folder is None:
        raise DataError(f"no local data: set {DATA_VARIABLE}, or pass --metadata data_dir=DIR (lm-eval) or --data")
    return folder


def _rows(path: Path) -> Any:
    rows = [dict(record) for _, record in read_jsonl(path)]
    if not rows:
        raise DataError(f"the file {path} has no questions")
    return datasets.Dataset.from_list(rows)


_SECONDS = 15.0

# Success is a number that only the runner knows, written after the whole program ran: leaving early does not pass.
_RUNNER = """
import os, resource, sys
number, program = sys.stdin.read().split("\\n", 1)
out = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(null, descriptor)
for kind, most in (("AS", 2 << 30), ("CPU", 20), ("FSIZE", 1 << 20), ("CORE", 0), ("NOFILE", 64)):
    limit = getattr(resource, "RLIMIT_" + kind)
    resource.setrlimit(limit, (most, most))
def run():
    exec(compile(program, "<candidate>", "exec"), {"__name__": "candidate"})
run()
os.write(out, number.encode())
"""


def programs(resps: Sequence[Sequence[str]], docs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """lm-eval filter: completions -> whole programs."""
    return [[doc["prompt"] + text for text in texts] for texts, doc in zip(resps, docs, strict=True)]


def pass_at_1(references: Sequence[str], predictions: Sequence[Sequence[str]]) -> dict[str, float]:
    """lm-eval metric of one document: the share of its programs that pass."""
    (test,) = references
    (candidates,) = predictions
    passed = [passes(f"{candidate}\n{test}\n") for candidate in candidates]
    return {"pass@1": sum(passed) / len(passed)}


def check_programs_run() -> None:
    """Check that right and wrong programs are scored differently here.

    Raises:
        SpecdecError: they cannot.
    """
    if not passes("assert 1 + 1 == 2\n") or passes("assert 1 + 1 == 3\n"):
        raise SpecdecError(
            "programs cannot be run on this machine: a right one does not pass, or a wrong one does. Every answer "
            "would get the same verdict. Limits on processes, memory or files of this container may be in the way"
        )


def passes(program: str, seconds: float = _SECONDS) -> bool:
    """Whether a program runs to its end inside the limits."""
    number = secrets.token_hex(16)
    environment = {"PATH": os.defpath, "PYTHONUTF8": "1"}
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            out, _ = child.communicate(f"{number}\n{program}".encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            out = b""
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what the program started
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return out == number.encode()
