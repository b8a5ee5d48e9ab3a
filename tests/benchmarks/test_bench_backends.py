"""The benchmark of attention backends runs on a machine without a GPU, drops nothing, and its lines become tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attention.spec import AttentionSpec
from benchmarks import bench_backends, tables
from benchmarks.batches import Batch, full_size, small_size
from benchmarks.bench_backends import WAYS, Place, Rates, floor_us, main

BATCHES = ("decode, small", "mixed")


@pytest.mark.slow
def test_every_backend_and_batch_has_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench_backends, "REPEATS", 2)
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
    place = Place(torch.device("cpu"), torch.float32, AttentionSpec(1, 1, 4, 4, 1.0))
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
