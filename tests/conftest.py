"""Every test runs with the validators on, on one thread, against the packages of this repository."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

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

from fakes import attention_form, experts_form  # noqa: E402 - after _load_fakes

import specdec.model  # noqa: E402 - after the path is set


def _list_builtins_once() -> None:
    """Triton's interpreter lists what `triton.language` holds whenever a kernel is launched or a function called in it.

    That is most of its time. Which of the names are builtins does not change; what they name now is read every time.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    names: dict[Any, list[str]] = {}

    def members(owner: Any) -> list[tuple[str, Any]]:
        if owner not in names:
            names[owner] = [name for name, member in inspect.getmembers(owner) if is_builtin(member)]
        return [(name, getattr(owner, name)) for name in names[owner]]

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": members})


if "TRITON_INTERPRET" in os.environ and importlib.util.find_spec("triton"):
    _list_builtins_once()

twin_test = specdec.model.twin_test
_right_twins: dict[Any, Any] = {}


def _twin_test_once(probed: Any, max_model_len: int) -> Any:
    """`twin_test`, run once in a process for each class, configuration and length that comes out right.

    A twin is made of these and a fixed seed, not of the model's weights: its answer is always the same.
    """
    config = probed.model.config
    key = (
        type(probed.model),
        config.to_json_string(use_diff=False),
        attention_form(probed.model),
        experts_form(probed.model),
        frozenset(call.attention_spec for call in probed.calls),
        max_model_len,
    )
    if key not in _right_twins:
        _right_twins[key] = twin_test(probed, max_model_len)
    return _right_twins[key]


@pytest.fixture(scope="session", autouse=True)
def right_twins_once() -> Iterator[None]:
    """Hundreds of tests load the same few tiny models: see `_twin_test_once`."""
    with patch.object(specdec.model, "twin_test", _twin_test_once):
        yield


@pytest.fixture(scope="module")
def every_twin(right_twins_once: None) -> Iterator[None]:
    """For tests of what loading does: every model's twin is built and read, as it is for a user."""
    with patch.object(specdec.model, "twin_test", twin_test):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What importing and collecting left, half a million objects, is out of every later search for garbage.

    Each of the many collections that tests ask for, and that `close` makes, then walks over the tests' own objects.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Back in, so that the interpreter can free it at its exit: some libraries complain about what is left."""
    gc.unfreeze()
