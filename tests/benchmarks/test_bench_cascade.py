"""The benchmark of cascade attention measures what it says, on a machine without a GPU in Triton's interpreter."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: it is run there", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from attention.spec import AttentionSpec
from benchmarks import bench_cascade
from benchmarks.bench_cascade import main
from benchmarks.device_time import Place


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(launch: Callable[[], None], place: Place) -> float:
        launch()
        return 1.0

    monkeypatch.setattr(bench_cascade, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(bench_cascade, "DTYPE", torch.float16)
    monkeypatch.setattr(bench_cascade, "KEY", AttentionSpec(4, 2, 64, 64, 0.125))
    monkeypatch.setattr(bench_cascade, "_CACHES_BYTES", 1)
    monkeypatch.setattr(bench_cascade, "_LEAST_LAUNCHES", 1)
    monkeypatch.setattr(bench_cascade, "device_us", once)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_line_for_every_case(tmp_path: Path) -> None:
    out = tmp_path / "cascade.jsonl"
    args = ["--rows", "4", "--prefix", "32,64", "--own", "16", "--query", "1,2", "--out", str(out)]
    done = CliRunner().invoke(main, args, catch_exceptions=False)
    assert done.exit_code == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["prefix"], line["query"]) for line in lines] == [(32, 1), (32, 2), (64, 1), (64, 2)]
    for line in lines:
        assert line["torch"] == torch.__version__ and line["gain"] == 1 and not line["rule"]
        assert 0 <= line["relative_difference"] <= 3e-3


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_another_result_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the prefix is not attended."""
    monkeypatch.setattr("attention.kernels.cascade_kernel.launch_prefix", lambda *_: None)
    args = ["--rows", "4", "--prefix", "32", "--own", "16", "--query", "2", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, args)
    assert done.exit_code != 0 and "relative difference to flat attention" in done.output + str(done.exception)
