"""Kernels compiled side by side in a rehearsal: what is launched afterwards finds them, for a GPU that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compiled import printed

pytest.importorskip("triton", reason="Triton is not installed")

SCRIPT = """
import json, sys, threading
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

class Hopper:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

class Run:
    def __get__(self, kernel, owner):
        return lambda *args: launched.append(kernel.metadata.name)

launched, compiled, main = [], [], threading.get_ident()
driver.set_active(Hopper())
CUDABackend.make_cubin = lambda *_: b""  # nothing runs what is compiled: no assembler
CompiledKernel.run = Run()
CompiledKernel.launch_metadata = lambda self, *args: None
def note(fn, **_):
    compiled.append([fn.name.rpartition(".")[2], threading.get_ident() == main])
triton.knobs.runtime.jit_post_compile_hook = note

import attention.kernels.launch as together
from specdec.execution.capture import rehearse_decisions
from specdec.ops.greedy_kernel import launch_greedy
from specdec.rounds.fixed import FixedSampling

if sys.argv[1] == "planted":  # what was compiled is not put where launches find it
    submit = together._Together.submit
    together._Together.submit = lambda self, key, compile_, keep, *_: submit(self, key, compile_, lambda kernel: None)
sampling, logits = FixedSampling(5, 1, torch.device("cpu")).device, torch.zeros(8, 4096, dtype=torch.bfloat16)
found = []

def noted():
    found.append([list(compiled), list(launched)])
    compiled.clear()
    launched.clear()

with together.compiled_together():
    rehearse_decisions(logits, 4, 1, sampling, None)
noted()
rehearse_decisions(logits, 4, 1, sampling, None)
noted()
with together.compiled_together():
    with together.CompiledAtOnce():
        launch_greedy(logits)
    noted()
try:
    with together.compiled_together():
        raise KeyboardInterrupt
except KeyboardInterrupt:
    launch_greedy(logits)
noted()
print(json.dumps(found))
"""
FILTERS = ["_sums_kernel"] * 2 + ["_list_kernel", "settle_kernel"]
DECIDED = [*FILTERS, "_accept_kernel", "_resample_kernel"]
GREEDY = ["_parts_kernel", "_best_kernel"]


def run(argument: str, cache: Path) -> list[tuple[list[tuple[str, bool]], list[str]]]:
    """Of each part of the script: the kernels that were compiled, and whether on the main thread; those launched."""
    said = printed(SCRIPT, argument, TRITON_CACHE_DIR=str(cache))
    return json.loads(said.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.thorough
def test_launches_find_what_a_rehearsal_compiled(tmp_path: Path) -> None:
    """Without and with a draft: the filters are the same kernels, acceptance is compiled for the number of drafts."""
    rehearsed, again, at_once, after = run("", tmp_path)
    assert rehearsed[1] == [] and not any(main for _, main in rehearsed[0])
    assert sorted(name for name, _ in rehearsed[0]) == sorted([*DECIDED, "_accept_kernel", "_resample_kernel"])
    assert again == [[], DECIDED * 2]
    assert at_once == [[[name, True] for name in GREEDY], GREEDY]
    assert after == [[], GREEDY]


@pytest.mark.long
def test_a_kernel_that_is_not_kept_is_compiled_again(tmp_path: Path) -> None:
    """Planted defect."""
    _, again, *_ = run("planted", tmp_path)
    assert len(again[0]) == len(DECIDED) + 2
