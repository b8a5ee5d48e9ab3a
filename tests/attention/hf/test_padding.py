"""What a launch knows of its padding tokens: while it runs, on its thread, for batches of its size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention.hf.padding import padding_among, padding_known


def batch(slots: list[int]) -> Any:
    return SimpleNamespace(slot_mapping=torch.tensor(slots), host=SimpleNamespace(page_size=16))


def test_known_inside_alone() -> None:
    outer, inner = batch([20, 0]), batch([31, 17, 0])
    assert padding_among(2) is None
    with padding_known(outer):
        with pytest.raises(RuntimeError), padding_known(inner):
            assert padding_among(3) == (inner.slot_mapping, 16)
            raise RuntimeError
        found = padding_among(2)
        assert found is not None and found[0] is outer.slot_mapping
        assert padding_among(3) is None, "a batch of another size"
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(padding_among, 2).result() is None, "another thread's launch"
    assert padding_among(2) is None
