"""Scripts for a GPU machine without a package index: they parse, and benchmarks wait for their turn and end by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = ROOT / "benchmarks" / "offline"
TINY = "benchmarks.bench_round --shape tiny --device cpu --drafts 1 --rows 1 --repeats 1 --trace ''"


@pytest.mark.parametrize("script", sorted(path.name for path in OFFLINE.glob("*.sh")))
def test_scripts_parse(script: str) -> None:
    done = subprocess.run(["bash", "-n", OFFLINE / script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_benchmarks_take_turns_and_what_hangs_is_said(tmp_path: Path) -> None:
    """Without anything to unpack: setup.sh finds the site folder."""
    (tmp_path / "site").mkdir()
    (tmp_path / "commit").write_text("another\n")
    script = f"""
. {OFFLINE}/setup.sh
SPECDEC_COMMIT=abc1234 held right {TINY} --out $OUT/round.jsonl
held wrong {TINY} --out $OUT/nowhere/round.jsonl
ready right wrong
go 30 right wrong
: > {tmp_path}/logs/stuck.log
sleep 100 & echo $! > {tmp_path}/held/stuck.pid
go 1 stuck
"""
    variables = {
        "CARRY": str(tmp_path),
        "WORK": str(tmp_path),
        "OUT": str(tmp_path / "out"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert "right ready" in done.stdout and "K=1 rows=1" in done.stdout
    assert "wrong NOT ready" in done.stdout and "there is no folder" in done.stdout
    assert "stuck HANGS" in done.stdout
    assert '"commit": "abc1234"' in (tmp_path / "out" / "round.jsonl").read_text()
