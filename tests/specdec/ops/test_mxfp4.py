"""MXFP4 multiplied out, against transformers' conversion of a checkpoint."""

from __future__ import annotations

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specdec.ops.routed import dequantised_mxfp4


def test_every_byte_and_many_exponents() -> None:
    blocks = torch.arange(256).byte().view(1, 8, 2, 16)
    exponents = torch.arange(119, 135).byte().view(1, 8, 2)
    exponents[0, 0, 0] = 0  # 2^-127: kernels alone read it as 0
    theirs = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)  # [E, I, O]
    found = dequantised_mxfp4(blocks.flatten(2), exponents)
    assert torch.equal(found, theirs.transpose(1, 2)) and float(found.abs().max()) == 6 * 2**7


def test_a_byte_read_the_other_way_round_is_seen() -> None:
    blocks, exponents = torch.full((1, 1, 16), 0x21).byte(), torch.full((1, 1, 1), 127).byte()
    assert dequantised_mxfp4(blocks, exponents)[0, 0, :2].tolist() == [0.5, 1.0]
