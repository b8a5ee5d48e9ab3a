"""The benchmark of attention backends runs on a machine without a GPU, drops nothing, and its lines become tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attention.backends.building import in_background
from attention.spec import AttentionSpec
from benchmarks import bench_backends, device_time, tables
from benchmarks.batches import Batch, full_size, small_size
from benchmarks.bench_backends import DECODE_KERNELS, WAYS, LayerPlace, floor_us, main
from benchmarks.device_time import Rates

BATCHES = ("decode, small", "mixed")


@pytest.mark.slow
def test_every_backend_and_batch_has_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device_time, "REPEATS", 2)
    monkeypatch.setattr(bench_backends, "small_size", lambda: {name: small_size()[name] for name in BATCHES})
    out = tmp_path / "backends.jsonl"
    done = CliRunner().invoke(main, ["--small", "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["batch"], line["backend"]) for line in lines] == [(b, w) for b in BATCHES for w in WAYS]
    for line in lines:
        assert line["torch"] == torch.__version__ and line["commit"] and line["floor_us"] > 0
        if line["backend"] in ("torch", "flex"):
            assert line["total_us"] == pytest.approx(line["plan_us"] + 32 * line["run_us"], rel=1e-2)
            assert line["ratio"] == pytest.approx(line["total_us"] / line["floor_us"], rel=1e-2)
        else:
            uneven = line["batch"] == "mixed" and line["backend"].endswith("fixed")
            reason = "rows of unequal queries" if uneven else "needs a CUDA device, not cpu"
            assert reason in line["refused"] and "run_us" not in line
    page = tables.page(tmp_path)
    assert page.count("| decode, small | 1 | 1 | 41 |") == len(WAYS) and page.count("refused: backend=") == 5


def test_without_a_gpu_real_sizes_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options in ([], ["--part", "decode"], ["--part", "decode", "--small"]):
        done = CliRunner().invoke(main, [*options, "--out", str(tmp_path / "x")])
        assert done.exit_code == 2 and "no GPU is here; --small runs part `backends` on a CPU" in done.output


def test_the_floor_by_hand() -> None:
    """Two rows of 3 and 5 keys, one and two new tokens, one head of 4 in float32: 2·(8 + 3)·4 numbers of the cache and
    2·3·4 of queries and results, 4 bytes each."""
    place = LayerPlace(torch.device("cpu"), torch.float32, AttentionSpec(1, 1, 4, 4, 1.0))
    batch = Batch((1, 2), (2, 3))
    assert floor_us(batch, place, Rates(copy=1e6, matmul=1e12)) == 4 * (88 + 24)
    seen = 3 + 4 + 5
    assert floor_us(batch, place, Rates(copy=1e12, matmul=1e6)) == 4 * 4 * seen


def test_batches_of_both_sizes_have_the_same_names() -> None:
    assert list(full_size()) == list(small_size())
    assert all(sum(batch.seq_lens) <= 280_000 for batch in full_size().values())


def test_decode_kernels_as_a_table(tmp_path: Path) -> None:
    """The fastest is named; one that has no kernel for a ratio is shown as that."""
    common = {"benchmark": "decode_kernels", "torch": "2", "transformers": "5", "commit": "c", "rows": 1}
    common |= {"head_dim": 64, "query_heads_a_kv_head": 16, "floor_us": 2.0}
    found = [{"kernel": "fa2", "run_us": 9.0}, {"kernel": "packed", "run_us": 8.0}, {"kernel": "CUDA-core decode"}]
    lines = [json.dumps(common | line | {"ratio": 4.0}) for line in found[:2]]
    lines.append(json.dumps(common | found[2] | {"refused": "Unsupported group_size: 16"}))
    (tmp_path / "decode_kernels.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    assert "| 64 | 16 | 1 | 9.0 | 8.0 | refused | 2.0 | packed |" in tables.page(tmp_path)


def test_decode_kernels_are_built_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that were asked for at once, nothing else; each is given what FlashInfer's wrapper asks for."""
    together, made = Barrier(3, timeout=20), []

    def module(name: str) -> Callable[..., None]:
        def make(*arguments: Any) -> None:
            together.wait()
            made.append((name, arguments[-3:]))

        return make

    decode, prefill = SimpleNamespace(), SimpleNamespace()
    decode.get_batch_decode_module, prefill.get_batch_prefill_module = module("decode"), module("prefill")
    for name, fake in (("flashinfer", SimpleNamespace()), ("flashinfer.decode", decode)):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", prefill)
    fa2 = module("fa2")
    monkeypatch.setattr(
        bench_backends, "building", lambda *kind: in_background(("test", kind), "fa2", lambda: fa2(*kind))
    )
    bench_backends.build_decode_kernels((56,), DECODE_KERNELS)
    assert sorted(made) == [
        ("decode", (0, False, False)),
        ("fa2", (AttentionSpec(1, 1, 56, 56, 1.0), torch.bfloat16, "fa2")),
        ("prefill", (False, False, False)),
    ]
    bench_backends.build_decode_kernels((40,), ("packed",))
    assert len(made) == 3
