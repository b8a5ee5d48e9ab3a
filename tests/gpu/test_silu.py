"""The gated activation's kernel gives what its operator gives on a CPU."""

from __future__ import annotations

import pytest
import torch

from specdec.ops.elementwise import silu_product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 128, 640])
def test_equals_the_operator_on_a_cpu(tokens: int, dtype: torch.dtype) -> None:
    gate, up = torch.randn(1, tokens, 2 * 14336, dtype=dtype).split(14336, -1)
    out = silu_product(*torch.cat((gate, up), -1).cuda().split(14336, -1)).cpu()
    torch.testing.assert_close(out, silu_product(gate, up), rtol=torch.finfo(dtype).eps, atol=1e-6)
