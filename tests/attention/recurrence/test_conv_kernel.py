"""The short convolution's kernel in Triton's interpreter against the sum tap by tap in float64."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from attention.errors import InvalidInputError
from attention.recurrence import conv_kernel as conv
from attention.recurrence.conv_kernel import short_conv
from tests.attention.recurrence import token_by_token as oracle
from tests.attention.recurrence.recurrence_cases import apart, checked, close, conv_case
from tests.attention.recurrence.token_by_token import StateRows

ROUND = [(3, 1, 7, 2, 1), (1, 4, 2, 2, 1), (2, 3, 0, 0, 1), (6, 2, 1, 0, 3), (3, 0, 0, 0, 1), (0, 5, 3, 1, 0)]
"""(tokens, slot, start, replay, num_new): long past, two positions before, none, one, padding, no tokens."""


@pytest.mark.parametrize(
    ("taps", "silu", "dtype"), [(4, True, torch.float32), (3, False, torch.float16), (2, True, torch.float32)]
)
@pytest.mark.parametrize("blocks", [(8, 16), (4, 32)], ids=["a block a row", "in blocks"])
def test_a_round(
    taps: int, silu: bool, dtype: torch.dtype, blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And two tokens of no row."""
    torch.manual_seed(0)
    monkeypatch.setattr(conv, "_SHORT", blocks if blocks[0] == 8 else (1, 16))
    monkeypatch.setattr(conv, "_LONG", blocks)
    case = conv_case(17, 20, taps, dtype, has_bias=silu) | {"silu": silu}
    checked(short_conv, oracle.short_conv, case, StateRows.of(ROUND), 1e-6 if dtype == torch.float32 else 1e-3, 0)


def test_the_sum_is_rounded_before_silu_as_torch_does() -> None:
    torch.manual_seed(3)
    case = conv_case(40, 20, 4, torch.float16)
    total = oracle.short_conv(**apart(case) | {"silu": False}, rows=StateRows.of([(40, 1, 9, 0, 1)]))
    ours = short_conv(**apart(case), rows=StateRows.of([(40, 1, 9, 0, 1)]))
    right = torch.nn.functional.silu(total.half().float()).half()
    assert (ours != right).float().mean() < 0.01


def test_a_prompt_and_what_follows() -> None:
    """40 tokens at once, longer than the ring, then drafts, of which one is accepted, then a shorter chunk."""
    torch.manual_seed(1)
    case = conv_case(50, 20, 4)
    whole = oracle.short_conv(**apart(case), rows=StateRows.of([(50, 1, 0, 0, 50)]))
    start, outs = 0, []
    for tokens, kept in ((40, 40), (3, 2), (3, 3), (5, 5)):
        part = case | {"x": case["x"][start : start + tokens].clone()}
        part["x"][kept:] = 0.7  # rejected drafts
        outs.append(short_conv(**part, rows=StateRows.of([(tokens, 1, start, 0, 1)]))[:kept])
        start += kept
    close(torch.cat(outs), whole)


def test_what_is_refused() -> None:
    rows = StateRows.of([(3, 1, 0, 0, 3)])
    with pytest.raises(InvalidInputError, match="at most 33"):
        short_conv(**conv_case(3, 20, 34), rows=rows)
    case = conv_case(3, 20, 4)
    with pytest.raises(InvalidInputError, match="give the ring the inputs' dtype"):
        short_conv(**case | {"ring": case["ring"].half()}, rows=rows)
