"""Scoring of HumanEval. Runs code that a model wrote: in a child process with an empty environment, a scratch folder,
and limits on time, memory, file size and open files. That is no security boundary: use a container without network
and secrets.

Source: the task's rule (prompt + completion + test + check) is openai/human-eval human_eval/execution.py.
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
from typing import Any

from specdec.errors import SpecdecError

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
    (test,), (candidates,) = references, predictions
    passed = [passes(f"{candidate}\n{test}\n") for candidate in candidates]
    return {"pass@1": sum(passed) / len(passed)}


def check_programs_run() -> None:
    """Run a program that is right and one that is wrong: where the first does not pass, no answer ever would.

    Raises:
        SpecdecError: programs cannot be run and judged here.
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
