"""How specdec's Triton kernels are launched: dependent launches, and compiling several in parallel. Imported on CUDA
only.

Programmatic dependent launch sets a kernel up while the one before it still runs. Every kernel launched so waits, in
all its programs, before it stores anything or loads what its predecessor stores, and only then lets the next one be
launched. So results that were complete before the predecessor may be loaded at once (tests/interpreter_memory.py checks
this).

Inside `compiled_together` the launch of a kernel that is not compiled only hands it to a pool of threads, so that a
rehearsal waits for the slowest compilation instead of a dozen in turn. Its results are undefined; a kernel whose result
is an index into memory is launched inside `CompiledAtOnce`, which compiles it on the spot.

Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; triton-lang/triton,
python/triton/runtime/_async_compile.py (AsyncCompileMode).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime._async_compile import active_mode


@triton.jit
def wait_for_predecessor(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """After this call all earlier kernels are complete, and the next kernel may be launched."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """The options of a launch, for kernels that call `wait_for_predecessor`; Hopper and later have it.

    On a ROCm build the instructions are left out of the kernels, and Triton knows no option `launch_pdl`.
    """
    if torch.version.hip is not None:
        return {"DEPENDENT": False}
    has = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"DEPENDENT": has, "launch_pdl": has}


_MOST_THREADS = 16


class _Together:
    """The compile hook that Triton calls instead of compiling."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._begun: dict[str, Future[None]] = {}

    def submit(self, key: str, compile_: Callable[[], Any], keep: Callable[[Any], None], *_: Any) -> None:
        """Begin to compile a kernel, once; `keep` puts it where its launches find it. Without a result none is run.

        Errors are raised by the kernel's next launch, which compiles it again.
        """
        if key not in self._begun:
            self._begun[key] = self._pool.submit(lambda: keep(compile_()))


@contextmanager
def compiled_together() -> Iterator[None]:
    """Launches on this thread of kernels that are not compiled yet are skipped; at the end they are all compiled."""
    # sched_getaffinity rather than cpu_count: cores that this process may use.
    pool = ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "compile kernels")
    token = active_mode.set(_Together(pool))
    try:
        yield
    except BaseException:  # also on Ctrl-C: drop queued compilations; the shutdown below waits for running ones
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        active_mode.reset(token)
        pool.shutdown()


class CompiledAtOnce:
    """Kernels that are launched inside are compiled first, whatever the state outside. A class, which is entered in no
    time: rounds launch such kernels, too.
    """

    def __enter__(self) -> None:
        self._token = active_mode.set(None)

    def __exit__(self, *_: object) -> None:
        active_mode.reset(self._token)
