"""Run a benchmark beside others: python -m benchmarks.offline.in_turn MODULE ARGUMENTS…

Matmul algorithms are timed by one process at a time; the others find what it chose on the disk.
"""

from __future__ import annotations

import runpy
import sys
from functools import wraps
from typing import Any

from filelock import FileLock

from specdec.compiler import gemm_selection

_LOCK = "/tmp/specdec-products.lock"


def main() -> None:
    """The module named first, as `python -m` runs it."""
    choose = gemm_selection.choose

    @wraps(choose)
    def alone(*arguments: Any) -> gemm_selection.Tally:
        with FileLock(_LOCK):
            return choose(*arguments)

    gemm_selection.choose = alone
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
