"""Triton compiles our attention kernels for sm_90 without a GPU: its types are stricter than the interpreter's."""

from __future__ import annotations

import pytest

from tests.compiled import printed

pytest.importorskip("triton", reason="Triton is not installed")

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attention.cascade import kernel as cascade_kernel
from attention.kernels import cache_write, invariant_kernel, packed_kernel

POINTERS = {"slot_ptr": "*i64", **dict.fromkeys(("query_start_ptr", "page_indices_ptr", "page_indptr_ptr",
            "last_page_len_ptr", "shared_ptr", "arrived_ptr"), "*i32"),
            **dict.fromkeys(("sums_ptr", "stats_ptr", "prefix_sums_ptr", "prefix_stats_ptr"), "*fp32")}
FLOATS = ("scale", "scale_log2", "softcap", "value_scale", "key_inverse", "value_inverse", "limit")

shared_bytes = []

def compiled(kernel, constants, cache, aligned=(), warps=4):
    kinds = {"keys_ptr": cache, "values_ptr": cache} | POINTERS
    signature = {}
    for name in kernel.arg_names:
        other = "*bf16" if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32"
        signature[name] = "constexpr" if name in constants else kinds.get(name, other)
    places = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names)
                  if aligned and (name.endswith("_ptr") or name in aligned)}  # as the launches of whole caches are
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    shared_bytes.append(made.metadata.shared)
    return made.asm["ptx"]

if sys.argv[1:] == ["packed"]:
    heads = {"QUERY_HEADS": 32, "KV_HEADS": 8, "DIM": 128, "PAGE_SIZE": 16, "ROWS": 32, "DEPENDENT": True}
    strides = ("query_token", "query_head", "page_stride", "slot_stride", "head_stride")
    for tokens in (1, 6):
        tile = cascade_kernel.prefix_tiling(32 * tokens * 4, 8, 132, 232448)
        allowed = next(nbytes for _, nbytes, tiling in cascade_kernel._TILINGS if tiling.queries == tile.queries)
        tiles = {"TILE_QUERIES": tile.queries, "TILE_KEYS": tile.keys, "STAGES": tile.stages}
        least = {"LEAST_KEYS": tile.least_keys}
        before = compiled(cascade_kernel._prefix_kernel, heads | tiles | least, "*bf16", strides, tile.warps)
        assert shared_bytes[-1] <= allowed < shared_bytes[-1] + 32768, (tile, shared_bytes)
    tiles = {"TILE_QUERIES": 32, "TILE_KEYS": 64, "STAGES": 5, "LEAST_PAGES": 16}
    parts = {"PREFIX_PARTS": tile.parts, "PREFIX_TILE": tile.keys, "PREFIX_LEAST": tile.least_keys}
    causal = heads | tiles | parts | {"CAUSAL": True, "WINDOWED": False}
    rest = [compiled(packed_kernel._packed_kernel, causal | {"CASCADE": on}, "*bf16", strides) for on in (True, False)]
    both = causal | {"CASCADE": False, "CAUSAL": False, "TILE_QUERIES": 64}
    rest += [compiled(packed_kernel._packed_kernel, both | {"WINDOWED": on}, "*bf16", strides, 8)
             for on in (True, False)]
    print(*("griddepcontrol" in each for each in (before, *rest)), "wgmma" in before, len(rest[0]) > len(rest[1]))
    sys.exit()
dim_k, dim_v, cache = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
eight_bits = cache == "*fp8e4nv"
wide = [max(16, triton.next_power_of_2(d)) for d in (dim_k, dim_v)]
common = {"HAS_VALUES": True, "EIGHT_BITS": eight_bits, "PAGE_SIZE": 16, "DEPENDENT": True}
options = {"HAS_SOFTCAP": True, "HAS_WINDOW": True, "HAS_SINKS": True, "QUERY_HEADS": 8, "KV_HEADS": 2}
dims = {"DIM_K": dim_k, "DIM_V": dim_v, "WIDTH_K": wide[0], "WIDTH_V": wide[1]}
tiles = {"TILE_QUERIES": 32, "TILE_KEYS": 64, "STAGES": 2}
attend = compiled(invariant_kernel._invariant_attention_kernel, {**common, **options, **dims, **tiles}, cache)
block = triton.next_power_of_2(2 * max(dim_k, dim_v))
sizes = {"HEADS": 2, "DIM": dim_k, "DIM_V": dim_v, "BLOCK": block}
stored = compiled(cache_write._write_kernel, common | sizes, cache)
print("griddepcontrol" in attend, "griddepcontrol" in stored)
"""


FURTHER = pytest.param((128, 128, "*bf16"), marks=pytest.mark.long)


def said(*arguments: object) -> list[str]:
    """What compiling prints, word by word."""
    return printed(COMPILE, *arguments).split()


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(80, 80, "*fp8e4nv"), (192, 128, "*bf16"), FURTHER])
@pytest.mark.thorough
def test_attention_and_cache_write(dims: tuple[int, int, str]) -> None:
    assert said(*dims) == ["True", "True"]


@pytest.mark.slow
def test_packed_attention_and_shared_prefix() -> None:
    """Dependent launches all five; tiles of 64 and 128 queries for which their entries name
    shared memory enough, on Hopper's own tensor core instruction; flat has no merge."""
    assert said("packed") == ["True"] * 7
