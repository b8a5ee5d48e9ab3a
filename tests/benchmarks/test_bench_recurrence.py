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
    page = tables.page(tmp_path)
    assert "| delta | round | 2 | 2 | up to 14 |" in page and "| ssd | round | 2 | 2 | up to 1 |" in page


def test_without_a_gpu_real_sizes_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(main, ["--out", str(tmp_path / "x")])
    assert done.exit_code == 2 and "no GPU is here; TRITON_INTERPRET=1 and --small" in done.output


def test_the_bytes_of_a_round_by_hand() -> None:
    """One row of Qwen3.5-9B with three drafts, all accepted. Every launch: 2 MiB of state twice; four tokens of q and k
    (16 x 128), v and o (32 x 128) and beta in 2 bytes, g in 4; three entries read and three written. In fact one round
    of three stores a state; 3, 7 and 11 entries are read, 4, 4 and 3 written."""
    work = Work.of_round(1, 3, "delta")
    token, entry = 2 * (2 * 2048 + 2 * 4096) + 32 * 6, 2 * (2048 + 4096) + 32 * 8
    layer = delta_layer(FULL, work, PLACE)
    assert layer.moved(work, every_launch=True) == 2 * (2 << 20) + 4 * token + 6 * entry
    assert layer.moved(work, every_launch=False) == pytest.approx(4 / 3 * (2 << 20) + 4 * token + 32 / 3 * entry)
    rounds = work.on(PLACE.device)
    assert [rows.replay.tolist() for rows in rounds] == [[3], [7], [11]] and rounds[0].max_replay == 12
    assert [rows.num_new.tolist() for rows in rounds] == [[0], [0], [1]]
    assert [rows.query_start_loc.tolist() for rows in rounds] == [[0, 4]] * 3


def test_rows_are_one_round_apart_and_other_kernels_store_always() -> None:
    assert [rows.num_new.tolist() for rows in Work.of_round(4, 3, "delta").on(PLACE.device)] == [
        [0, 0, 1, 0],
        [0, 1, 0, 0],
        [1, 0, 0, 1],
    ]
    (rows,) = Work.of_round(2, 3, "ssd").on(PLACE.device)
    assert rows.replay.tolist() == [3, 3] and rows.num_new.tolist() == [1, 1]


def test_a_prompt_reads_no_state() -> None:
    work = Work.of_prompts(1, 2, "delta")
    token = 2 * (2 * 2048 + 2 * 4096) + 32 * 6
    for every in (True, False):
        assert delta_layer(FULL, work, PLACE).moved(work, every) == (2 << 20) + 2 * token
    (rows,) = work.on(PLACE.device)
    assert rows.start.tolist() == [0] and rows.num_new.tolist() == [2]
