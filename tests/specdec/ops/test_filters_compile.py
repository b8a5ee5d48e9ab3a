"""Triton compiles the kernels of sampled rows for sm_90 without a GPU: its types are stricter than the interpreter's.

And what they may load before they wait for the kernel before them is loaded there: it is why they are short.
"""

from __future__ import annotations

import pytest

from tests.compiled import printed

pytest.importorskip("triton", reason="Triton is not installed")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specdec.ops import draws_kernel, filters_kernel, logits_kernel

F32, I32, I64, LOGITS = "*fp32", "*i32", "*i64", "*bf16"
KINDS = {"logits_ptr": LOGITS, "copy_ptr": LOGITS, "listed_ptr": LOGITS, "top_k_ptr": I32, "counts_ptr": I32}
KINDS |= {"zeros_ptr": I32, "done_ptr": I32}
KINDS |= dict.fromkeys(("peaks_ptr", "index_ptr", "ids_ptr", "num_drafts_ptr", "num_accepted_ptr", "packed_ptr"), I64)
KINDS |= dict.fromkeys(("drafts_ptr", "target_ids_ptr", "kept_accepted_ptr"), I64)

def compiled(kernel, constants, warps=4, **kinds):
    signature, places, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        other = F32 if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else (KINDS | kinds).get(name, other)
        if name in constants:
            places[(i,)] = constants[name]
        elif name not in ("repeat", "per", "step"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]

def loads_before_waiting(ptx):
    return ptx[: ptx.index("griddepcontrol.wait")].count("ld.global")

for parts, index in ((16, {"index_ptr": None}), (64, {})):
    D = {"DEPENDENT": True, "PART": 2048, "PARTS": parts, **index}
    first, second = {"LEVEL": 0, "WIDTH": 16, "TILE": 128}, {"LEVEL": 1, "WIDTH": filters_kernel._SECOND, "TILE": 128}
    nothing_found = {"found_sums_ptr": None, "found_edges_ptr": None}
    filters = [compiled(filters_kernel._sums_kernel, D | first | nothing_found)]
    filters.append(compiled(filters_kernel._sums_kernel, D | second | {"copy_ptr": None}))
    width = {"CAPACITY": 512, "WIDTH": filters_kernel._SECOND}
    filters.append(compiled(filters_kernel._list_kernel, D | width, filters_kernel._LIST_WARPS))
    sizes = {"CAPACITY": 512, "TILE": min(256 * parts, 8192), "SHIFT": 16}
    filters.append(compiled(logits_kernel.settle_kernel, D | sizes, 8))
    print(*map(loads_before_waiting, filters))
D = {"DEPENDENT": True, "PART": 2048, "N": 3, "DRAFTS": 4, "TOKENS": 4, "proposal": None}
draws = [compiled(draws_kernel._draft_kernel, D | {"PARTS": 16}, sums_ptr=I64)]
draws.append(compiled(draws_kernel._accept_kernel, D, sums_ptr=I64))
draws.append(compiled(draws_kernel._resample_kernel, D | {"PARTS": 64}, sums_ptr=I64))
print(*map(loads_before_waiting, draws))
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_for_sm_90() -> None:
    said = printed(COMPILE)
    for line, least in zip(said.splitlines(), ((0, 5, 6, 6), (0, 6, 7, 7), (6, 7, 4)), strict=True):
        loads = [int(n) for n in line.split()]
        assert all(n >= m for n, m in zip(loads, least, strict=True)), said
        assert len(loads) == 3 or loads[0] == 0  # what the first of them is launched after may write all of it
