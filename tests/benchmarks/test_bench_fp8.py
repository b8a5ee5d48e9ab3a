"""What the sweep of FP8 matmuls tries, and the line that it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import bench_fp8
from specdec.ops.fp8_kernel import tiling_of


@pytest.mark.parametrize("tokens", [1, 8, 48, 96, 192, 768])
def test_each_launch_is_tried_once_and_fits(tokens: int) -> None:
    """No two tilings that are the same launch; the one in use is among them, but for its number of splits."""
    for rows, width in bench_fp8.LLAMA:
        tried = list(bench_fp8.candidates(tokens, rows, width))
        launches = {(t.tokens, t.rows, t.stages, t.at_once, t.share(width // 128)) for t in tried}
        assert 10 <= len(launches) == len(tried) <= 60
        assert all(t.stages * t.at_once * 128 * (t.tokens + t.rows) < 227 << 10 for t in tried)
        chosen = tiling_of(tokens, rows, width)
        same = [t for t in tried if (t.tokens, t.rows, t.warps) == (chosen.tokens, chosen.rows, chosen.warps)]
        assert any((t.stages, t.at_once) == (chosen.stages, chosen.at_once) for t in same)


def test_a_line_names_the_best_six(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiling = {"tokens": 16, "rows": 64, "weight_first": True, "warps": 4, "stages": 3, "at_once": 2, "splits": 5}
    best = [[10.0 + i, tiling | {"splits": i}] for i in range(1, 7)]

    def measured(rows: int, width: int, tokens: int, sweep: bool) -> dict[str, Any]:
        numbers = {"us": 12.25, "floor_us": 3.0, "bf16_us": 11.0, "quantise_us": 1.0, "swept": 47}
        return {"rows": rows, "width": width, "tokens": tokens, "chosen": tiling, "best": best} | numbers

    monkeypatch.setattr(bench_fp8, "measured", measured)
    out = tmp_path / "fp8.jsonl"
    found = CliRunner().invoke(bench_fp8.main, ["--tokens", "1,8", "--out", str(out)])
    lines = found.output.splitlines()
    assert len(lines) == len(out.read_text().splitlines()) == 8
    shown = ", ".join(f"{10 + i}.0 64f w4 s3 b2 x{i}" for i in range(1, 7))
    assert lines[0] == (
        "6144 x 4096, 1 tokens: 12.2 us 64f w4 s3 b2 x5, floor 3.0, bf16 11.0, quantise 1.0; best of 47: " + shown
    )
    assert json.loads(out.read_text().splitlines()[0])["best"] == best
