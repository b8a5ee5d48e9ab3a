"""Triton compiles the FP8 kernels for sm_90 without a GPU: its types are stricter than the interpreter's."""

from __future__ import annotations

import pytest

from tests.compiled import printed

pytest.importorskip("triton", reason="Triton is not installed")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specdec.ops import elementwise_kernel, fp8_kernel

FP8, BF16, F32 = "*fp8e4nv", "*bf16", "*fp32"
EIGHT_BITS = {"x_ptr": FP8, "weight_ptr": FP8, "stack_ptr": FP8, "out_ptr": BF16}
QUANTISING = {"out_ptr": FP8, "eps": "fp32"}
SCALES = dict.fromkeys(("x_scale_ptr", "weight_scale_ptr", "stack_scale_ptr", "scale_ptr"), F32)
ANY = ("tokens", "share", "count", "num_pairs", "groups", "x_pairs", "row_blocks", "x_scale_token", "weight_scale_row")

def compiled(kernel, kinds, constants, warps=4, stages=3):
    kinds = SCALES | {"index_ptr": "*i64", "parts_ptr": F32} | kinds
    constants = constants | {n: 1 for n in ("x_scale_group", "weight_scale_group") if n in kernel.arg_names}
    signature, places, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        other = BF16 if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else kinds.get(name, other)
        if name in constants:
            places[(i,)] = constants[name]
        elif name not in (*ANY, "eps"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.shared <= 232448, made.metadata.shared
    return made.asm["ptx"]

D = {"DEPENDENT": True}
small = [compiled(fp8_kernel._quantise_kernel, QUANTISING, {"GROUPS": 8} | D)]
norm = {"WIDTH": 4096, "BLOCK": 4096, "ADDS": True}
small.append(compiled(elementwise_kernel._norm_kernel, QUANTISING, norm | D, 8))
small.append(compiled(elementwise_kernel._silu_product_kernel, QUANTISING, {"WIDTH": 14336, "BLOCK": 1024} | D))
compiled(fp8_kernel.sum_kernel, {}, {"SPLITS": 5, "SIZE": fp8_kernel._SUM_SIZE} | D, fp8_kernel._SUM_WARPS)
tilings = {fp8_kernel.tiling_of(n, rows, 4096) for n in (1, 32, 64, 128, 512) for rows in (4096, 28672)}
wide = []
for tile in sorted(tilings, key=str):
    tiles = {"TILE_TOKENS": tile.tokens, "TILE_ROWS": tile.rows, "WEIGHT_FIRST": tile.weight_first, "WHOLE": True}
    to = EIGHT_BITS | ({"out_ptr": F32} if tile.splits > 1 else {})
    constants = tiles | {"AT_ONCE": tile.at_once} | D
    wide.append(compiled(fp8_kernel._fp8_matmul_kernel, to, constants, tile.warps, tile.stages))
print(all("griddepcontrol" in ptx for ptx in small + wide), all("e4m3" in ptx for ptx in small + wide),
      sum("wgmma" in ptx and "e4m3.e4m3" in ptx for ptx in wide), len(wide))
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_kernels_compile_for_hopper() -> None:
    """Dependent launches all; 8-bit operands in Hopper's own instruction wherever a tile has its 64 rows."""
    same, eight_bits, wide, tilings = printed(COMPILE).split()
    assert (same, eight_bits) == ("True", "True") and wide == tilings
