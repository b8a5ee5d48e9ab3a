"""The benchmark of recurrences runs in Triton's interpreter, and its lines become a table."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import device_time, tables
from benchmarks.bench_recurrence import FULL, LAYERS, Work, delta_layer, main
from benchmarks.device_time import Place

PLACE = Place(torch.device("cpu"), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU is here")
def test_every_kernel_has_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(device_time, "REPEATS", 1)
    out = tmp_path / "recurrence.jsonl"
    assert CliRunner().invoke(main, ["--small", "--out", str(out)], catch_exceptions=False).exit_code == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["kernel"], line["kind"]) for line in lines] == [(k, w) for k in LAYERS for w in ("round", "prompt")]
    for line in lines:
        assert line["torch"] == torch.__version__ and line["run_us"] > 0 and line["floor_us"] > 0 and line["commit"]
    assert "| delta | round | 2 | 2 | 1 |" in tables.page(tmp_path)


def test_without_a_gpu_real_sizes_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options in ([], ["--part", "tilings", "--small"]):
        done = CliRunner().invoke(main, [*options, "--out", str(tmp_path / "x")])
        assert done.exit_code == 2 and "no GPU is here; TRITON_INTERPRET=1 and --small" in done.output


def test_the_bytes_of_a_round_by_hand() -> None:
    """One row of Qwen3.5-9B with three drafts that replays three: 2 MiB of state twice; four tokens of q and k
    (16 x 128), v and o (32 x 128) and beta in 2 bytes, g in 4; three entries read and three written."""
    work = Work.of_round(1, 3)
    token, entry = 2 * (2 * 2048 + 2 * 4096) + 32 * 6, 2 * (2048 + 4096) + 32 * 8
    assert delta_layer(FULL, work, PLACE).moved(work) == 2 * (2 << 20) + 4 * token + 6 * entry
    rows = work.on(PLACE.device)
    assert rows.query_start_loc.tolist() == [0, 4] and rows.num_new.tolist() == [1] and rows.replay.tolist() == [3]


def test_a_prompt_reads_no_state() -> None:
    work = Work.of_prompts(1, 2)
    token = 2 * (2 * 2048 + 2 * 4096) + 32 * 6
    assert delta_layer(FULL, work, PLACE).moved(work) == (2 << 20) + 2 * token
    assert work.on(PLACE.device).start.tolist() == [0]
