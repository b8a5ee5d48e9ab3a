"""A metadata builder needs a KV spec and a device alone: the example runs without transformers, heads and engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHERS = ("transformers", "drafters", "specdec", "evals")
BACKENDS = "import attention.backends.flashinfer.backend, attention.backends.invariant"
LINE = re.compile(r"(\w+): (\d+) rows of (\d+) keys: (\d+\.\d) µs a plan")


def run(code: str, **env: str) -> list[str]:
    """What Python prints, line by line, in a process of its own."""
    around = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"} | env
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", env=around, check=True)
    return done.stdout.splitlines()


def check(backend: str, **env: str) -> None:
    """Run the example: a line for each batch with microseconds, and nothing but `attention` is loaded."""
    example = f"import runpy, sys; runpy.run_path('examples/plan_without_engine.py', run_name='__main__'); {BACKENDS}"
    seen = f"print(sorted(set({OTHERS!r}) & sys.modules.keys()))"
    *lines, loaded = run(f"import os; os.chdir({str(ROOT)!r}); {example}; {seen}", **env)
    found = [LINE.fullmatch(line) for line in lines]
    assert [m and m.groups()[:3] for m in found] == [
        (backend, "1", "128"),
        (backend, "8", "1024"),
        (backend, "32", "2048"),
    ]
    assert all(m is not None and 0 < float(m[4]) < 1e5 for m in found)
    assert loaded == "[]"


@pytest.mark.slow
@pytest.mark.thorough
def test_the_torch_backend_on_a_cpu() -> None:
    check("torch", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_flashinfer_on_a_gpu() -> None:
    pytest.importorskip("flashinfer")
    check("flashinfer")
