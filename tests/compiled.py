"""Triton compiles kernels for a GPU that is not there, in a process without the interpreter that tests have."""

from __future__ import annotations

import os
from pathlib import Path

from tests.rank_server import fork_and_wait, server_of_compilers

ROOT = Path(__file__).parents[1]


def printed(script: str, *arguments: object, **variables: str) -> str:
    """What a script that compiles kernels prints. variables: of its environment."""
    around = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    around |= {"PYTHONPATH": str(ROOT), **variables}
    done = fork_and_wait(script, *map(str, arguments), env=around, line=server_of_compilers())
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
