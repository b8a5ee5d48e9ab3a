"""How kernels are launched: what a dependent launch is given and does, on devices that are not there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from attention.kernels import launch

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(("capability", "has"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_hopper_and_later_launch_dependently(
    capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel waits just where it is launched before its predecessor has ended."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    options = launch.dependent_launch.__wrapped__
    assert options(CUDA) == {"DEPENDENT": has, "launch_pdl": has}
    assert options(CPU) == {"DEPENDENT": False, "launch_pdl": False}
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert options(CUDA) == {"DEPENDENT": False}, "Triton for ROCm has no such option"


def test_a_kernel_waits_before_the_next_one_may_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    cuda = SimpleNamespace(
        gdc_wait=lambda: calls.append("wait"), gdc_launch_dependents=lambda: calls.append("launch dependents")
    )
    monkeypatch.setattr(launch, "tl", SimpleNamespace(extra=SimpleNamespace(cuda=cuda)))
    wait: Any = launch.wait_for_predecessor
    wait.fn(False)
    assert calls == []
    wait.fn(True)
    assert calls == ["wait", "launch dependents"]


def test_a_kernel_that_is_launched_often_is_compiled_once() -> None:
    kept = list[str]()
    with ThreadPoolExecutor(1) as pool:
        together = launch._Together(pool)
        for key in ("a", "b", "a"):
            together.submit(key, lambda key=key: key, kept.append)
    assert kept == ["a", "b"]
