"""MXFP4 multiplied out, against transformers' conversion of a checkpoint; Triton compiles the kernel for few tokens,
which its interpreter cannot run (tests/gpu/test_experts.py does), for sm_90 without a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specdec.ops.mixtures.routed import dequantised_mxfp4
from tests.compiled import printed


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


@pytest.mark.parametrize("experts", [1, 3])
def test_multiplied_out_by_a_kernel(experts: int) -> None:
    """Any count of blocks, rows in turns apart, a view."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("tests/gpu runs the kernels compiled")
    from specdec.ops.mixtures.mxfp4_kernel import launch_dequantise

    blocks, exponents = torch.randint(256, (experts, 6, 96)).byte(), torch.randint(118, 122, (experts, 6, 3)).byte()
    blocks = blocks[..., :48]
    right = dequantised_mxfp4(blocks, exponents)
    assert torch.equal(launch_dequantise(blocks, exponents, torch.float32), right)
    apart = torch.cat([right[:, ::2], right[:, 1::2]], 1)
    assert torch.equal(launch_dequantise(blocks, exponents, torch.float32, apart=True), apart)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from specdec.ops.mixtures.mxfp4_kernel import _few_kernel

KINDS = {"x_ptr": "*i32", "stack_ptr": "*i32", "scale_ptr": "*u8", "index_ptr": "*i64", "bias_ptr": "*bf16",
         "out_ptr": "*bf16", "alpha": "fp32", "limit": "fp32"}
for gated, pairs in ((True, 8), (False, 16), (True, 16)):
    constants = dict(GATED=gated, INTERLEAVED=True, CLAMPED=True, BIASED=True, GROUPED=True, PAIRS=pairs,
                     DEPENDENT=True)
    signature, places, attributes = {}, {}, {}
    for i, name in enumerate(_few_kernel.arg_names):
        other = "*i32" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else KINDS.get(name, other)
        if name in constants:
            places[(i,)] = constants[name]
        elif name not in ("top_k", "row_quads", "scale_expert", "scale_row", "alpha", "limit"):  # 90: not by 16
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(fn=_few_kernel, signature=signature, constexprs=places, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx, layouts = made.asm["ptx"], made.asm["ttgir"]
    print("griddepcontrol.wait" in ptx, "mma.sync.aligned.m16n8k16" in ptx, ptx.count("bar.sync") <= 4,
          "local_alloc" in layouts, ptx.count("ld.global.v4") >= 36)
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_the_kernel_for_few_tokens_compiles_for_hopper() -> None:
    """Nothing goes through shared memory, no warp waits for another but where results are put in order, and what the
    loop reads it reads in 16 bytes, though the stride of a row is no multiple of 16."""
    pytest.importorskip("triton", reason="Triton is not installed")
    assert printed(COMPILE).splitlines() == ["True True True False True"] * 3
