"""Triton compiles the kernels of recurrences for sm_90 without a GPU, and holds a state where it was loaded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.compiled import printed

pytest.importorskip("triton", reason="Triton is not installed")

COMPILE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attention.recurrence import conv_kernel as conv, chunks_kernel, delta_kernel as delta_short
from attention.recurrence import tokens_kernel as tokens
from attention.recurrence import scan_kernel as scan

INT = dict.fromkeys(("query_start_loc_ptr", "slots_ptr", "start_ptr", "replay_ptr", "num_new_ptr"), "*i32")
FLOAT = dict.fromkeys(("g_ptr", "state_ptr", "ring_g_ptr", "ring_beta_ptr", "dt_ptr", "ring_dt_ptr", "A_ptr", "w_ptr",
                       "u_ptr", "p_ptr", "facts_ptr"), "*fp32")

def compiled(kernel, constants, warps=8, stages=1):
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        other = "*bf16" if name.endswith("_ptr") else "fp32" if name == "scale" else "i32"
        signature[name] = "constexpr" if name in constants else (INT | FLOAT).get(name, other)
        if name not in constants and name.endswith(("_ptr", "_token", "_head", "_slot", "_group")):
            aligned[(i,)] = [["tt.divisibility", 16]]
    places = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    moved = re.findall(r"= ttg.convert_layout.*: tensor<([0-9x]+)x[a-z]", made.asm["ttgir"])
    return {"dependent": "griddepcontrol" in made.asm["ptx"], "shared": made.metadata.shared,
            "largest": max([eval(size.replace("x", "*")) for size in moved], default=0)}

common = {"RING_SIZE": 7, "DEPENDENT": True}
delta = common | {"HEADS": 32, "KEY_HEADS": 16, "DIM_K": 128, "DIM_V": 128, "WIDTH_K": 128}
delta |= {"NORMALIZE": True, "DELTA": True, "HAS_SKIP": False}
ssd = common | {"HEADS": 128, "KEY_HEADS": 8, "DIM_V": 64, "DIM_K": 128, "WIDTH_K": 128, "HAS_SKIP": True}
ssd |= {"NORMALIZE": False, "DELTA": False, "VECTOR_GATE": False}
chunk = {"CHUNK": chunks_kernel.CHUNK, "PRECISION": "tf32"}
told = {what: {} for what in ("tokens", "scans", "delta chunks", "delta short")}
found = told["tokens"]
for units in (32, 1024):
    tiles = tokens.state_tiling(units, 128, 128)
    sizes = {"PIECE": tiles.piece, "BLOCK_DV": tiles.block}
    own = delta | sizes | {"VECTOR_GATE": units == 32}
    found[f"delta {units}"] = compiled(tokens._tokens_kernel, own, tiles.warps)
    tiles = tokens.state_tiling(units, 64, 128)
    own = ssd | {"PIECE": tiles.piece, "BLOCK_DV": tiles.block}
    found[f"ssd {units}"] = compiled(tokens._tokens_kernel, own, tiles.warps)
found = told["scans"]
sizes = {"CHANNELS": 8192, "STATES": 16, "WIDTH": 16, "BLOCK": scan._BLOCK, "HAS_D": True}
found["scan"] = compiled(scan._scan_kernel, common | sizes, scan._WARPS)
for one, (block, channels) in ((True, conv._SHORT), (False, conv._LONG)):
    sizes = {"CHANNELS": 8192, "TAPS": 4, "RING_BLOCK": 8, "HAS_BIAS": False, "SILU": True, "ROWS": 32}
    sizes |= {"ONE_BLOCK": one, "BLOCK_T": block, "BLOCK_C": channels}
    found[f"conv {one}"] = compiled(conv._conv_kernel, common | sizes, 4)
found["ssd chunks"] = compiled(chunks_kernel._chunks_kernel, ssd | chunk | {"BLOCK_DV": 64, "CHUNK": 64}, stages=2)
found = told["delta chunks"]
own = delta | chunk | {"VECTOR_GATE": False}
found["prepare"] = compiled(chunks_kernel._prepare_kernel, own | {"BLOCK_V": 64, "ROWS": 32}, 2)
for units in (32, 1024):
    block, *options = chunks_kernel.delta_tiling(units, 128, True)
    found[f"pass {units}"] = compiled(chunks_kernel._chunks_kernel, own | {"BLOCK_DV": block}, *options)
exact = own | {"BLOCK_DV": 32, "BLOCK_V": 64, "ROWS": 32, "PRECISION": "tf32x3", "VECTOR_GATE": True}
found["prepare exact"] = compiled(chunks_kernel._prepare_kernel, exact, 4)
found["pass exact"] = compiled(chunks_kernel._chunks_kernel, exact, 4)
found = told["delta short"]
own = delta | {"AS_GIVEN": True, "PRECISION": "tf32"}
for replay, group in ((False, 1), (True, 2)):
    tiles = delta_short.short_tiling(128)
    sizes = own | {"REPLAY": replay, "GROUP": group, "BLOCK_DV": tiles.block_dv, "PIECE": tiles.piece}
    sizes |= {"READ_STAGES": tiles.stages[0], "CHANGE_STAGES": tiles.stages[1]}
    found[f"short {replay}"] = compiled(delta_short._short_kernel, sizes, tiles.warps)
    found[f"solve {group}"] = compiled(delta_short._solve_kernel, sizes, 3 - group)
print(json.dumps(told))
"""
HOPPER_SHARED = 227 << 10


def compiled_kernels() -> dict[str, dict[str, Any]]:
    """Facts of every kernel by its kind; one process compiles them all."""
    return json.loads(printed(COMPILE).splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.slow
def test_for_hopper() -> None:
    """Token by token, no tile of a state moves between threads: the tiling's reason (see `state_tiling`).

    One test: workers that share the kinds would each compile them all.
    """
    kinds = compiled_kernels()
    assert list(kinds) == ["tokens", "scans", "delta chunks", "delta short"] and all(kinds.values())
    for what, kernels in kinds.items():
        for name, facts in kernels.items():
            assert facts["dependent"], name
            assert facts["shared"] <= HOPPER_SHARED, name
            if what == "tokens":
                assert facts["largest"] <= 256, name
