"""Copies by a product with one: the same bits, wherever they stand."""

from __future__ import annotations

import pytest
import torch

from attention.errors import InvariantError
from specdec.copies import copied, copy_into

SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 6e-8, 1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_value_keeps_its_bits(dtype: torch.dtype) -> None:
    source = torch.cat([torch.tensor(SPECIAL), torch.randn(1000) * 100]).to(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    to = torch.empty_like(source)
    copy_into(to, source)
    assert torch.equal(to.view(bits), source.view(bits))
    assert torch.equal(copied(source).view(bits), source.view(bits)) and copied(source) is not source


def test_integers_and_slices() -> None:
    drafts = torch.full((4, 5), -1)
    copy_into(drafts[:, 2], torch.tensor([7, 2**62 + 1, 0, -3]))
    assert drafts[:, 2].tolist() == [7, 2**62 + 1, 0, -3] and (drafts[:, [0, 1, 3, 4]] == -1).all()


def test_another_shape_is_refused() -> None:
    with pytest.raises(InvariantError, match=r"from \(4, 2\) to \(3,\)"):
        copy_into(torch.zeros(3, 2)[:, 0], torch.zeros(4, 2))


def test_another_precision_is_rounded_to() -> None:
    source, to = torch.randn(1000), torch.zeros(1000, dtype=torch.bfloat16)
    copy_into(to, source)
    assert torch.equal(to, source.bfloat16())
