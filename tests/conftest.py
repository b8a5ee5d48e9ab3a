"""Every test runs with the validators on, on one thread, against the packages of this repository."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

os.environ["SPECDEC_CHECK"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: see test_triton_kernels.py
torch.set_num_threads(1)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def _load_fakes() -> None:
    """Make `import fakes` work; tests/ itself stays off sys.path, where tests/attention would shadow `attention`."""
    spec = importlib.util.spec_from_file_location("fakes", Path(__file__).with_name("fakes.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fakes"] = module
    spec.loader.exec_module(module)


_load_fakes()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
