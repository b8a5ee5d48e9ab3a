"""Scoring: a paired exact test of right and wrong answers, and HumanEval's programs, which run in their own processes.

Source: the task's rule (prompt + completion + test + check) is openai/human-eval human_eval/execution.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evals.errors import require
from specdec.errors import InvalidInputError, SpecdecError

MCNEMAR = (
    "McNemar's exact test: two-sided binomial test (p = 1/2) of the questions that exactly one configuration has right."
)
INTERVAL = "95% interval of the paired difference of proportions, Agresti and Min (Statistics in Medicine 24, 2005)."
_Z = 1.959963984540054


@dataclass(frozen=True)
class PairedAccuracy:
    """Two accuracies on the same `total` questions, `right_a` and `right_b` of which each configuration has right.

    only_a, only_b: questions that only one configuration has right. difference, low, high: accuracy of b less that of
    a, and its interval. p_value: McNemar's exact test; None where both have the same questions right.
    """

    total: int
    right_a: int
    right_b: int
    only_a: int
    only_b: int
    difference: float
    low: float
    high: float
    p_value: float | None


def paired_accuracy(a: Sequence[bool], b: Sequence[bool]) -> PairedAccuracy:
    """Compare two configurations. a, b: whether each question is right, in the same order.

    >>> paired_accuracy([True, True, False, True], [True, False, False, False]).only_a
    2

    Raises:
        InvalidInputError: no questions, or different numbers of them.
    """
    if not a or len(a) != len(b):
        raise InvalidInputError(f"paired accuracy needs two equally long non-empty lists, not {len(a)} and {len(b)}")
    require("scipy", "eval")
    from scipy.stats import binomtest

    n = len(a)
    only_a = sum(x and not y for x, y in zip(a, b, strict=True))
    only_b = sum(y and not x for x, y in zip(a, b, strict=True))
    p_value = float(binomtest(only_b, only_a + only_b, 0.5).pvalue) if only_a + only_b else None
    centre = (only_b - only_a) / (n + 2)
    spread = only_a + only_b + 1 - (only_b - only_a) ** 2 / (n + 2)
    half = _Z * math.sqrt(spread) / (n + 2)
    difference = (only_b - only_a) / n
    return PairedAccuracy(
        n, sum(a), sum(b), only_a, only_b, difference, max(centre - half, -1.0), min(centre + half, 1.0), p_value
    )


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
