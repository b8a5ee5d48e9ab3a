"""The short convolution's kernel in Triton's interpreter against the sum tap by tap in float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from attention.errors import InvalidInputError
from attention.kernels import conv
from attention.kernels.conv import short_conv
from tests.attention.kernels import token_by_token as oracle
from tests.attention.kernels.test_delta import close
from tests.attention.kernels.token_by_token import StateRows

CHANNELS = 20
ROUND = [(3, 1, 7, 2, 1), (1, 4, 2, 2, 1), (2, 3, 0, 0, 1), (6, 2, 1, 0, 3), (3, 0, 0, 0, 1), (0, 5, 3, 1, 0)]
"""(tokens, slot, start, replay, num_new): long past, two positions before, none, one, padding, no tokens; two tokens
of no row."""


def case_of(tokens: int, taps: int, dtype: torch.dtype = torch.float32, has_bias: bool = True) -> dict[str, Any]:
    wide = torch.randn(tokens, CHANNELS + 3).to(dtype)
    weight, bias = torch.randn(CHANNELS, taps).to(dtype), torch.randn(CHANNELS).to(dtype)
    ring = torch.randn(6, taps + 2, CHANNELS).to(dtype)
    return {"x": wide[:, :CHANNELS], "weight": weight, "bias": bias if has_bias else None, "ring": ring}


def checked(case: dict[str, Any], rows: StateRows, silu: bool) -> None:
    right, ours = ({**case, "ring": case["ring"].clone()} for _ in range(2))
    expected = oracle.short_conv(**right, silu=silu, rows=rows)
    out = short_conv(**ours, silu=silu, rows=rows)
    assert out.is_contiguous() and out.dtype == case["x"].dtype
    close(out, expected, 1e-6 if out.dtype == torch.float32 else 1e-3)
    assert torch.equal(ours["ring"][1:], right["ring"][1:])


@pytest.mark.parametrize(
    ("taps", "silu", "dtype"), [(4, True, torch.float32), (3, False, torch.float16), (2, True, torch.float32)]
)
@pytest.mark.parametrize("blocks", [(8, 16), (4, 32)], ids=["a block a row", "in blocks"])
def test_a_round(
    taps: int, silu: bool, dtype: torch.dtype, blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(conv, "_SHORT", blocks if blocks[0] == 8 else (1, 16))
    monkeypatch.setattr(conv, "_LONG", blocks)
    checked(case_of(17, taps, dtype, silu), StateRows.of(ROUND), silu)


def test_a_prompt_and_what_follows() -> None:
    """40 tokens at once, longer than the ring, then drafts, of which one is accepted, then a shorter chunk."""
    torch.manual_seed(1)
    case = case_of(50, 4)
    whole = oracle.short_conv(
        **{**case, "ring": case["ring"].clone()}, silu=True, rows=StateRows.of([(50, 1, 0, 0, 50)])
    )
    start, outs = 0, []
    for tokens, kept in ((40, 40), (3, 2), (3, 3), (5, 5)):
        part = {**case, "x": case["x"][start : start + tokens].clone()}
        part["x"][kept:] = 0.7  # rejected drafts
        outs.append(short_conv(**part, silu=True, rows=StateRows.of([(tokens, 1, start, 0, 1)]))[:kept])
        start += kept
    close(torch.cat(outs), whole)


def test_what_is_refused() -> None:
    case = case_of(3, 4)
    with pytest.raises(InvalidInputError, match="at most 33"):
        short_conv(**case_of(3, 34), silu=True, rows=StateRows.of([(3, 1, 0, 0, 3)]))
    with pytest.raises(InvalidInputError, match="give the ring the inputs' dtype"):
        short_conv(**{**case, "ring": case["ring"].half()}, silu=True, rows=StateRows.of([(3, 1, 0, 0, 3)]))
