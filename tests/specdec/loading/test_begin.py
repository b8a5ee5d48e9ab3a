"""What is begun before a target can run: its kernels and the compiler's processes, once its configuration is known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from fakes import tiny_llama, wrap

import specdec.loading.cuda_graphs
import specdec.loading.parts
from specdec.errors import InvalidInputError
from specdec.loading.targets import open_target
from specdec.options import LoadOptions


@pytest.mark.parametrize("loaded", [True, False])
def test_the_configuration_is_told_before_the_model_runs(loaded: bool, tmp_path: Path) -> None:
    model, told = tiny_llama(), list[Any]()
    model.save_pretrained(tmp_path)

    def begin(config: Any, dtype: Any, device: torch.device) -> None:
        told.append((config.num_hidden_layers, dtype, device))

    if loaded:
        open_target(model, LoadOptions(), begin)
    else:
        open_target(tmp_path, LoadOptions(dtype=torch.float32, device="cpu"), begin)
    assert told == [(4, torch.float32, torch.device("cpu"))]


def test_nothing_is_begun_for_a_target_that_is_refused() -> None:
    told: list[Any] = []
    with pytest.raises(InvalidInputError, match="is loaded already"):
        open_target(tiny_llama(), LoadOptions(dtype="float16"), lambda *args: told.append(args))
    assert not told


@pytest.mark.slow
def test_kernels_begin_to_be_built_before_the_model_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    probe = specdec.loading.parts.probe_target
    monkeypatch.setattr(specdec.loading.parts, "begin_kernels", lambda *args: order.append("kernels"))
    monkeypatch.setattr(specdec.loading.parts, "probe_target", lambda model: (order.append("probe"), probe(model))[1])
    wrap(tiny_llama()).close()
    assert order == ["kernels", "probe", "kernels"]  # the second time for what the layers themselves say


class Compiler:
    """torch's, with one process that waits."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.done: list[str] = []

    def warm_pool(self) -> None:
        self.done.append("warm")

    def process_pool(self) -> Compiler:
        return self

    def wakeup(self) -> None:
        self.done.append("woken")


def test_the_compilers_processes_give_way() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        compiler = Compiler(process)
        specdec.loading.cuda_graphs.make_pool(compiler)
        assert compiler.done == ["warm", "woken"]
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == max(10, os.getpriority(os.PRIO_PROCESS, 0))
        process.communicate(b"\n")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [None, AttributeError, AssertionError])
def test_the_compiler_is_loaded_aside_and_once(error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors: torch has other names for its processes, or wants none; it is left to do as it likes."""
    threads: list[int] = []

    def make(compiler: Any) -> None:
        threads.append(get_ident())
        if error is not None:
            raise error(compiler)

    monkeypatch.setattr(specdec.loading.cuda_graphs, "make_pool", make)
    specdec.loading.cuda_graphs.loading_thread.cache_clear()
    for _ in range(2):
        specdec.loading.cuda_graphs.loading_thread()
    specdec.loading.cuda_graphs.loading_thread().join()
    assert len(threads) == 1 and get_ident() not in threads
    specdec.loading.cuda_graphs.loading_thread.cache_clear()
