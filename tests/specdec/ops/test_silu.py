"""The gated activation is the compiler's: float32 inside, rounded once."""

from __future__ import annotations

import pytest
import torch

from attention.backends.limits import HALF
from specdec.ops.silu import silu_product


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(1, 7, 48), (7, 48)])
def test_rounded_once(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gate, up = torch.randn(2, *shape, dtype=dtype) * 4
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(silu_product(gate, up).double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_the_compiler_is_told_the_truth() -> None:
    gate, up = torch.randn(1, 7, 96, dtype=HALF[0]).split(48, -1)
    torch.library.opcheck(silu_product, (gate, up), test_utils=("test_schema", "test_faketensor"))
