"""Tests that need a GPU: marked `gpu`, skipped with a reason where there is none."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = None
    if not torch.cuda.is_available():
        missing = "no CUDA device"
    elif find_spec("flashinfer") is None:
        missing = "flashinfer is not installed"
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))
