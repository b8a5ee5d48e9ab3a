"""Pages of mapped files are given back, and only pages that can be read again."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import specdec.wrapped.mapped_files as mapped_files
from specdec.wrapped.mapped_files import MappedFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="where files are mapped is read from /proc")
NUMBERS = 100_000


def resident(path: Path) -> int:
    """KiB of the file that are in this process."""
    blocks = re.findall(rf"{re.escape(str(path))}\n(?:\w+: .*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    return sum(map(int, blocks))


@pytest.fixture
def weights(tmp_path: Path) -> Any:
    """Two neighbours in a file, read once."""
    path = tmp_path / "some model.safetensors"
    save_file({name: torch.arange(NUMBERS, dtype=torch.float32) for name in "ab"}, path)
    with safe_open(path, "pt") as file:
        yield path, *(file.get_tensor(name) for name in "ab")


def test_pages_of_one_weight_are_given_back_and_can_be_read_again(weights: Any) -> None:
    path, a, b = weights
    total = float(a.sum() + b.sum())
    before = resident(path)
    MappedFiles().give_back(a)
    assert before - 4 * NUMBERS // 1024 <= resident(path) <= before - 4 * NUMBERS // 1024 + 8
    assert float(a.sum() + b.sum()) == total and torch.equal(a, b)
    assert resident(path) == before


def test_what_was_written_stays(weights: Any) -> None:
    path, a, b = weights
    b[NUMBERS // 2] = -1.0
    total = float(a.sum() + b.sum())
    before = resident(path)
    MappedFiles().give_back(b)
    MappedFiles().give_back(a)
    assert resident(path) == before
    assert b[NUMBERS // 2] == -1.0 and float(a.sum() + b.sum()) == total


def test_memory_of_no_file_stays() -> None:
    own = torch.ones(NUMBERS)
    MappedFiles().give_back(own)
    assert float(own.sum()) == NUMBERS


def test_nothing_is_given_back_where_the_system_does_not_say(weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, a, _ = weights
    a.sum()
    monkeypatch.setattr(mapped_files, "_SMAPS", path / "none")
    before = resident(path)
    MappedFiles().give_back(a)
    assert resident(path) == before
