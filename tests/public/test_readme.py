"""Every example and command of the README runs, with built-in models in place of those on the hub."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specdec.cli.main import cli
from specdec.loading.names import builtin_path
from specdec.model import SpeculativeModel

README = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
HUB = "meta-llama/Llama-3.1-8B-Instruct"
HEADS = ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def here(text: str) -> str:
    """With what is on this machine."""
    text = text.replace(f'"{HUB}"', repr(str(builtin_path("gsm-llama"))))
    for head in HEADS:
        text = text.replace(head, str(builtin_path("gsm-llama-eagle3")))
    return text


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(blocks("python"))))
@pytest.mark.cases(1)
def test_examples_run(place: int, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    try:
        exec(compile(here(blocks("python")[place]), f"README example {place + 1}", "exec"), names)
    finally:
        for value in names.values():
            if isinstance(value, SpeculativeModel):
                value.close()
    if "tokens" in names:
        assert names["tokens"].shape[1] > names["inputs"]["input_ids"].shape[1]


def commands() -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("specdec ")]


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
@pytest.mark.cases(1)
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"id": 7, "prompt": "What is 3 + 4?"}\n', "utf-8")
    text = command.replace("HEAD", "gsm-llama-eagle3").replace(" T", " gsm-llama").replace("…", "--help")
    done = CliRunner().invoke(cli, shlex.split(text)[1:])
    assert done.exit_code == 0, done.output
    assert done.output.strip() or (tmp_path / "a.jsonl").read_text()


def test_the_readme_has_both() -> None:
    assert len(blocks("python")) >= 2 and len(commands()) >= 8
