"""The check mode is switched for a while, and comes back after an error too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import check_mode

from attention.checking import CHECKS, require
from attention.errors import InvariantError

ROOT = Path(__file__).resolve().parent.parent.parent


def test_modes_nest_and_come_back_after_an_error() -> None:
    assert CHECKS.on, "tests run in check mode"
    with check_mode(False):
        assert not CHECKS.on
        with pytest.raises(RuntimeError), check_mode(True):
            assert CHECKS.on
            raise RuntimeError
        assert not CHECKS.on
    assert CHECKS.on


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), (None, False)])
def test_the_environment_decides_at_import(value: str | None, on: bool) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "SPECDEC_CHECK"} | {"PYTHONPATH": str(ROOT)}
    environment |= {} if value is None else {"SPECDEC_CHECK": value}
    code = "from attention.checking import CHECKS; print(CHECKS.on)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(on)


def test_require() -> None:
    require(True, "never said")
    with pytest.raises(InvariantError, match="said"):
        require(False, "said")
