"""What is printed on the way to a start's end: nothing that is known is lost when the rest is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import benchmarks.bench_start
from benchmarks.bench_start import child, main


def test_a_start_that_fails_leaves_what_was_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(arguments: list[str], caches: Path) -> Any:
        yield {"imports_s": 3.0}
        yield {"from_pretrained_s": 50.0, "steps": {"compiling": 20.0}, "kernels": {"fa2": "ready"}}
        raise click.ClickException("the start ended with exit code 124")

    monkeypatch.setattr(benchmarks.bench_start, "child", fails)
    result = CliRunner().invoke(main, ["--out", str(tmp_path / "start.json")])
    assert result.exit_code == 1 and "exit code 124" in result.output
    assert 'cold: {"imports_s": 3.0}' in result.output and 'cold: {"from_pretrained_s": 50.0' in result.output
    kept = json.loads((tmp_path / "start.json").read_text())
    assert kept["cold"]["steps"] == {"compiling": 20.0} and "warm" not in kept


def test_the_parts_of_a_process_come_as_it_prints_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\necho '{\"imports_s\": 1.5}'\necho building\n"
        'echo "{\\"caches\\": \\"$TRITON_CACHE_DIR\\"}"\nexit 3\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(benchmarks.bench_start.sys, "executable", str(script))
    parts = child([], tmp_path)
    assert next(parts) == {"imports_s": 1.5}
    assert next(parts) == {"caches": str(tmp_path / "triton")}
    with pytest.raises(click.ClickException, match="exit code 3"):
        next(parts)
