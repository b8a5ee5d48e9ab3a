"""Run a benchmark beside others: python -m benchmarks.offline.in_turn MODULE ARGUMENTS…

Matmul algorithms are timed by one process at a time; the others find what it chose on the disk.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from functools import wraps

from filelock import FileLock

from specdec.compiler.gemm_selection import Selection, Wanted

_LOCK = "/tmp/specdec-products.lock"


def main() -> None:
    """The module named first, as `python -m` runs it."""
    choose = Selection.choose

    @wraps(choose)
    def alone(self: Selection, wanted: Sequence[Wanted]) -> None:
        with FileLock(_LOCK):
            choose(self, wanted)

    Selection.choose = alone  # type: ignore[method-assign]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
