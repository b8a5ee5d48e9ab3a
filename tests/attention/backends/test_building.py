"""Kernels in the background: each is built once, awaited where it is needed, and its error is raised there by name."""

from __future__ import annotations

import logging
from threading import Event
from typing import Any

import pytest
import torch

import attention.backends.building
import attention.backends.flashinfer.wrapper
from attention.backends.building import Build, in_background
from attention.backends.flashinfer.backend import start_building
from attention.errors import KernelBuildError
from attention.runner import GroupRunner
from attention.spec import AttentionSpec


def test_two_are_built_at_once_and_each_is_awaited_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Event(), Event()
    builds = [Build("fa2", lambda: first.wait(10)), Build("fa3", lambda: second.wait(10))]
    assert not any(build.done for build in builds) and builds[1].state.startswith("being built for ")
    first.set()
    with caplog.at_level(logging.INFO, "specdec"):
        builds[0].wait()
        assert builds[0].state.startswith("ready after ") and not builds[1].done
        second.set()
        builds[1].wait()
    assert all(build.done and not build.failed for build in builds)
    assert "attention kernel fa3: ready after" in caplog.text


def test_an_error_is_raised_by_name_where_it_is_awaited() -> None:
    def fails() -> None:
        raise RuntimeError("ninja: no such file")

    build = Build("fa3, bfloat16", fails)
    for _ in range(2):
        with pytest.raises(KernelBuildError, match="fa3, bfloat16 could not be built: ninja: no such file") as error:
            build.wait()
        assert isinstance(error.value.__cause__, RuntimeError)
    assert build.failed and "RuntimeError" in build.state


def test_a_kernel_is_built_once_and_again_after_a_failure() -> None:
    made: list[int] = []

    def make() -> None:
        made.append(1)
        if len(made) == 1:
            raise RuntimeError

    key = object()
    failed = in_background(key, "fa2", make)
    with pytest.raises(KernelBuildError):
        failed.wait()
    again = in_background(key, "fa2", make)
    again.wait()
    assert again is not failed and in_background(key, "fa2", make) is again and len(made) == 2


def test_what_was_made_is_what_is_awaited() -> None:
    build = Build("fa2", lambda: "module")
    assert build.wait() == build.wait() == "module"


def test_both_kernels_begin_to_be_built_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of fa3, which takes longest, first."""
    asked: list[Any] = []
    monkeypatch.setattr(attention.backends.flashinfer.wrapper, "causal_module", lambda *args: asked.append(args))
    monkeypatch.setattr(attention.backends.building, "_builds", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    key, half = AttentionSpec(32, 8, 128, 128, scale=128**-0.5), torch.bfloat16
    builds = start_building(key, half, half, torch.device("cuda"))
    for build in builds:
        build.wait()
    assert [build.name[:3] for build in builds] == ["fa3", "fa2"]
    rest = (half, half, half, torch.int32, 128, 128, 0, False, False, False)
    assert sorted(asked) == [("fa2", *rest), ("fa3", *rest)]
    assert start_building(key, torch.float32, torch.float32, torch.device("cuda")) == ()


def test_a_blank_batch_attends_to_nothing() -> None:
    from attention.backends.reference import TorchBackend
    from attention.cache.kv_cache import CacheGroup

    spec = AttentionSpec(4, 2, 8, 6, scale=1.0)
    group, cpu = CacheGroup("g", (spec,), 4, 4), torch.device("cpu")
    runner = GroupRunner(TorchBackend(cpu), group, torch.float32, cpu)
    before = runner.layers[0].keys.clone()
    query, key, value = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 6)
    metadata: Any = None
    out = runner.attend(runner.blank(metadata), 0, query, key, value)
    assert out.shape == (3, 4, 6) and not out.any() and torch.equal(runner.layers[0].keys, before)
    assert runner.builds == ()
